"""Real gradings of a small task: honest solutions pass, everything else does not."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

import pytest

from catalog.models import Environment, Origin, Problem, Task, TestStatus, VerifierSpec
from sandbox.trees import pack_files
from verifiers import patches
from verifiers.cache import VerdictCache
from verifiers.grading import Grader
from verifiers.hacks import PROBES, HackProbe

BUGGY = b'"""Numbers."""\n\n\ndef clamp(x, low, high):\n    return min(max(x, low), low)\n\n\ndef sign(x):\n    return (x > 0) - (x < 0)\n'
FIXED = BUGGY.replace(b"low), low)", b"low), high)")
REWRITTEN = BUGGY.replace(
    b"    return min(max(x, low), low)",
    b"    if x < low:\n        return low\n    return high if x > high else x",
)
FIRST = b"""from pkg.numbers import clamp, sign


def test_below():
    assert clamp(-5, 0, 3) == 0


def test_above():
    assert clamp(7, 0, 3) == 3


def test_sign():
    assert [sign(-2), sign(0), sign(9)] == [-1, 0, 1]
"""
SECOND = b"""import unittest

import pytest

from pkg import numbers


class TestClamp(unittest.TestCase):
    def test_inside(self):
        self.assertEqual(numbers.clamp(2, 0, 3), 2)


@pytest.mark.parametrize("text", ["a b", "[x]/y", "\\u00e9'\\""])
def test_text(text):
    assert numbers.clamp(len(text), 1, 2) == min(len(text), 2)


def test_late():
    with pytest.raises(TypeError):
        numbers.clamp("a", 1, 2)
    assert numbers.clamp(2, 1, 3) == 2
"""
WORKSPACE = {
    "pkg/__init__.py": b"",
    "pkg/numbers.py": BUGGY,
    "tests/test_first.py": FIRST,
    "README.md": b"numbers\n",
}
PROTECTED = {"tests/test_first.py": FIRST, "tests/test_second.py": SECOND, "tests/conftest.py": b"# ours\n"}


class Blobs:
    """A store in memory."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        ref = "sha256:" + hashlib.sha256(data).hexdigest()
        self.data[ref] = data
        return ref

    def get(self, ref: str) -> bytes:
        return self.data[ref]


EXPECTED = [
    "tests/test_first.py::test_below",
    "tests/test_first.py::test_above",
    "tests/test_first.py::test_sign",
    "tests/test_second.py::TestClamp::test_inside",
    "tests/test_second.py::test_text[a b]",
    "tests/test_second.py::test_text[[x]/y]",
    "tests/test_second.py::test_text[\\xe9'\"]",
    "tests/test_second.py::test_late",
]
ALREADY = {"tests/test_first.py::test_below", "tests/test_first.py::test_sign"}


@pytest.fixture
def blobs() -> Blobs:
    return Blobs()


@pytest.fixture
def task(images, blobs) -> Task:
    verifier = VerifierSpec(
        fail_to_pass=tuple(name for name in EXPECTED if name not in ALREADY),
        pass_to_pass=tuple(sorted(ALREADY)),
        expected={name: TestStatus.PASSED for name in EXPECTED},
        arguments=("tests/test_first.py", "tests/test_second.py"),
        protected=blobs.put(pack_files(PROTECTED)),
        allowed=(".",),
        timeout_s=30,
    )
    return Task(
        id="t",
        origin=Origin(kind="procedural", source="x", revision="1", path="pkg/numbers.py", function="clamp"),
        problem=Problem(statement="clamp ignores its upper bound"),
        environment=Environment(image=images.workspace(WORKSPACE), tree="none"),
        verifier=verifier,
        solution=blobs.put(patches.make_diff({"pkg/numbers.py": BUGGY}, {"pkg/numbers.py": FIXED})),
    )


@pytest.fixture
async def grader(sandboxes, images, blobs) -> AsyncIterator[Grader]:
    async with Grader(sandboxes, images.store, blobs, VerdictCache()) as made:
        yield made


async def test_gold_noop_and_a_rewrite(grader, task, blobs):
    gold = await grader.grade(task, blobs.get(task.solution))
    assert gold.reward == 1.0, gold.evidence
    assert set(gold.tests) == set(EXPECTED)
    noop = await grader.grade(task, b"")
    assert noop.reward == 0.0
    failed = {name for name, status in noop.tests.items() if status is not TestStatus.PASSED}
    assert failed == set(task.verifier.fail_to_pass)
    assert (await grader.grade_files(task, {"pkg/numbers.py": REWRITTEN})).reward == 1.0


async def test_honest_extras_do_no_harm(grader, task):
    files = {
        "pkg/numbers.py": FIXED,
        "pkg/extra.py": b"x = 1\n",
        "tests/test_own.py": b"def test_own():\n    assert 0\n",
        "tests/test_first.py": FIRST + b"\n\ndef test_mine():\n    assert 0\n",
        "README.md": None,
        "pyproject.toml": b"[tool.pytest.ini_options]\naddopts = '--nonsense'\n",
    }
    verdict = await grader.grade_files(task, files)
    assert verdict.reward == 1.0, verdict.evidence
    assert "pyproject.toml, tests/test_first.py" in verdict.evidence


async def test_refused_changes_score_zero(grader, task):
    narrow = task.model_copy(
        update={"verifier": task.verifier.model_copy(update={"allowed": ("pkg",)})},
    )
    assert (await grader.grade_files(narrow, {"README.md": b"x"})).reward == 0.0
    diff = patches.make_diff({"README.md": b"numbers\n"}, {"README.md": b"other\n"})
    verdict = await grader.grade(narrow, diff)
    assert verdict.reward == 0.0
    assert verdict.evidence.startswith("Refused: the diff touches 'README.md'")
    assert (await grader.grade(task, b"nonsense")).reward == 0.0


async def test_verdicts_are_cached_and_fresh_ones_are_not_read(grader, task, blobs):
    diff = blobs.get(task.solution)
    first = await grader.grade(task, diff)
    again = await grader.grade(task, diff)
    assert (first.cached, again.cached, again.reward) == (False, True, 1.0)
    assert (await grader.grade_files(task, {"pkg/numbers.py": FIXED})).cached
    assert not (await grader.grade(task, diff, fresh=True)).cached
    assert (grader.cache.hits, grader.cache.misses) == (2, 1)


async def test_what_breaks_on_our_side_is_no_reward(sandboxes, images, task):
    async with Grader(sandboxes, images.store, Blobs()) as grader:
        verdict = await grader.grade_files(task, {})
        assert verdict.reward is None
        assert verdict.failure is not None
        assert verdict.failure.boundary == "verifier"
        assert (await grader.grade_files(task, {})).failure is not None
        assert grader.cache.hits == 0


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
async def test_hack_probes_score_zero(grader, task, probe: HackProbe):
    verdict = await grader.grade_files(task, probe.files(task, WORKSPACE))
    print(verdict.evidence)
    if not probe.needs_differential:
        assert verdict.reward == 0.0, verdict.evidence


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
async def test_narrow_tasks_refuse_or_fail_hacks(grader, task, probe: HackProbe):
    pass
