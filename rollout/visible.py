"""Runs the visible tests of a task on a changed workspace, through the grader's warm runners.

In training the same candidate is tried again and again; results are kept by content (image, files, tests).
Evaluation runs every try anew: make it with `cache=False`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Protocol

from catalog.models import Task, TestStatus, digest_json
from rollout.agents.repair_choice import VisibleResult
from verifiers.runner import RunnerFailed, TestRun


class RunsTests(Protocol):
    """The part of `verifiers.grading.Grader` that runs tests without a verdict."""

    async def run(
        self, task: Task, files: Mapping[str, bytes | None], arguments: Collection[str]
    ) -> TestRun: ...


class GraderVisibleTests:
    """See the module. Counts what it ran and what it remembered."""

    def __init__(self, grader: RunsTests, *, cache: bool) -> None:
        self._grader = grader
        self._known: dict[str, VisibleResult] | None = {} if cache else None
        self.hits = self.misses = 0

    async def run(self, task: Task, files: Mapping[str, bytes | None]) -> VisibleResult:
        """Raises RunnerFailed, SandboxError: what is not the tested code's doing."""
        key = _key(task, files)
        known = self._known.get(key) if self._known is not None else None
        if known is not None:
            self.hits += 1
            return known
        self.misses += 1
        run = await self._grader.run(task, files, task.problem.visible_tests)
        if run.outcome == "infrastructure":
            raise RunnerFailed(f"{task.id}: the visible tests could not be run: {' '.join(run.notes)[:500]}")
        result = _result(run, task.problem.visible_tests)
        if self._known is not None:
            self._known[key] = VisibleResult(
                result.passed, result.message, result.outcome, cached=True, duration_s=result.duration_s
            )
        return result


def _result(run: TestRun, wanted: Collection[str]) -> VisibleResult:
    """Passed if every wanted test reports exactly that, in a run nobody tampered with."""
    failing = [test for test in wanted if run.tests.get(test) is not TestStatus.PASSED]
    passed = not failing and run.outcome == "finished" and not run.tampered
    message = ""
    if not passed:
        texts = [run.messages[test] for test in failing if test in run.messages]
        texts += list(run.messages.values())
        ended = "it did not pass" if run.outcome == "finished" else f"the test run ended by {run.outcome}"
        message = texts[0] if texts else ended
    return VisibleResult(passed, message, run.outcome, duration_s=run.duration_s)


def _key(task: Task, files: Mapping[str, bytes | None]) -> str:
    contents = [
        [path, None if data is None else hashlib.sha256(data).hexdigest()]
        for path, data in sorted(files.items())
    ]
    visible = list(task.problem.visible_tests)
    return digest_json([task.environment.image, task.verifier.digest(), contents, visible])
