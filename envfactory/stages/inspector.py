"""Stage 4, inspector: one gate a question, each with its evidence and cost.

It reads the task and the solvers' attempts, and runs nothing but the repetitions that it needs. A gate is
None, not False, when it could not be judged: that is our failure and no reason to reject a task.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from catalog.models import Gate, TestStatus
from envfactory import interface
from envfactory.config import SynthConfig
from envfactory.packaging import Draft, workspace
from envfactory.prune import test_name, test_path, test_source
from envfactory.stages.base import Attempt, Examined
from envfactory.trees import changed
from envfactory.workbench import Workbench

GATES = ("builds", "gold", "no-op", "stub", "hacks", "leak", "specified", "stable")
"""In the order in which a task meets them."""


class Inspector:
    """See the module."""

    name = "inspector"

    def __init__(self, bench: Workbench, config: SynthConfig) -> None:
        self._bench = bench
        self._config = config

    async def run(self, given: Examined) -> tuple[Gate, ...]:
        """All gates, in the order of `GATES`."""
        pure: list[Callable[[Examined], Gate]] = [builds, gold, no_op, stub, hacks, leak, specified]
        return (*(gate(given) for gate in pure), await self._stable(given))

    async def _stable(self, given: Examined) -> Gate:
        """The same statuses in another run of the buggy state, and for the gold state test by test."""
        began = time.monotonic()
        draft = given.specification.draft
        arguments = draft.arguments
        start = self._bench.changes(draft.start_tests)
        again = await self._bench.run(start, arguments, repeat=1, timeout=task_timeout(given))
        failing = set(draft.fail_to_pass)
        changed_status = [
            name
            for name in (*draft.fail_to_pass, *draft.pass_to_pass)
            if (again.tests.get(name) is TestStatus.PASSED) == (name in failing)
        ]
        solved = self._bench.changes(draft.solved_tests)
        alone = await self._bench.run(solved, draft.visible, timeout=task_timeout(given))
        wrong = [name for name in draft.visible if alone.tests.get(name) is not TestStatus.PASSED]
        passed = not changed_status and not wrong
        evidence = "the same statuses in two runs of the buggy state; visible tests pass alone on gold"
        if changed_status:
            evidence = (
                f"{len(changed_status)} tests changed their status in a second run: {changed_status[0]}"
            )
        elif wrong:
            evidence = f"fails on the gold state when run alone: {wrong[0]}"
        data = {"changed": changed_status[:20], "alone": wrong}
        return Gate(
            name="stable", passed=passed, evidence=evidence, cost_s=time.monotonic() - began, data=data
        )


def task_timeout(given: Examined) -> float:
    """Seconds for one run of the verifier's files."""
    return given.task.verifier.timeout_s


def builds(given: Examined) -> Gate:
    """The image is there, and in it the visible tests fail as the statement says."""
    silent = given.search.reason == "no visible test fails"
    evidence = "the visible tests do not fail in the workspace" if silent else _shown(given)
    return Gate(name="builds", passed=not silent, evidence=evidence)


def _shown(given: Examined) -> str:
    last = given.search.message.strip().splitlines()
    return f"visible tests fail in the workspace: {last[-1][:200] if last else 'no message'}"


def gold(given: Examined) -> Gate:
    """The gold patch, applied as any diff, passes."""
    attempt = _one(given, "gold")
    return _rewarded("gold", attempt, wanted=1.0)


def no_op(given: Examined) -> Gate:
    """Doing nothing fails, and fails each fail-to-pass test."""
    attempt = _one(given, "noop")
    gate = _rewarded("no-op", attempt, wanted=0.0)
    failing = set(attempt.data["not_passed"])
    missed = [name for name in given.task.verifier.fail_to_pass if name not in failing]
    if gate.passed and missed and len(failing) < 60:
        return gate.model_copy(update={"passed": False, "evidence": f"passes without a change: {missed[0]}"})
    return gate


