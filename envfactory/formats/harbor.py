"""Harbor task folders (schema 1.4): one folder a task, its verifier in a container of its own.

    task.toml  instruction.md
    environment/Dockerfile  environment/workspace.tar.gz     what the agent gets
    solution/solve.sh  solution/gold.patch                   for Harbor's oracle only
    tests/Dockerfile  tests/test.sh  tests/judge.py  tests/config.json  tests/files/...

The verifier's container starts without the paths that the agent may change; Harbor brings them from the
agent's container as artifacts. So neither the agent's processes nor its other files reach the tests. Folders
of others, whose verdict is whatever `tests/test.sh` writes, can be audited but not imported.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from envfactory.formats import recipes, toml
from envfactory.formats.archives import pack_tree, unpack_tree
from envfactory.formats.base import FIELD, Foreign, Parcel, extended, no_twins
from envfactory.formats.base import nothing_misread as misread
from envfactory.formats.fields import FormatError
from envfactory.trees import File

__all__ = ["misread", "missing", "name", "read", "summary", "write"]

name = "harbor"
summary = "Harbor task folders (schema 1.4): a folder of folders with task.toml"
missing = ("limits of processes",)

TEST = """\
#!/bin/bash
# The verdict is /logs/verifier/reward.json. No file there means: could not be judged.
exec python -P /tests/judge.py --config /tests/config.json --files /tests/files \\
    --workspace {workdir} --out /logs/verifier
"""
SOLVE = """\
#!/bin/bash
set -eu
cd {workdir}
git apply --whitespace=nowarn /solution/gold.patch
"""


def read(path: Path) -> Iterator[Parcel]:
    """The task in a folder, or those in its folders. Raises FormatError."""
    return no_twins((_read(folder) for folder in recipes.task_folders(path, "task.toml")), str(path))


def write(parcels: Iterable[Parcel], path: Path) -> int:
    """Write a new folder with a folder for each task. Raises FormatError."""
    return recipes.write_folders(parcels, path, files)


def files(parcel: Parcel) -> dict[str, File]:
    """The files of a task's folder."""
    workspace, setup = recipes.complete(parcel, name)
    allowed = parcel.task.verifier.allowed if parcel.task else (".",)
    kept = {p: f for p, f in workspace.items() if not _is_within(p, allowed)}
    environment = {
        "Dockerfile": _text(recipes.dockerfile(setup, archive="workspace.tar.gz", at=setup.workdir)),
        "workspace.tar.gz": File(recipes.workspace_archive(workspace)),
        **recipes.metadata_archive(setup),
    }
    copies = ["COPY test.sh judge.py config.json /tests/", "COPY files /tests/files"]
    tests = {
        "Dockerfile": _text(
            recipes.dockerfile(setup, archive="workspace.tar.gz", at=setup.workdir, more=copies)
        ),
        "workspace.tar.gz": File(pack_tree(kept)),
        "test.sh": _text(TEST.format(workdir=setup.workdir), executable=True),
        **recipes.metadata_archive(setup),
        **recipes.verifier_files(parcel, name),
    }
    solution = {
        "solve.sh": _text(SOLVE.format(workdir=setup.workdir), executable=True),
        "gold.patch": File(parcel.gold),
    }
    made = {"task.toml": _text(toml.dumps(config(parcel))), "instruction.md": _text(parcel.statement)}
    for folder, content in (("environment", environment), ("tests", tests), ("solution", solution)):
        made |= {f"{folder}/{path}": file for path, file in content.items()}
    return made


def config(parcel: Parcel) -> dict[str, Any]:
    """The content of task.toml."""
    _, setup = recipes.complete(parcel, name)
    said = parcel.fields(name)
    allowed = parcel.task.verifier.allowed if parcel.task else ()
    limits = parcel.task.environment.limits if parcel.task else None
    memory, disk = (limits.memory_mb, limits.disk_mb) if limits else (None, None)
    origin = parcel.task.origin if parcel.task else None
    return {
        "schema_version": "1.4",
        "artifacts": [
            {"source": f"{setup.workdir}/{path.rstrip('/')}", "exclude": ["__pycache__", "*.pyc"]}
            for path in allowed
        ],
        "task": {"name": f"posttrain/{parcel.id}", "description": f"A task of {parcel.repo}."},
        "metadata": {
            "source": origin.source if origin else parcel.repo,
            "kind": origin.kind if origin else "import",
            **said.get("metadata", {}),
        },
        "agent": {"timeout_sec": 1800.0},
        "verifier": {
            "timeout_sec": 600.0,
            "environment_mode": "separate",
            "environment": {"network_mode": "no-network", "memory_mb": memory},
        },
        "environment": {
            "network_mode": "no-network",
            "cpus": 1,
            "memory_mb": memory,
            "storage_mb": max(disk, 2048) if disk else None,
            "workdir": setup.workdir,
        },
    }


def _read(folder: Path) -> Parcel:
    place = str(folder / "task.toml")
    try:
        said = tomllib.loads(recipes.read_text(folder, "task.toml"))
    except tomllib.TOMLDecodeError as error:
        raise FormatError(f"{place} is not TOML ({str(error)[:100]})") from error
    if said.get("steps"):
        raise FormatError(f"{place} has several steps, and a task here has one: split it")
    if not (folder / "tests" / "config.json").is_file():
        raise FormatError(
            f"{folder} leaves the verdict to tests/test.sh, which names no tests: "
            "judge it with `posttrain tasks audit --format harbor`"
        )
    row = recipes.read_config(folder / "tests", "config.json")
    gold_place = "solution/gold.patch" if (folder / "solution/gold.patch").is_file() else None
    gold = recipes.read_file(folder, gold_place) if gold_place else row.text("patch").encode()
    arguments = recipes.parcel_of(row, recipes.read_text(folder, "instruction.md"), gold, name)
    archive = folder / "environment/workspace.tar.gz"
    if archive.is_file():
        data = recipes.read_file(folder, "environment/workspace.tar.gz")
        arguments["workspace"] = unpack_tree(data, str(archive))
    ours = row.object(FIELD) if row.get(FIELD) is not None else None
    parcel = extended(Parcel(**arguments), ours, row.place)
    if parcel.task is None:
        fields = {"instance_id": parcel.id, "metadata": said.get("metadata", {}), "config": row.rest()}
        parcel = Parcel(**arguments, foreign=(Foreign(format=name, fields=fields),))
    return parcel


def _is_within(path: str, allowed: tuple[str, ...]) -> bool:
    return any(p == "." or path == p.rstrip("/") or path.startswith(p.rstrip("/") + "/") for p in allowed)


def _text(text: str, *, executable: bool = False) -> File:
    return File(text.encode(), executable=executable)
