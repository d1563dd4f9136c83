"""Stage 5, repair and calibration: mend what a failed gate names, or drop the task; both are written down.

What it can mend: tests that change their status leave the verifier, a visible test that says nothing
alone is replaced by the next one, a statement that quotes the solution loses its failure text. Anything
else is dropped. A mended draft goes through all gates again.
"""

from __future__ import annotations

import time
from dataclasses import replace

from catalog.models import Decision
from envfactory.stages.base import Judged, Rejection, Specification


class Repairer:
    """See the module."""

    name = "repairer"

    def __init__(self, *, rounds: int = 2) -> None:
        self.rounds = rounds

    async def run(self, given: Judged) -> tuple[Specification, Decision] | Rejection:
        """A mended specification with the decision for the history, or the reason to drop the task."""
        gate = given.failed[0]
        if gate.passed is None:
            return Rejection("infrastructure", f"{gate.name}: {gate.evidence}")
        before = given.examined.specification
        rewrites = sum(decision.action == "rewritten" for decision in given.history)
        mended = None
        if rewrites < self.rounds:
            if gate.name == "stable":
                mended = _without(before, set(gate.data["changed"]) | set(gate.data["alone"]))
            elif gate.name == "builds":
                mended = _without_visible(before)
            elif gate.name == "leak" and "statement" in gate.evidence:
                mended = _without_message(before)
        if mended is None:
            return Rejection(gate.name, gate.evidence)
        specification, what = mended
        decision = Decision(
            actor=self.name,
            action="rewritten",
            reason=f"{gate.name}: {gate.evidence}; {what}",
            at=time.time(),
        )
        return specification, decision


def _without(before: Specification, tests: set[str]) -> tuple[Specification, str] | None:
    """The verifier without these tests."""
    draft = before.draft
    failing = tuple(test for test in draft.fail_to_pass if test not in tests)
    if not failing or not tests:
        return None
    visible = tuple(test for test in draft.visible if test not in tests) or failing[:1]
    mended = replace(
        draft,
        fail_to_pass=failing,
        pass_to_pass=tuple(test for test in draft.pass_to_pass if test not in tests),
        expected={test: status for test, status in draft.expected.items() if test not in tests},
        visible=visible,
    )
    return replace(before, draft=mended), f"{len(tests)} unstable tests left the verifier"


def _without_visible(before: Specification) -> tuple[Specification, str] | None:
    """The next fail-to-pass test shown in place of the ones shown so far."""
    draft = before.draft
    others = [test for test in draft.fail_to_pass if test not in draft.visible]
    if not others:
        return None
    mended = replace(draft, visible=(others[0],))
    return replace(before, draft=mended), "another failing test is shown"


def _without_message(before: Specification) -> tuple[Specification, str] | None:
    """The statement without failure texts, which quote code."""
    draft = before.draft
    lines, quoted = list[str](), False
    for line in draft.statement.splitlines():
        if line.startswith("```"):
            quoted = not quoted
        elif not quoted and " ends with:" not in line:
            lines.append(line)
    text = "\n".join(lines).strip() + "\n"
    if text == draft.statement:
        return None
    return replace(before, draft=replace(draft, statement=text)), "the failure text left the statement"
