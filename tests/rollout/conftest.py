"""A real task: a small package with a bug, in an image with pytest and a git workspace."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from catalog.blobs import Blobs
from catalog.models import (
    Candidate,
    CandidateSet,
    Environment,
    Origin,
    Problem,
    Task,
    TestStatus,
    VerifierSpec,
)
from sandbox.base import SandboxProvider, SandboxUnavailable, provider
from sandbox.images import ImageStore
from sandbox.trees import tree_digest
from tests.verifiers.conftest import make_environment
from verifiers.grading import Grader

GOOD = "def first(items):\n    if len(items) > 0:\n        return items[0]\n    return None\n"
BUGGY = GOOD.replace("> 0", ">= 0")
TESTS = """\
from pkg.core import first


def test_empty():
    assert first([]) is None


def test_some():
    assert first([3]) == 3
"""
VISIBLE = "tests/test_core.py::test_empty"


@dataclass(frozen=True)
class Room:
    """Everything that an agent needs for real work on one task."""

    sandboxes: SandboxProvider
    grader: Grader
    blobs: Blobs
    task: Task
    choices: CandidateSet


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def task_image(home) -> tuple[ImageStore, str, str]:
    """(store, image, digest of the workspace)."""
    store = ImageStore(home / "images")
    make_environment(home / "environment")
    environment = store.add_layer(store.host_base(), home / "environment", at="/opt/env")
    tree = home / "workspace"
    for path, text in {"pkg/__init__.py": "", "pkg/core.py": BUGGY, "tests/test_core.py": TESTS}.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    identity = {"GIT_AUTHOR_DATE": "1700000000 +0000", "GIT_COMMITTER_DATE": "1700000000 +0000"}
    git = ["git", "-C", str(tree), "-c", "user.name=posttrain", "-c", "user.email=none@invalid"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "start"]):
        subprocess.run([*git, *arguments], check=True, env={**os.environ, **identity})
    return store, store.add_layer(environment, tree, at="/workspace"), tree_digest(tree)


@pytest.fixture
async def room(home, task_image) -> AsyncIterator[Room]:
    store, image, tree = task_image
    blobs = Blobs(home / "blobs")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo("tests/test_core.py")
        member.size = len(TESTS)
        tar.addfile(member, io.BytesIO(TESTS.encode()))
    task = Task(
        id="first-000000000000",
        origin=Origin(kind="procedural", source="path", revision="1", path="pkg/core.py", function="first"),
        problem=Problem(statement="test_empty fails: mend first().", visible_tests=(VISIBLE,)),
        environment=Environment(image=image, tree=tree),
        verifier=VerifierSpec(
            fail_to_pass=(VISIBLE,),
            pass_to_pass=("tests/test_core.py::test_some",),
            expected={VISIBLE: TestStatus.PASSED, "tests/test_core.py::test_some": TestStatus.PASSED},
            arguments=("tests/test_core.py",),
            protected=blobs.put(archive.getvalue()),
            allowed=("pkg/",),
        ),
        solution=blobs.put(b"gold"),
    )
    edits = ["== 0", "> 1", "> 0", "!= 0", ">= 2", "< 0", "<= 0", ">= 3"]
    passes = [text in ("> 0", "!= 0") for text in edits]
    candidates = tuple(
        Candidate(
            operator="compare",
            path="pkg/core.py",
            line=2,
            before="if len(items) >= 0:",
            after=f"if len(items) {text}:",
            content=blobs.put(BUGGY.replace(">= 0", text).encode()),
        )
        for text in edits
    )
    choices = CandidateSet(
        task_id=task.id,
        candidates=candidates,
        passes_visible=tuple(not text.startswith(("==", "<=")) for text in edits),
        passes=tuple(passes),
        tried=8,
        test_source=TESTS.split("\n\n\n")[1],
        failure="E       IndexError: list index out of range",
    )
    sandboxes = provider("namespace", store=store.root)
    try:
        sandboxes.capabilities()
    except SandboxUnavailable as reason:
        pytest.skip(str(reason))
    async with Grader(sandboxes, store, blobs) as grader:
        yield Room(sandboxes, grader, blobs, task, choices)
    await sandboxes.close()
