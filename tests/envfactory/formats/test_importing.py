"""Rows of strangers become tasks, given their repository: built, measured, judged, and written again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from catalog.models import Status, TestStatus
from catalog.store import Catalog
from envfactory.audit import audit
from envfactory.errors import FactoryError
from envfactory.formats.exchange import Entered, export_tasks, import_tasks
from envfactory.formats.importing import Importer
from envfactory.packaging import diff
from envfactory.trees import File
from sandbox.base import SandboxProvider
from sandbox.images import ImageStore
from tests.envfactory.packages import CORE, TESTS, repository, tiny
from verifiers.cache import VerdictCache
from verifiers.grading import Grader

BUGGY = CORE.replace("max(low, min(value, high))", "min(value, high)")
LOW = "    def test_low(self):\n        assert core.clamp(-1, *self.helper()) == 0\n\n"
OLD_TESTS = TESTS.replace(LOW, "")
F2P = ["tests/test_core.py::TestClamp::test_low"]
P2P = ["tests/test_core.py::TestClamp::test_inside[3]", "tests/test_core.py::test_add"]

pytestmark = pytest.mark.usefixtures("offline")


def patch(path: str, before: str, after: str) -> str:
    return diff({path: File(before.encode())}, {path: File(after.encode())}).decode()


def commit_of(folder: Path) -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, check=True)
    return done.stdout.decode().strip()


def row_of(commit: str, **changes: object) -> dict[str, Any]:
    row: dict[str, Any] = {
        "repo": "octo/tinysum",
        "instance_id": "octo__tinysum-1",
        "base_commit": commit,
        "patch": patch("tinysum/core.py", BUGGY, CORE),
        "test_patch": patch("tests/test_core.py", OLD_TESTS, TESTS),
        "problem_statement": "clamp(-1, 0, 5) should be 0.",
        "hints_text": "look at the lower end",
        "created_at": "2024-01-01T00:00:00Z",
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps(F2P),
        "PASS_TO_PASS": json.dumps(P2P),
        "environment_setup_commit": commit,
        "difficulty": "<15 min fix",
    }
    return row | changes


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """A mirror of two states: the released package, then one with a bug and without its test."""
    states = [(tiny(), "Release"), (tiny(core=BUGGY, tests=OLD_TESTS), "Later")]
    return repository(tmp_path / "mirrors/octo/tinysum", states)


async def imported(
    path: Path,
    format: str,
    mirror: Path,
    home: Path,
    images: ImageStore,
    sandboxes: SandboxProvider,
    **options: Any,
) -> list[Entered]:
    with Catalog.open(home) as catalog:
        async with Grader(sandboxes, images, catalog.blobs, VerdictCache()) as grader:
            where = str(mirror.parent.parent / "{repo}")
            importer = Importer(home, catalog.blobs, images, sandboxes, grader, repository=where, **options)
            return await import_tasks(path, format, catalog, images, foreign=importer)


async def test_a_row_is_built_judged_and_written_again(
    mirror: Path, tmp_path: Path, home: Path, images: ImageStore, sandboxes: SandboxProvider
) -> None:
    commit = commit_of(mirror)
    gone = json.dumps([*P2P, "tests/test_core.py::test_gone"])
    leak = "write: return max(low, min(value, high))"
    rows = [
        row_of(commit),
        row_of(commit, instance_id="octo__tinysum-2", problem_statement=leak, PASS_TO_PASS=gone),
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    good, bad = await imported(source, "swebench", mirror, home, images, sandboxes)
    assert good.task.origin.function == "clamp"
    assert good.task.verifier.expected["tests/test_core.py::test_clamp"] is TestStatus.PASSED
    assert "1 of 4 listed tests do not pass" in bad.notes[0]
    with Catalog.open(home) as catalog:
        async with Grader(sandboxes, images, catalog.blobs, VerdictCache()) as grader:
            passes = await audit(good.task, catalog, images, grader, runs=1)
            fails = await audit(bad.task, catalog, images, grader, runs=1)
        assert [gate.name for gate in passes.gates] == ["leak", "specified", "gold", "no-op", "stub", "hacks"]
        assert passes.accepted
        assert {gate.name for gate in fails.gates if not gate.passed} == {"leak", "gold"}
        assert "leak, gold failed" in fails.history[-1].reason
        statuses = [catalog.get_task(one.task.id).status for one in (good, bad)]
        assert statuses == [Status.VALIDATED, Status.QUARANTINED]
        task = catalog.get_task(good.task.id)
        # The agent sees the tests of the commit, not the hidden ones.
        layer = images.layer_path(images.manifest(task.environment.image).layers[-1])
        assert (layer / "workspace/tests/test_core.py").read_text() == OLD_TESTS
        export_tasks([task], catalog, images, "swebench", tmp_path / "out.jsonl")
    back = json.loads((tmp_path / "out.jsonl").read_text())
    assert back.pop("posttrain")
    # git names blobs at different lengths: what the diff does is the same.
    changes = [
        [line for line in row.pop("test_patch").splitlines() if line[:5] != "index"]
        for row in (back, rows[0])
    ]
    assert changes[0] == changes[1]
    assert back == rows[0]
    with Catalog.open(tmp_path / "other") as other:
        (again,) = await import_tasks(tmp_path / "out.jsonl", "swebench", other, images)
        assert again.task.verifier == task.verifier
        assert again.task.id == task.id


async def test_a_smith_row_has_its_bug_put_in_and_its_tests_taken_out(
    mirror: Path, tmp_path: Path, home: Path, images: ImageStore, sandboxes: SandboxProvider
) -> None:
    subprocess.run(["git", "checkout", "-q", "HEAD~1"], cwd=mirror, check=True)
    row = {
        "instance_id": "octo__tinysum.0a1b2c3d.func_pm_remove_cond__0a1b2c3d",
        "patch": patch("tinysum/core.py", CORE, BUGGY),
        "FAIL_TO_PASS": F2P,
        "PASS_TO_PASS": P2P,
        "image_name": "x",
        "repo": "swesmith/octo__tinysum.0a1b2c3d",
        "problem_statement": "clamp(-1, 0, 5) should be 0.",
    }
    (tmp_path / "smith.json").write_text(json.dumps([row]))
    (one,) = await imported(tmp_path / "smith.json", "swe-smith", mirror, home, images, sandboxes)
    assert not one.notes
    layer = images.layer_path(images.manifest(one.task.environment.image).layers[-1])
    assert (layer / "workspace/tinysum/core.py").read_text() == BUGGY
    assert not (layer / "workspace/tests/test_core.py").exists()
    # The same environment by name: nothing is built.
    below = images.manifest(one.task.environment.image).layers[0]
    image = images.stack(images.host_base(), below)
    (other,) = await imported(
        tmp_path / "smith.json", "swe-smith", mirror, tmp_path / "home2", images, sandboxes, image=image
    )
    assert not other.notes
    assert other.task.environment.tree == one.task.environment.tree


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_commit": "main"}, "no full commit id"),
        ({"base_commit": "0" * 40}, "cannot fetch commit"),
        ({"repo": "octo/nothing"}, "no folder"),
        ({"FAIL_TO_PASS": ["test_low (core.TestClamp)"]}, "only tasks whose tests pytest runs"),
        ({"FAIL_TO_PASS": ["tests/test_core.py::"]}, "only tasks whose tests pytest runs"),
        ({"patch": patch("tinysum/core.py", "x\n", "y\n")}, "the patch of octo__tinysum-1 cannot be used"),
        (
            {"test_patch": "diff --git a/../x b/../x\n--- a/../x\n+++ b/../x\n@@ -0,0 +1 @@\n+x\n"},
            "cannot be used",
        ),
    ],
)
async def test_what_cannot_be_imported_is_a_sentence(
    changes: dict[str, Any],
    words: str,
    mirror: Path,
    tmp_path: Path,
    home: Path,
    images: ImageStore,
    sandboxes: SandboxProvider,
) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps(row_of(commit_of(mirror), **changes)))
    with pytest.raises(FactoryError) as error:
        await imported(tmp_path / "x.jsonl", "swebench", mirror, home, images, sandboxes)
    assert words in str(error.value)
    with Catalog.open(home) as catalog:
        assert not catalog.list_tasks()
