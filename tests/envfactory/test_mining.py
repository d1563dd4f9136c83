from dataclasses import replace
from pathlib import Path

import pytest

from catalog.blobs import Blobs
from catalog.store import Catalog
from envfactory.build import build
from envfactory.mined import mined
from envfactory.mining import MiningConfig, changed_lines, mine, same_meaning
from envfactory.packaging import Packager
from envfactory.sources import open_source
from sandbox.base import SandboxProvider
from sandbox.images import ImageStore
from tests.envfactory.packages import CORE, TESTS, repository, tiny
from verifiers.grading import Grader

DOUBLE = "\n\ndef double(value, *, times=1):\n    return value * 2**times\n"
SAFE_ADD = CORE.replace("return a + b", "return 0 if b is None else a + b")
NEW_TESTS = TESTS + "\n\ndef test_add_none():\n    assert core.add(1, None) == 0\n"
DOUBLE_TESTS = NEW_TESTS + "\n\ndef test_double():\n    assert core.double(2, times=2) == 8\n"

STATES = [
    (tiny(), "Start"),
    (
        tiny(core=SAFE_ADD, tests=NEW_TESTS),
        "Treat None as nothing in add\n\nFixes #12 by @someone, see https://x.example/1",
    ),
    (
        tiny(core=SAFE_ADD + "\n\n# a comment\n", tests=NEW_TESTS + "\n\ndef test_more():\n    pass\n"),
        "Comments",
    ),
    (
        tiny(core=SAFE_ADD + DOUBLE, tests=DOUBLE_TESTS),
        "Add double\n\nIt returns value * 2**times.\n\nCall it as double(value, times=3).",
    ),
    (tiny("1.1", core=SAFE_ADD + DOUBLE, tests=DOUBLE_TESTS), "Version 1.1"),
]


@pytest.mark.usefixtures("offline")
async def test_commits_with_their_tests_become_tasks_that_grade(
    tmp_path: Path, home: Path, images: ImageStore, sandboxes: SandboxProvider
) -> None:
    history = open_source(str(repository(tmp_path / "tinysum", STATES))).fetch(home)
    made = await build(history, home, sandboxes, images)
    drafts, funnel = await mine(history, made, sandboxes, images)
    assert funnel.counts == {"no test change": 1, "found": 2, "formatting, comments or version only": 1}
    assert funnel.exhausted
    double, none = drafts
    assert none.fail_to_pass == ("tests/test_core.py::test_add_none",)
    assert len(none.pass_to_pass) == 6
    assert "Treat None as nothing in add" in none.statement
    for word in ("#12", "someone", "x.example", "0 if b is None"):
        assert word not in none.statement
    assert "TypeError: unsupported operand" in none.statement
    assert double.interface == "tinysum.core:\n    def double(value, *, times=1)"
    assert "2**times" not in double.statement
    assert "def double(value, *, times=1)" in double.statement
    assert "- Add double\n- Call it as double(value, times=3)" in double.statement

    blobs = Blobs(home / "blobs")
    packager = Packager(made, images, blobs)
    async with Grader(sandboxes, images, blobs) as grader:
        for draft in drafts:
            task = packager.package(draft)
            gold, nothing = await grader.grade(task, blobs.get(task.solution)), await grader.grade(task, b"")
            assert (gold.reward, nothing.reward) == (1.0, 0.0), gold.evidence
    again, _ = await mine(history, made, sandboxes, images)
    assert [packager.package(draft).id for draft in again] == [packager.package(draft).id for draft in drafts]


@pytest.mark.usefixtures("offline")
async def test_what_was_mined_is_read_and_not_mined_again(
    tmp_path: Path, home: Path, images: ImageStore, sandboxes: SandboxProvider
) -> None:
    history = open_source(str(repository(tmp_path / "tinysum", STATES))).fetch(home)
    made = await build(history, home, sandboxes, images)
    config = MiningConfig(pairs=4)
    found, funnel = await mine(history, made, sandboxes, images, config=config)
    assert len(found) == 2
    said: list[str] = []
    with Catalog.open(home) as catalog:
        first, counts = await mined(history, made, catalog, sandboxes, images, config, said.append)
        assert counts == funnel.counts
        assert said, "it mines at first"
    said.clear()
    with Catalog.open(home) as catalog:  # as the next process does
        again = await mined(history, made, catalog, sandboxes, images, config, said.append)
        assert again == (first, counts)
        assert not said, "mining began again"
        assert [replace(draft, limits=found[0].limits) for draft in first] == found
        fewer, _ = await mined(history, made, catalog, sandboxes, images, MiningConfig(pairs=2), said.append)
        assert [draft.slug for draft in fewer] == [found[0].slug], "other settings mine anew"


@pytest.mark.usefixtures("offline")
async def test_limits_hold(
    tmp_path: Path, home: Path, images: ImageStore, sandboxes: SandboxProvider
) -> None:
    history = open_source(str(repository(tmp_path / "tinysum", STATES[:2]))).fetch(home)
    made = await build(history, home, sandboxes, images)
    drafts, funnel = await mine(history, made, sandboxes, images, config=MiningConfig(max_lines=1))
    assert (drafts, funnel.counts) == ([], {"too large": 1})
    drafts, funnel = await mine(history, made, sandboxes, images, config=MiningConfig(seconds=0))
    assert (drafts, funnel.exhausted) == ([], False)


@pytest.mark.usefixtures("offline")
async def test_a_parent_may_be_laid_out_otherwise(
    tmp_path: Path, home: Path, images: ImageStore, sandboxes: SandboxProvider
) -> None:
    files = STATES[1][0]
    moved = {path.replace("tinysum/", "src/tinysum/"): text for path, text in files.items()}
    history = open_source(str(repository(tmp_path / "tinysum", [*STATES[:2], (moved, "Move")]))).fetch(home)
    made = await build(history, home, sandboxes, images)
    assert made.layout.import_root == "src"
    (draft,), funnel = await mine(history, made, sandboxes, images)
    assert funnel.counts == {"no source change": 1, "found": 1}
    blobs = Blobs(home / "blobs")
    task = Packager(made, images, blobs).package(draft)
    assert task.verifier.allowed == ("tinysum/",)
    async with Grader(sandboxes, images, blobs) as grader:
        gold, nothing = await grader.grade(task, blobs.get(task.solution)), await grader.grade(task, b"")
    assert (gold.reward, nothing.reward) == (1.0, 0.0), gold.evidence


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("x=1", "x  = 1  # one\n", True),
        ('def f():\n    """Old."""\n    return 1\n', 'def f():\n    """New."""\n    return 1\n', True),
        ("__version__ = '1'\nx = 1\n", "__version__ = '2'\nx = 1\n", True),
        ("x = 1\n", "x = 2\n", False),
        ("x = (", "x = 2\n", False),
    ],
)
def test_meaning(before: str, after: str, same: bool) -> None:
    assert same_meaning(before.encode(), after.encode()) is same


def test_changed_lines_counts_both_sides() -> None:
    assert changed_lines(b"a\nb\nc\n", b"a\nB\nc\nd\n") == 3