def stub(given: Examined) -> Gate:
    """An empty body in place of the touched function fails."""
    attempt = next((one for one in given.attempts if one.kind == "stub"), None)
    if attempt is None:
        return Gate(name="stub", passed=True, evidence="no single function is touched")
    return _rewarded("stub", attempt, wanted=0.0)


def hacks(given: Examined) -> Gate:
    """No probe that tries to fake a verdict gets a reward."""
    probes = [one for one in given.attempts if one.kind == "hack"]
    cost = sum(one.cost_s for one in probes)
    fooled = [one.solver for one in probes if one.reward]
    unknown = [one.solver for one in probes if one.reward is None]
    data = {one.solver: one.evidence[:200] for one in probes}
    if fooled:
        return Gate(
            name="hacks", passed=False, evidence=f"fooled by {', '.join(fooled)}", cost_s=cost, data=data
        )
    passed = None if unknown else True
    evidence = f"{len(probes) - len(unknown)} of {len(probes)} probes score 0"
    return Gate(name="hacks", passed=passed, evidence=evidence, cost_s=cost, data=data)


def leak(given: Examined) -> Gate:
    """Neither the statement nor another file of the workspace holds the solution."""
    return leaks(given.specification.draft)


def leaks(draft: Draft) -> Gate:
    """The gate `leak` of a draft."""
    start, solved = changed(draft.base, draft.start), changed(draft.base, draft.solved)
    touched = sorted(path for path in solved if start.get(path) != solved[path])
    statement = _squeezed(draft.statement)
    for path in touched:
        before = {_squeezed(line) for line in _lines(start[path].data)} if path in start else set[str]()
        for line in _lines(solved[path].data):
            text = _squeezed(line)
            if len(text) >= 16 and text not in before and text in statement:
                return Gate(
                    name="leak",
                    passed=False,
                    evidence=f"the statement quotes the solution: {line.strip()[:80]}",
                )
    contents = {solved[path].data for path in touched}
    copies = [path for path, file in workspace(draft).items() if file.data in contents]
    if copies:
        return Gate(name="leak", passed=False, evidence=f"{copies[0]} is a copy of the solved file")
    evidence = (
        "one root commit, no object beyond it, no copy of the solved files, statement without their lines"
    )
    return Gate(name="leak", passed=True, evidence=evidence)


def specified(given: Examined) -> Gate:
    """Every name that a fail-to-pass test uses occurs in the workspace or the statement."""
    return specifies(given.specification.draft)


def specifies(draft: Draft) -> Gate:
    """The gate `specified` of a draft."""
    tree = changed(draft.base, draft.start)
    known = " ".join(
        file.data.decode("utf-8", "replace") for path, file in tree.items() if path.endswith(".py")
    )
    names = set(re.findall(r"[A-Za-z_]\w*", known)) | set(re.findall(r"[A-Za-z_]\w*", draft.statement))
    names |= set(re.findall(r"[A-Za-z_]\w*", draft.interface))
    tests = changed(draft.base, draft.tests)
    unknown: set[str] = set()
    for test in draft.fail_to_pass:
        if test_path(test) in tests:
            text = tests[test_path(test)].data.decode("utf-8", "replace")
            unknown |= interface.words(test_source(text, test_name(test))) - names
    if unknown:
        evidence = f"tests use names that nothing else mentions: {', '.join(sorted(unknown)[:5])}"
        return Gate(name="specified", passed=False, evidence=evidence)
    return Gate(
        name="specified",
        passed=True,
        evidence="all names that the tests use are in the code or the statement",
    )


def _one(given: Examined, kind: str) -> Attempt:
    return next(one for one in given.attempts if one.kind == kind)


def _rewarded(name: str, attempt: Attempt, *, wanted: float) -> Gate:
    passed = None if attempt.reward is None else attempt.reward == wanted
    return Gate(name=name, passed=passed, evidence=attempt.evidence, cost_s=attempt.cost_s)


def _lines(data: bytes) -> list[str]:
    return data.decode("utf-8", "replace").splitlines()


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)
