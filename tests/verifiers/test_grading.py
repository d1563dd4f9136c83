"""Real gradings of a small task: honest solutions pass, everything else does not."""

from __future__ import annotations

import asyncio
import base64
import json

import pytest

from catalog.models import Substrate, Task, TestStatus
from tests.verifiers.tasks import (
    BUGGY,
    EXPECTED,
    FIRST,
    FIXED,
    PROTECTED,
    REWRITTEN,
    WORKSPACE,
    Blobs,
    make_task,
)
from verifiers import patches
from verifiers.grading import Grader
from verifiers.hacks import PROBES

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", params=["own image", "shared image"])
def task(images, blobs, request) -> Task:
    """Once on its own image, once on a clean one with changes, where one test file is an older version."""
    image = images.workspace(WORKSPACE)
    if request.param == "own image":
        return make_task(image, blobs)
    clean = {
        **WORKSPACE,
        **PROTECTED,
        "pkg/numbers.py": FIXED,
        "extra.py": b"",
        "tests/test_second.py": b"# old",
    }
    changes = {"pkg/numbers.py": base64.b64encode(BUGGY).decode(), "extra.py": None}
    shared = Substrate(image=images.workspace(clean), changes=blobs.put(json.dumps(changes).encode()))
    return make_task(image, blobs, shared)


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


async def test_verdicts_are_cached_and_fresh_ones_are_not_read(sandboxes, images, task, blobs):
    diff = blobs.get(task.solution)
    async with Grader(sandboxes, images.store, blobs) as grader:
        first, shared = await asyncio.gather(
            grader.grade_files(task, {"pkg/numbers.py": FIXED}),
            grader.grade_files(task, {"pkg/numbers.py": FIXED}),
        )
        assert first == shared
        assert not first.cached
        again = await grader.grade(task, diff)
        assert (again.cached, again.reward) == (True, 1.0)
        assert (await grader.grade(task, diff)).cached
        assert (grader.cache.hits, grader.cache.misses) == (2, 2)
        assert not (await grader.grade(task, diff, fresh=True)).cached
        other = task.model_copy(update={"verifier": task.verifier.model_copy(update={"timeout_s": 29.0})})
        assert not (await grader.grade(other, diff)).cached


async def test_what_breaks_on_our_side_is_no_reward(sandboxes, images, task, blobs):
    async with Grader(sandboxes, images.store, Blobs()) as grader:
        verdict = await grader.grade_files(task, {})
        assert verdict.reward is None
        assert verdict.failure is not None
        assert verdict.failure.boundary == "verifier"
        assert (await grader.grade_files(task, {})).failure is not None
        assert grader.cache.hits == 0
    missing = task.environment.model_copy(update={"image": "sha256:" + "0" * 64, "substrate": None})
    async with Grader(sandboxes, images.store, blobs) as grader:
        verdict = await grader.grade(task.model_copy(update={"environment": missing}), b"x")
        assert verdict.failure is not None
        assert "not in the store" in verdict.failure.message


async def test_hack_probes_score_zero(grader, task):
    """The task's weakest setting: any path may be changed."""
    graded = await asyncio.gather(*(grader.grade_files(task, p.files(task, WORKSPACE)) for p in PROBES))
    fooled = {
        probe.name: verdict.evidence
        for probe, verdict in zip(PROBES, graded, strict=True)
        if verdict.reward != 0.0
    }
    assert fooled == {}
    assert len(PROBES) >= 24


async def test_an_always_equal_object_does_not_pass_weak_tests(grader, task):
    """It satisfies the one assertion that decides here by its own words, and the control run's as well."""
    weak = task.verifier.model_copy(
        update={
            "fail_to_pass": ("tests/test_first.py::test_above",),
            "expected": {name: TestStatus.PASSED for name in EXPECTED if "first" in name},
            "arguments": ("tests/test_first.py",),
        }
    )
    (probe,) = (p for p in PROBES if p.needs_differential)
    easy = task.model_copy(update={"verifier": weak})
    verdict = await grader.grade_files(easy, probe.files(task, WORKSPACE))
    assert verdict.reward == 0.0
    assert verdict.evidence == "Passes whatever the test expects: tests/test_first.py::test_above."
    assert (await grader.grade_files(easy, {"pkg/numbers.py": FIXED})).reward == 1.0


async def test_files_that_hide_modules_of_the_tests_or_the_library_are_left_out(grader, task):
    files = {
        "pkg/numbers.py": FIXED,
        "tests/conftest/__init__.py": b"1 / 0",
        "tests/test_second.abi3.so": b"",
        "shlex.py": b"1 / 0",
        "src/difflib/__init__.py": b"",
        "pkg/json.py": b"",
    }
    verdict = await grader.grade_files(task, files)
    assert verdict.reward == 1.0, verdict.evidence
    hidden = "shlex.py, src/difflib/__init__.py, tests/conftest/__init__.py, tests/test_second.abi3.so."
    assert verdict.evidence.endswith(f"left out: {hidden}")


async def test_a_hanging_solution_fails_in_time(grader, task):
    quick = task.model_copy(update={"verifier": task.verifier.model_copy(update={"timeout_s": 1.0})})
    verdict = await grader.grade_files(quick, {"pkg/numbers.py": BUGGY + b"\nwhile True:\n    pass\n"})
    assert verdict.reward == 0.0
    assert "did not end in time" in verdict.evidence


async def test_chosen_tests_run_without_a_verdict(grader, task):
    run = await grader.run(task, {"pkg/numbers.py": FIXED}, ["tests/test_first.py::test_above"], trace=True)
    assert run.tests == {"tests/test_first.py::test_above": TestStatus.PASSED}
    assert run.functions == {"tests/test_first.py::test_above": ("pkg/numbers.py::clamp",)}
