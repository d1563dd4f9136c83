"""terminal-bench task folders (0.2): task.yaml, Dockerfile, docker-compose.yaml, solution.sh, tests/ ...

Its parser drops the file from a test's name and counts what is printed, so the task has one test of its own,
which passes exactly when our judge gives reward 1.
"""

from __future__ import annotations

import base64
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from envfactory.formats import recipes
from envfactory.formats.archives import unpack_tree
from envfactory.formats.base import FIELD, Foreign, Parcel, extended, no_twins
from envfactory.formats.base import nothing_misread as misread
from envfactory.formats.fields import Fields, FormatError, decode_base64
from envfactory.formats.swebench_v5 import dump_yaml, load_yaml
from envfactory.trees import File

__all__ = ["misread", "missing", "name", "read", "summary", "write"]

name = "terminal-bench"
summary = "terminal-bench task folders: a folder of folders with task.yaml"
missing = ("which paths may change", "limits of memory and processes")

COMPOSE = """\
services:
  client:
    build:
      dockerfile: Dockerfile
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: ["sh", "-c", "sleep infinity"]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
      - ${T_BENCH_TASK_AGENT_LOGS_PATH}:${T_BENCH_CONTAINER_AGENT_LOGS_PATH}
"""
SOLUTION = """\
#!/bin/bash
set -eu
cd {workdir}
base64 -d <<'PATCH' | git apply --whitespace=nowarn
{patch}
PATCH
"""
RUN = """\
#!/bin/bash
cd "$TEST_DIR" && python -m pytest -rA -p no:cacheprovider test_outputs.py
"""
TEST = '''\
"""The one test of this task: its verifier gives reward 1."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_task():
    command = [sys.executable, "-P", HERE / "judge.py", "--config", HERE / "config.json"]
    command += ["--files", HERE / "files", "--workspace", "{workdir}"]
    assert subprocess.run(command).returncode == 0
'''


def read(path: Path) -> Iterator[Parcel]:
    """The task in a folder, or those in its folders. Raises FormatError."""
    return no_twins(map(_parcel, recipes.task_folders(path, "task.yaml")), str(path))


def write(parcels: Iterable[Parcel], path: Path) -> int:
    """Write a new folder with a folder for each task. Raises FormatError."""
    return recipes.write_folders(parcels, path, files)


def files(parcel: Parcel) -> dict[str, File]:
    """The files of a task's folder."""
    workspace, setup = recipes.complete(parcel, name)
    patch = "\n".join(textwrap.wrap(base64.b64encode(parcel.gold).decode(), 76))
    texts = {
        "task.yaml": dump_yaml(config(parcel)),
        "docker-compose.yaml": COMPOSE,
        "Dockerfile": recipes.dockerfile(setup, archive="workspace.tar.gz", at=setup.workdir),
        "solution.sh": SOLUTION.format(workdir=setup.workdir, patch=patch),
        "run-tests.sh": RUN,
        "tests/test_outputs.py": TEST.format(workdir=setup.workdir),
    }
    made = {path: File(text.encode(), executable=path.endswith(".sh")) for path, text in texts.items()}
    made |= {
        "workspace.tar.gz": File(recipes.workspace_archive(workspace)),
        **recipes.metadata_archive(setup),
    }
    return made | {f"tests/{path}": file for path, file in recipes.verifier_files(parcel, name).items()}


def config(parcel: Parcel) -> dict[str, Any]:
    """The content of task.yaml."""
    timeout = parcel.task.verifier.timeout_s if parcel.task else 60.0
    made = {
        "instruction": parcel.statement,
        "author_name": "posttrain",
        "author_email": "unknown",
        "difficulty": "unknown",
        "category": "software-engineering",
        "tags": ["swe", parcel.repo],
        "parser_name": "pytest",
        "max_agent_timeout_sec": 1800.0,
        "max_test_timeout_sec": max(60.0, timeout * 10),
        "run_tests_in_same_shell": False,
    }
    return made | {k: v for k, v in parcel.fields(name).items() if k != "instance_id"}


def _parcel(folder: Path) -> Parcel:
    place = str(folder / "task.yaml")
    said = Fields.of(load_yaml(recipes.read_text(folder, "task.yaml"), place), place)
    if not (folder / "tests" / "config.json").is_file():
        raise FormatError(
            f"{folder} leaves the verdict to its own tests, which name no expected set: "
            "map it to harbor and judge it with `posttrain tasks audit --format harbor`"
        )
    row = recipes.read_config(folder / "tests", "config.json")
    script = recipes.read_text(folder, "solution.sh")
    match = re.search(r"<<'PATCH'[^\n]*\n(.*?)\n?PATCH\n", script, re.S)
    gold = decode_base64("".join(match[1].split()), f"{folder}/solution.sh") if match else b""
    if not match:
        gold = row.text("patch", "").encode()
    parcel = Parcel(**recipes.parcel_of(row, said.text("instruction"), gold, name))
    archive = folder / "workspace.tar.gz"
    if archive.exists():
        parcel = replace(parcel, workspace=unpack_tree(recipes.read_file(folder, archive.name), str(archive)))
    parcel = extended(parcel, row.object(FIELD) if row.get(FIELD) is not None else None, row.place)
    usual = config(parcel)
    other = {key: value for key, value in said.value.items() if usual.get(key) != value}
    if other or parcel.task is None:
        foreign = Foreign(format=name, fields={"instance_id": parcel.id} | other)
        parcel = replace(parcel, foreign=(*parcel.foreign, foreign))
    return parcel
