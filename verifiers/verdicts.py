"""From a test run to a verdict: pure.

The complete set of expected ids is compared, each with the status class that the gold run had. What is absent
failed. More tests than expected are evidence, not a fault. Exit codes and printed text do not appear here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from catalog.models import Failure, TestStatus, Verdict
from verifiers.runner import TestRun

_SHOWN = 5
_PASSING = frozenset({TestStatus.PASSED, TestStatus.XPASSED})
_ACCEPTED: dict[TestStatus, frozenset[TestStatus]] = {
    TestStatus.PASSED: frozenset({TestStatus.PASSED}),
    TestStatus.XPASSED: _PASSING,
    TestStatus.XFAILED: _PASSING | {TestStatus.XFAILED},
    TestStatus.SKIPPED: _PASSING | {TestStatus.SKIPPED},
    TestStatus.FAILED: frozenset(TestStatus) - {TestStatus.ABSENT},
    TestStatus.ERROR: frozenset(TestStatus) - {TestStatus.ABSENT},
    TestStatus.ABSENT: frozenset(TestStatus),
}
"""What satisfies an expectation outside of fail-to-pass and pass-to-pass: the gold run's class or a better one.
Tests that failed for gold may do anything but vanish, so that fixing one more is no fault."""


def verdict(
    expected: Mapping[str, TestStatus],
    fail_to_pass: Collection[str],
    pass_to_pass: Collection[str],
    run: TestRun,
) -> Verdict:
    """Judge a run.

    Args:
        expected: every id that must be reported, with its status in the gold run.
        fail_to_pass, pass_to_pass: ids that must pass.
        run: what the runner reported.

    Returns: reward 1.0 or 0.0, or None with a Failure when the run says nothing about the code.
    Raises ValueError when nothing is expected: an empty list would let everything pass.
    """
    if not fail_to_pass or not expected:
        raise ValueError("a verdict needs at least one fail-to-pass test and an expected status for it")
    if run.outcome == "infrastructure":
        failure = Failure(boundary="sandbox", kind="jail", message=run.output[-500:] or "no jail")
        return Verdict(reward=None, failure=failure, duration_s=run.duration_s)
    must_pass = {*fail_to_pass, *pass_to_pass}
    tests: dict[str, TestStatus] = {}
    wrong: list[str] = []
    for name in sorted({*expected, *must_pass}):
        status = tests[name] = run.tests.get(name, TestStatus.ABSENT)
        wanted = expected.get(name, TestStatus.PASSED)
        accepted = _ACCEPTED[wanted] & _PASSING if name in must_pass else _ACCEPTED[wanted]
        if status not in accepted:
            wrong.append(f"{name}: {status}, expected {'passed' if name in must_pass else wanted}")
    extra = sorted(set(run.tests) - set(tests))
    tests |= {name: run.tests[name] for name in extra}
    parts: list[str] = []
    if run.tampered:
        parts.append(f"tampered with: {'; '.join(run.tampered[:_SHOWN])}")
    if run.outcome != "finished":
        parts.append(
            {"timeout": "the run did not end in time", "crashed": "the test process died"}[run.outcome]
        )
    if wrong:
        parts.append(f"{len(wrong)} of {len(must_pass | set(expected))} tests differ: {_some(wrong)}")
    passed = not parts
    if passed:
        parts.append(f"all {len(must_pass | set(expected))} expected tests as in the gold run")
    if extra:
        parts.append(f"{len(extra)} more than expected: {_some(extra)}")
    return Verdict(
        reward=float(passed), tests=tests, evidence=". ".join(parts) + ".", duration_s=run.duration_s
    )


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return "; ".join(names[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
