"""SWE-bench 5.x: a task repository (a folder of `tasks/<id>/`), or a file of its rows.

    sweb.yaml                       which datasets and splits there are
    tasks/<id>/task.yaml  tests.json  problem_statement.md  hints.md  gold.patch  test.patch  eval.sh
               Dockerfile  workspace.tar.gz  metadata.tar.gz  posttrain.json

Each row carries what the harness runs (`eval_script`), how it reads the log (`log_parser`) and the image's
name; the Dockerfile builds that image from the folder itself.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from envfactory.formats.archives import unpack_tree
from envfactory.formats.base import FIELD, Parcel, no_twins
from envfactory.formats.fields import Fields, FormatError, checked_id, text_of
from envfactory.formats.recipes import (
    arguments,
    complete,
    dockerfile,
    fresh_folder,
    metadata_archive,
    read_config,
    read_file,
    read_text,
    task_folders,
    workspace_archive,
    write_files,
)
from envfactory.formats.rows import SUFFIXES, read_rows, write_rows
from envfactory.formats.swebench import container, from_row, missing, to_row
from envfactory.formats.swebench import misread as misread_by
from envfactory.trees import File
from verifiers.patches import touched

__all__ = ["misread", "missing", "name", "read", "summary", "write"]

name = "swebench-v5"
summary = "SWE-bench 5 task repository: a folder with sweb.yaml and tasks/, or a file of its rows"
WORKDIR = "/testbed"
DATASET = "posttrain/tasks"
_FILES = {"patch": "gold.patch", "test_patch": "test.patch", "eval_script": "eval.sh"}
_FILES |= {"problem_statement": "problem_statement.md"}
_END = "EOF_114329324912"


def read(path: Path) -> Iterator[Parcel]:
    """The tasks of a task repository or of a file of rows. Raises FormatError."""
    if path.is_dir() and (path / "tasks").is_dir():
        rows = (_folder_row(folder) for folder in task_folders(path / "tasks", "task.yaml"))
        return no_twins(rows, str(path))
    return no_twins((from_row(row, name) for row in read_rows(path)), str(path))


def write(parcels: Iterable[Parcel], path: Path) -> int:
    """Write a new task repository, or a new file of rows where `path` has a suffix of one."""
    parcels = no_twins(parcels, "the export")
    if path.suffix in SUFFIXES:
        return write_rows((v5_row(parcel) for parcel in parcels), path)
    count, splits = 0, set[str]()
    with fresh_folder(path) as folder:
        for parcel in parcels:
            row = v5_row(parcel, workspace=False)
            splits.add(row["split"])
            write_files(files(parcel, row), folder / "tasks" / checked_id(row["instance_id"], "the id"))
            count += 1
        config = {"datasets": [DATASET], "splits": sorted(splits) or ["test"]}
        write_files({"sweb.yaml": _yaml(config)}, folder / ".")
    return count


def misread(parcel: Parcel) -> list[str]:
    """Test ids that its parser loses something of."""
    return misread_by(parcel, name)


def v5_row(parcel: Parcel, *, workspace: bool = True) -> dict[str, Any]:
    """A row as the harness of 5.x takes it."""
    split = parcel.task.split if parcel.task else None
    id = parcel.fields(name).get("instance_id", parcel.id)
    derived = {
        "image": parcel.image or container(id),
        "log_parser": "parse_log_pytest_v2",
        "eval_type": "pass_and_fail",
        "eval_script": eval_script(parcel, name),
        "split": split or "test",
        "datasets": [DATASET],
    }
    return to_row(parcel, name, derived, workspace=workspace)


def eval_script(parcel: Parcel, format: str) -> str:
    """The script that brings the tests in, runs them between the markers, and puts the files back."""
    tests = " ".join(map(shlex.quote, arguments(parcel)))
    patched = sorted(set(touched(parcel.tests)))
    known = [path for path in patched if parcel.workspace is None or path in parcel.workspace]
    reset = (
        f"git checkout {parcel.commit or 'HEAD'} -- " + " ".join(map(shlex.quote, known)) if known else ":"
    )
    test_patch = text_of(parcel.tests, f"the test patch of {parcel.id}", format)
    if _END in test_patch:
        raise FormatError(f"the test patch of {parcel.id} holds the mark {_END}, which ends it in {format}")
    lines = ["#!/bin/bash", "set -uxo pipefail", f"cd {WORKDIR}", reset]
    if test_patch:
        lines += [f"git apply -v - <<'{_END}'", test_patch.removesuffix("\n"), _END]
    lines += [
        ": '>>>>> Start Test Output'",
        f"python -m pytest -rA --tb=short -p no:cacheprovider {tests}",
        ": '>>>>> End Test Output'",
        reset,
    ]
    return "\n".join(lines) + "\n"


def files(parcel: Parcel, row: dict[str, Any]) -> dict[str, File]:
    """The files of a task's folder."""
    workspace, setup = complete(parcel, name)
    columns = dict(row)
    made = {file: File(columns.pop(column).encode()) for column, file in _FILES.items()}
    if hints := columns.pop("hints_text"):
        made["hints.md"] = File(hints.encode())
    ours = columns.pop(FIELD, None)
    tests = {key: columns.pop(key) for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    return {
        **made,
        "task.yaml": _yaml(columns),
        "tests.json": _json(tests),
        "Dockerfile": File(dockerfile(setup, archive="workspace.tar.gz", at=WORKDIR).encode()),
        "workspace.tar.gz": File(workspace_archive(workspace)),
        **({"posttrain.json": File(ours.encode())} if ours else {}),
        **metadata_archive(setup),
    }


def _folder_row(folder: Path) -> Parcel:
    place = str(folder / "task.yaml")
    columns = load_yaml(read_text(folder, "task.yaml"), place)
    for column, file in _FILES.items():
        columns[column] = read_text(folder, file)
    if (folder / "hints.md").exists():
        columns["hints_text"] = read_text(folder, "hints.md")
    columns |= read_config(folder, "tests.json").value
    if columns.get("instance_id") != folder.name:
        raise FormatError(f"{place}: instance_id must be the folder's name, {folder.name}")
    if (folder / "posttrain.json").exists():
        columns[FIELD] = read_config(folder, "posttrain.json").value
    parcel = from_row(Fields.of(columns, place), name)
    archive = folder / "workspace.tar.gz"
    if archive.exists():
        tree = unpack_tree(read_file(folder, archive.name), str(archive))
        parcel = replace(parcel, workspace=tree)
    return parcel


def load_yaml(text: str, place: str) -> dict[str, Any]:
    """A YAML mapping of plain values; aliases are refused, for they can unfold without end."""
    import yaml

    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, yaml.SafeLoader)):
            raise FormatError(f"{place} uses YAML aliases: write the values out")
        value = yaml.safe_load(text)
        json.dumps(value, default=str).encode()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FormatError(f"{place} is not YAML that can be read ({_first_line(error)})") from error
    return {str(k): _dated(v) for k, v in Fields.of(value, place).value.items()}


def _dated(value: Any) -> Any:
    return value.isoformat() if hasattr(value, "isoformat") else value


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["damaged"])[0][:120]


def dump_yaml(value: dict[str, Any]) -> str:
    """YAML with sorted keys, wide lines and text in blocks."""
    import yaml

    return yaml.safe_dump(value, sort_keys=True, allow_unicode=True, default_flow_style=False, width=4096)


def _yaml(value: dict[str, Any]) -> File:
    return File(dump_yaml(value).encode())


def _json(value: dict[str, Any]) -> File:
    return File((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())
