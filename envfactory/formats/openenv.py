"""An OpenEnv server (0.3): a folder that `openenv build` and `openenv validate` take, with the tasks in it.

    openenv.yaml  pyproject.toml  models.py  client.py  server/{app,environment}.py  server/Dockerfile
    tasks/<id>/{config.json, judge.py, files/..., workspace.tar.gz, statement.md, gold.patch}

One server has one environment, so its tasks must share their requirements. The tasks of other OpenEnv servers
exist only as their code: those cannot be imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import jinja2

from envfactory.formats import recipes
from envfactory.formats.archives import unpack_tree
from envfactory.formats.base import FIELD, Foreign, Parcel, Setup, extended, no_twins
from envfactory.formats.base import nothing_misread as misread
from envfactory.formats.fields import FormatError, checked_id
from envfactory.trees import File

__all__ = ["misread", "missing", "name", "read", "summary", "write"]

name = "openenv"
summary = "OpenEnv server: a folder with openenv.yaml and the tasks in it"
missing = ("which paths may change", "limits of memory and processes")
TEMPLATES = {
    "openenv.yaml": "openenv.yaml",
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "__init__.py": "__init__.py",
    "models.py": "models.py",
    "client.py": "client.py",
    "server/app.py": "app.py",
    "server/environment.py": "environment.py",
    "server/Dockerfile": "Dockerfile",
}


def read(path: Path) -> Iterator[Parcel]:
    """The tasks of a server's folder. Raises FormatError."""
    if not (path / "openenv.yaml").is_file():
        raise FormatError(f"{path} is no OpenEnv server: it has no openenv.yaml")
    if not (path / "tasks").is_dir():
        raise FormatError(f"{path} has no tasks/ folder: its tasks exist only as the server's code")
    return no_twins(map(_parcel, recipes.task_folders(path / "tasks", "config.json")), str(path))


def write(parcels: Iterable[Parcel], path: Path) -> int:
    """Write a new server's folder. Raises FormatError, also when the tasks differ in their environment."""
    setup: Setup | None = None
    first, count = "", 0
    with recipes.fresh_folder(path) as folder:
        for parcel in no_twins(parcels, "the export"):
            _, own = recipes.complete(parcel, name)
            if setup is None:
                setup, first = own, parcel.id
            elif own != setup:
                raise FormatError(
                    f"{first} and {parcel.id} need different environments, and an OpenEnv server has one: "
                    "export one --source at a time"
                )
            recipes.write_files(files(parcel), folder / "tasks" / checked_id(parcel.id, "the id"))
            count += 1
        if setup is None:
            raise FormatError("an OpenEnv server needs at least one task")
        recipes.write_files(server_files(setup, path.name, count), folder / ".")
    return count


def files(parcel: Parcel) -> dict[str, File]:
    """The files of one task."""
    workspace, _ = recipes.complete(parcel, name)
    return {
        "statement.md": File(parcel.statement.encode()),
        "gold.patch": File(parcel.gold),
        "workspace.tar.gz": File(recipes.workspace_archive(workspace)),
        **recipes.verifier_files(parcel, name),
    }


def server_files(setup: Setup, folder: str, count: int) -> dict[str, File]:
    """The server's own files."""
    loader = jinja2.PackageLoader("envfactory", "templates/openenv")
    templates = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    # One task's workspace lies in the image; `reset` unpacks the others'.
    environment = recipes.dockerfile(setup, archive="empty", at=setup.workdir)
    values = {
        "name": re.sub(r"\W+", "_", folder).strip("_") or "tasks",
        "count": count,
        "workdir": setup.workdir,
        "environment": environment.replace(f"ADD empty {setup.workdir}/\n", ""),
    }
    made = {
        path: File(templates.get_template(f"{template}.j2").render(values).encode())
        for path, template in TEMPLATES.items()
    }
    return made | {"server/__init__.py": File(b""), **recipes.metadata_archive(setup)}


def _parcel(folder: Path) -> Parcel:
    row = recipes.read_config(folder, "config.json")
    statement, gold = recipes.read_text(folder, "statement.md"), recipes.read_file(folder, "gold.patch")
    parcel = Parcel(**recipes.parcel_of(row, statement, gold, name))
    if parcel.id != folder.name:
        raise FormatError(f"{row.place}: instance_id must be the folder's name, {folder.name}")
    archive = folder / "workspace.tar.gz"
    parcel = replace(parcel, workspace=unpack_tree(recipes.read_file(folder, archive.name), str(archive)))
    parcel = extended(parcel, row.object(FIELD) if row.get(FIELD) is not None else None, row.place)
    if parcel.task is None:
        fields = {"instance_id": parcel.id, "config": row.rest()}
        parcel = replace(parcel, foreign=(*parcel.foreign, Foreign(format=name, fields=fields)))
    return parcel
