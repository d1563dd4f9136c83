"""What the folder formats share: Dockerfiles, the verifier's files, folders written whole or not at all."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from envfactory.formats.archives import pack_tree
from envfactory.formats.base import FIELD, Parcel, Setup, extend, no_twins
from envfactory.formats.fields import MAX_TEXT, Fields, FormatError, checked_id, parse_json, text_of
from envfactory.formats.parcels import applied
from envfactory.layout import is_protected
from envfactory.packs import PackWriter
from envfactory.sources.base import new_folder
from envfactory.trees import File, Tree, safe_path, write_tree

BASE = "python:{python}-slim-bookworm"
"""The image that Dockerfiles start from."""
SITE = "/usr/local/lib/python{python}/site-packages"
MAX_READ = 512 << 20


def dockerfile(setup: Setup, *, archive: str, at: str, more: Iterable[str] = ()) -> str:
    """A Dockerfile: pinned requirements, the package's metadata beside them, the workspace at `at`."""
    lines = [
        f"FROM {BASE.format(python=setup.python)}",
        "RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*",
    ]
    if setup.requirements:
        pins = " ".join(shlex.quote(pin) for pin in setup.requirements)
        lines.append(f"RUN pip install --no-cache-dir --no-deps {pins}")
    if setup.metadata:
        lines.append(f"ADD metadata.tar.gz {SITE.format(python=setup.python)}/")
    env = {k: v for k, v in setup.env.items() if k != "PATH"}
    env |= {"PYTHONPATH": env.get("PYTHONPATH", setup.workdir).replace(setup.workdir, at, 1)}
    lines += [f"ENV {name}={json.dumps(value)}" for name, value in sorted(env.items())]
    lines += [f"ADD {archive} {at}/", *more, f"WORKDIR {at}"]
    return "\n".join(lines) + "\n"


def metadata_archive(setup: Setup) -> dict[str, File]:
    """The file that a Dockerfile of ours adds to site-packages; empty where there is none."""
    if not setup.metadata:
        return {}
    tree = {path: File(text.encode()) for path, text in setup.metadata.items()}
    return {"metadata.tar.gz": File(pack_tree(tree))}


def workspace_archive(workspace: Tree) -> bytes:
    """The workspace with its one-commit repository, as the agent of the task finds it."""
    repository = {f".git/{path}": file for path, file in PackWriter().repository(workspace).items()}
    empty = {".git/objects/info/.keep": File(b""), ".git/refs/tags/.keep": File(b"")}
    return pack_tree(dict(workspace) | repository | empty)


def complete(parcel: Parcel, format: str) -> tuple[Tree, Setup]:
    """Workspace and setup of a parcel that has both. Raises FormatError."""
    if parcel.workspace is None or parcel.setup is None:
        raise FormatError(
            f"{parcel.id} names a repository and not what is in it, and {format} holds the files: "
            "import it with --repo first"
        )
    return parcel.workspace, parcel.setup


def verifier_files(parcel: Parcel, format: str) -> dict[str, File]:
    """`config.json`, `judge.py` and the task's own test files under `files/`, for a folder of tests."""
    workspace, _ = complete(parcel, format)
    after = applied(parcel.tests, workspace, f"the test patch of {parcel.id}")
    named = frozenset(arguments(parcel))
    guarded = {path: file for path, file in after.items() if is_protected(path, named) and not file.link}
    expected: dict[str, str] = dict.fromkeys((*parcel.fail_to_pass, *parcel.pass_to_pass), "passed")
    timeout_s = 60.0
    if parcel.task is not None:
        expected |= {name: status.value for name, status in parcel.task.verifier.expected.items()}
        timeout_s = parcel.task.verifier.timeout_s
    config: dict[str, Any] = {
        "instance_id": parcel.id,
        "repo": parcel.repo,
        "base_commit": parcel.commit,
        "version": parcel.version,
        "created_at": parcel.created,
        "FAIL_TO_PASS": list(parcel.fail_to_pass),
        "PASS_TO_PASS": list(parcel.pass_to_pass),
        "expected": dict(sorted(expected.items())),
        "arguments": list(arguments(parcel)),
        "timeout_s": timeout_s,
        "test_patch": text_of(parcel.tests, f"the test patch of {parcel.id}", format),
        FIELD: extend(parcel, natives=("statement", "tests"), workspace=False),
    }
    text = json.dumps(config, indent=1, ensure_ascii=False) + "\n"
    judge = resources.files("envfactory.formats").joinpath("judge.py").read_bytes()
    files = {"config.json": File(text.encode()), "judge.py": File(judge)}
    return files | {f"files/{path}": file for path, file in guarded.items()}


