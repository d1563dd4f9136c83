"""Grading stored trajectories again after their tasks' verifiers changed, and telling what flipped.

    async for line in regrade(trajectories, tasks.get, changes, grader, log): ...

What a trajectory left behind comes from the trajectory itself: the diff that it carries, the candidate that
it submitted, or, for a bash agent's older ones, its commands run once more in a fresh sandbox. The
trajectories are not changed: each result is a line of a log beside them, under the verifier's digest, so that
a killed regrade goes on, and one after the next change of a verifier adds to it.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Literal, Protocol

from catalog.jsonl import JsonLines, read_lines
from catalog.models import Record, Task, Verdict
from catalog.trajectory import Trajectory
from rollout.agents.bash import AgentDestroyedSandbox, BashConfig, Workspace
from rollout.agents.repair_choice import ReadBlobs
from rollout.session import ToolReply
from sandbox.base import SandboxError, SandboxProvider
from verifiers.grading import Grader

Outcome = Literal["same", "gained", "lost", "judged", "unjudged", "skipped"]
"""`gained`: 0 became 1; `lost`: 1 became 0; `judged`: there was no verdict before; `unjudged`: there is none
now; `skipped`: it left nothing that could be graded."""


class Regraded(Record):
    """One trajectory, graded again."""

    format: Literal[1] = 1
    trajectory_id: str
    task_id: str
    verifier: str
    """Digest of the verifier that judged now."""
    before: float | None
    after: float | None
    outcome: Outcome
    evidence: str = ""


class Change(Protocol):
    """What one trajectory left behind, graded."""

    async def __call__(self, trajectory: Trajectory, task: Task, *, fresh: bool) -> Verdict | None:
        """The verdict; None when the trajectory left nothing to grade."""
        ...


class Leftovers:
    """What each kind of agent left behind, found and graded."""

    def __init__(
        self,
        grader: Grader,
        provider: SandboxProvider,
        blobs: ReadBlobs,
    ) -> None:
        self._grader, self._provider, self._blobs = grader, provider, blobs

    async def __call__(self, trajectory: Trajectory, task: Task, *, fresh: bool) -> Verdict | None:
        """See `Change`. Raises SandboxError when commands cannot be run again."""
        if trajectory.repercussion:
            return trajectory.verdict
        if trajectory.patch is not None:
            return await self._grader.grade(task, base64.b64decode(trajectory.patch), fresh=fresh)
        if trajectory.submitted:
            files = {path: self._blobs.get(ref) for path, ref in trajectory.submitted.items()}
            return await self._grader.grade_files(task, files, fresh=fresh)
        if trajectory.agent == "repair-choice":
            return trajectory.verdict  # it never submitted: no verifier takes part
        if trajectory.agent == "bash" and trajectory.failure is None:
            return await self._replay(trajectory, task, fresh)
        return None

    async def _replay(self, trajectory: Trajectory, task: Task, fresh: bool) -> Verdict:
        workspace = Workspace(self._provider, task, BashConfig(), "regrade")
        for call in trajectory.tool_calls:
            reply = ToolReply(call.result, outcome=call.outcome, exit_code=call.exit_code)
            workspace.remember(str(call.arguments.get("command", "")), reply)
        try:
            diff = await workspace.diff()
        except AgentDestroyedSandbox as error:
            return Verdict(reward=0.0, evidence=str(error))
        finally:
            await workspace.close()
        return await self._grader.grade(task, diff, fresh=fresh)


async def regrade(
    trajectories: Iterable[Trajectory],
    task_of: Callable[[str], Task | None],
    change: Change,
    log: JsonLines,
    *,
    fresh: bool = False,
) -> AsyncIterator[Regraded]:
    """Grade each trajectory once for its task's present verifier; what the log has already is not repeated.

    `fresh` makes every verdict anew, those in the log and in the grader's cache included.
    """
    done = set[tuple[str, str]]() if fresh else {_key(line) for line in read_lines(log.path)}
    for trajectory in trajectories:
        task = task_of(trajectory.task_id)
        verifier = task.verifier.digest() if task else ""
        if (trajectory.id, verifier) in done:
            continue
        line = await _one(trajectory, task, verifier, change, fresh)
        if line.outcome not in ("unjudged", "skipped"):
            log.append(line.model_dump(mode="json"))
        yield line


def results(log: Iterable[dict[str, Any]], verifiers: dict[str, str]) -> list[Regraded]:
    """The last line of each trajectory for the verifier (task id -> digest) that its task has now."""
    last: dict[str, Regraded] = {}
    for row in log:
        line = Regraded.model_validate(row)
        if verifiers.get(line.task_id) == line.verifier:
            last[line.trajectory_id] = line
    return list(last.values())


def summary(lines: Iterable[Regraded]) -> dict[str, int]:
    """How many had each outcome; those of which there is none are left out."""
    return dict(sorted(Counter(line.outcome for line in lines).items()))


async def _one(
    trajectory: Trajectory, task: Task | None, verifier: str, change: Change, fresh: bool
) -> Regraded:
    before = trajectory.reward

    def line(outcome: Outcome, after: float | None, evidence: str) -> Regraded:
        return Regraded(
            trajectory_id=trajectory.id,
            task_id=trajectory.task_id,
            verifier=verifier,
            before=before,
            after=after,
            outcome=outcome,
            evidence=evidence,
        )

    if task is None:
        return line("skipped", None, "its task is not in the catalog")
    try:
        verdict = await change(trajectory, task, fresh=fresh)
    except (SandboxError, LookupError) as error:
        return line("unjudged", None, str(error))
    if verdict is None:
        return line("skipped", None, "it left nothing that could be graded")
    after = verdict.reward
    if after is None:
        return line("unjudged", None, verdict.failure.message if verdict.failure else verdict.evidence)
    if before is None:
        return line("judged", after, verdict.evidence)
    return line(
        "same" if after == before else "gained" if after > before else "lost", after, verdict.evidence
    )


def _key(line: dict[str, Any]) -> tuple[str, str]:
    return line["trajectory_id"], line["verifier"]
