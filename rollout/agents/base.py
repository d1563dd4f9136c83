"""What an agent is: code that acts on one task through one session, and says how it ended.

An agent holds only what it shares between samples (a sandbox provider, a grader). What goes wrong is told
apart by boundary: a verdict with reward 0 is the policy's doing; an infrastructure failure is raised, and
`attempt` turns it into a typed `Failure` on the trajectory, which enters neither loss nor baseline.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from catalog.models import Failure, Task, Verdict
from catalog.trajectory import Trajectory
from rollout.engine import RequestError
from rollout.session import ReplayMismatch, Session
from sandbox.base import SandboxError
from verifiers.runner import RunnerFailed


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended. A verdict without a reward carries its own failure."""

    verdict: Verdict
    repercussion: bool = False
    """The agent destroyed its own environment; that is its doing, so the verdict has a reward."""
    diff: bytes | None = None
    """What was graded: it can be graded again."""
    submitted: Mapping[str, str] = field(default_factory=dict[str, str])
    """Whole files that were graded instead: path -> blob."""


@runtime_checkable
class Agent(Protocol):
    """A scaffold."""

    name: str
    fresh: bool
    """Verdicts are never taken from a cache. Evaluation demands it."""

    async def run(self, task: Task, session: Session) -> Outcome:
        """Act until done. It may raise SandboxError, RunnerFailed, RequestError and AgentFailure;
        anything else is a fault of the agent's code and stops the job."""
        ...


class AgentFailure(Exception):
    """The scaffold cannot go on for a reason that is not the policy's (a missing candidate set, say)."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


async def attempt(agent: Agent, task: Task, session: Session, *, policy: str) -> Trajectory:
    """Run the agent once; failures of ours become values on the trajectory."""
    failure: Failure | None = None
    verdict: Verdict | None = None
    repercussion = False
    patch: str | None = None
    submitted: dict[str, str] = {}
    try:
        outcome = await agent.run(task, session)
        verdict, repercussion = outcome.verdict, outcome.repercussion
        submitted = dict(outcome.submitted)
        patch = None if outcome.diff is None else base64.b64encode(outcome.diff).decode()
        failure = verdict.failure
    except RequestError as error:
        failure = Failure(boundary="engine", kind=error.kind, message=str(error))
    except SandboxError as error:
        failure = Failure(boundary="sandbox", kind=type(error).__name__, message=str(error))
    except RunnerFailed as error:
        failure = Failure(boundary="verifier", kind="RunnerFailed", message=str(error))
    except AgentFailure as error:
        failure = Failure(boundary="scaffold", kind=error.kind, message=str(error))
    except ReplayMismatch as error:
        failure = Failure(boundary="scaffold", kind="replay", message=str(error))
    return session.trajectory(
        agent=agent.name,
        policy=policy,
        verdict=verdict,
        failure=failure,
        repercussion=repercussion,
        patch=patch,
        submitted=submitted,
    )