def parcel_of(config: Fields, statement: str, gold: bytes, format: str) -> dict[str, Any]:
    """Arguments of a Parcel from a `config.json` of ours; the caller adds what else its format says."""
    fail_to_pass = config.texts("FAIL_TO_PASS")
    if not fail_to_pass:
        raise FormatError(
            f"{config.place}: FAIL_TO_PASS is empty, so that doing nothing would solve the task"
        )
    return {
        "id": config.id("instance_id"),
        "statement": statement,
        "gold": gold,
        "tests": config.text("test_patch", "").encode(),
        "fail_to_pass": fail_to_pass,
        "pass_to_pass": config.texts("PASS_TO_PASS", default=()),
        "repo": config.text("repo", ""),
        "commit": config.text("base_commit", ""),
        "version": config.text("version", ""),
        "created": config.text("created_at", ""),
    }


def arguments(parcel: Parcel) -> tuple[str, ...]:
    """The test files that a verifier runs."""
    if parcel.task is not None:
        return parcel.task.verifier.arguments
    return tuple(sorted({test.partition("::")[0] for test in (*parcel.fail_to_pass, *parcel.pass_to_pass)}))


# ---- folders ------------------------------------------------------------------------------------------


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path`, or vanishes on any error. FormatError if `path` exists."""
    if path.exists() or path.is_symlink():
        raise FormatError(f"{path} exists already: remove it or choose another name")
    with new_folder(path.resolve()) as folder:
        folder.chmod(0o755)
        yield folder


def write_files(files: Mapping[str, File], folder: Path) -> None:
    """Write files beneath a folder."""
    for path in files:
        if safe_path(path) != path:
            raise FormatError(f"{path[:80]!r} is no path inside a folder")
    write_tree(files, folder)


def write_folders(
    parcels: Iterable[Parcel], path: Path, files: Callable[[Parcel], Mapping[str, File]]
) -> int:
    """Write a new folder with a folder of `files` for each task; the number of tasks. Raises FormatError."""
    count = 0
    with fresh_folder(path) as folder:
        for parcel in no_twins(parcels, "the export"):
            write_files(files(parcel), folder / checked_id(parcel.id, "the id"))
            count += 1
    return count


def read_file(folder: Path, name: str) -> bytes:
    """A file of a stranger's folder; neither it nor a folder on the way may be a link. Raises FormatError."""
    place = folder / name
    if os.path.realpath(place) != os.path.join(os.path.realpath(folder), name):
        raise FormatError(f"{place} is a symbolic link: put the file itself there")
    if not place.is_file():
        raise FormatError(f"{place} is missing")
    if place.stat().st_size > MAX_READ:
        raise FormatError(f"{place} is larger than {MAX_READ >> 20} MiB")
    return place.read_bytes()


def read_text(folder: Path, name: str) -> str:
    """A UTF-8 file, line ends untouched. Raises FormatError."""
    data = read_file(folder, name)
    if len(data) > MAX_TEXT:
        raise FormatError(f"{folder / name} is larger than {MAX_TEXT >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise FormatError(f"{folder / name} is not UTF-8 text") from None


def read_config(folder: Path, name: str) -> Fields:
    """A JSON object. Raises FormatError."""
    return Fields.of(parse_json(read_file(folder, name), str(folder / name)), str(folder / name))


def task_folders(path: Path, marker: str) -> list[Path]:
    """The folder itself if it holds `marker`, else its folders that do, sorted. Raises FormatError."""
    if not path.is_dir():
        raise FormatError(f"{path} is no folder")
    if (path / marker).is_file():
        return [path]
    found = sorted(one for one in path.iterdir() if (one / marker).is_file() and not one.is_symlink())
    if not found:
        raise FormatError(f"{path} holds no task: no folder in it has a {marker}")
    return found
