"""The `repair-choice` agent: eight candidate edits, a failing test, at most three tries, one submission.

The policy reads the visible failing test, its message and the candidates, which a search found in the
buggy workspace alone. `try i` applies candidate i and runs the visible test; `submit i` ends the attempt
and the hidden tests give the verdict. Anything else, a try too many included, ends it with reward 0: that
is the policy's doing. What our sandboxes or runners fail at is raised and becomes a typed failure.

Chance is known exactly (`rollout.statistics`), so that a tiny network can be seen to learn to search.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from catalog.models import Candidate, CandidateSet, Task, Verdict
from rollout.agents.base import AgentFailure, Outcome
from rollout.agents.choice_prompt import (
    MAX_ACTION_TOKENS,
    MAX_TRIES,
    parse_action,
    render_choice,
    render_try,
    test_excerpt,
)
from rollout.session import Session, ToolReply
from verifiers.grading import protected_files


@dataclass(frozen=True, slots=True)
class VisibleResult:
    """Outcome of the visible tests of a task on a changed workspace."""

    passed: bool
    message: str
    """Failure text of the first test that did not pass; empty when all did."""
    outcome: str = "finished"
    cached: bool = False
    duration_s: float = 0.0


class VisibleTests(Protocol):
    """Runs a task's visible tests with some files replaced (`rollout.visible`)."""

    async def run(self, task: Task, files: Mapping[str, bytes | None]) -> VisibleResult: ...


class FileGrader(Protocol):
    """What the agent needs of `verifiers.grading.Grader`."""

    async def grade_files(
        self, task: Task, files: Mapping[str, bytes | None], *, fresh: bool = False
    ) -> Verdict: ...


class ReadBlobs(Protocol):
    def get(self, ref: str) -> bytes: ...


class RepairChoice:
    """See the module.

    Args:
        candidates: the candidate set of a task id; it raises KeyError where there is none.
        blobs: holds the candidates' files.
        fresh: every verdict is made anew (evaluation); otherwise the grader may answer from its cache.
        reshuffle: show each prompt's candidates in another order, a function of task and prompt number.
            For training: with one order for ever, a policy learns which number is right in which task.
    """

    name = "repair-choice"

    def __init__(
        self,
        candidates: Callable[[str], CandidateSet],
        blobs: ReadBlobs,
        visible: VisibleTests,
        grader: FileGrader,
        *,
        fresh: bool = False,
        reshuffle: bool = False,
        max_tries: int = MAX_TRIES,
    ) -> None:
        self._candidates, self._blobs = candidates, blobs
        self._visible, self._grader = visible, grader
        self.fresh, self._max_tries, self._reshuffle = fresh, max_tries, reshuffle
        self._observed: dict[str, CandidateSet] = {}

    async def run(self, task: Task, session: Session) -> Outcome:
        choices = await self._choices(task)
        shown = list(choices.candidates)
        if self._reshuffle:
            random.Random(f"{task.id} {session.spec.prompt}").shuffle(shown)
        await session.say(
            *render_choice(
                effort=session.effort,
                test_source=choices.test_source,
                failure=choices.failure,
                candidates=shown,
                count=session.count,
            )
        )
        tries = 0
        while True:
            act = await session.act(MAX_ACTION_TOKENS)
            action = parse_action(act.text, len(shown)) if act.finish == "stop" else None
            if action is None:
                return _zero(f"not an action: {act.text[:80]!r}")
            candidate = shown[action.choice - 1]
            if action.kind == "submit":
                verdict = await self._grader.grade_files(task, self._files(candidate), fresh=self.fresh)
                return Outcome(verdict, submitted={candidate.path: candidate.content})
            if tries == self._max_tries:
                return _zero(f"more than {self._max_tries} tries")
            tries += 1
            left = self._max_tries - tries

            async def attempt(_key: str, candidate=candidate, choice=action.choice, left=left) -> ToolReply:
                result = await self._visible.run(task, self._files(candidate))
                return ToolReply(
                    render_try(choice, result.passed, result.message, left),
                    outcome=result.outcome,
                    exit_code=0 if result.passed else 1,
                    duration_s=result.duration_s,
                    cached=result.cached,
                )

            reply = await session.call("try", {"choice": action.choice}, attempt)
            await session.say(("tool", reply.result))

    async def _choices(self, task: Task) -> CandidateSet:
        """The task's candidates with what the policy is shown of the visible test.

        A set that lacks the test's source or its failure gets them from the task's own files and one run.
        """
        if task.id in self._observed:
            return self._observed[task.id]
        try:
            choices = self._candidates(task.id)
        except KeyError:
            raise AgentFailure("no_candidates", f"no candidate set for task {task.id}") from None
        if not choices.test_source or not choices.failure:
            visible = task.problem.visible_tests[0]
            files = protected_files(self._blobs.get(task.verifier.protected))
            source = files.get(visible.partition("::")[0], b"").decode(errors="replace")
            result = await self._visible.run(task, {})
            choices = choices.model_copy(
                update={
                    "test_source": choices.test_source or test_excerpt(source, visible),
                    "failure": choices.failure or result.message,
                }
            )
        self._observed[task.id] = choices
        return choices

    def _files(self, candidate: Candidate) -> dict[str, bytes | None]:
        return {candidate.path: self._blobs.get(candidate.content)}


def _zero(evidence: str) -> Outcome:
    return Outcome(Verdict(reward=0.0, evidence=evidence))
