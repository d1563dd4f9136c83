"""What stage agents pass to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from catalog.models import Decision, Gate, SolveRate, Task
from envfactory.packaging import Draft
from envfactory.repair import BuggyWorkspace, Search

Given = TypeVar("Given", contravariant=True)
Made = TypeVar("Made", covariant=True)


class StageAgent(Protocol[Given, Made]):
    """One stage: deterministic here, or driven by a model; its output faces the same gates either way."""

    name: str

    async def run(self, given: Given) -> Made: ...


@dataclass(frozen=True)
class Rejection:
    """A stage's answer when nothing can be made of what it was given."""

    reason: str
    """Short and countable: the funnel shows it."""
    detail: str = ""


@dataclass(frozen=True)
class Specification:
    """What the specifier makes: a draft with its evaluation points, and how it found them."""

    draft: Draft
    report: str
    """Construction report: what was run and what it said."""
    messages: dict[str, str] = field(default_factory=dict[str, str])
    """Failure texts of the fail-to-pass tests in the start state."""


@dataclass(frozen=True)
class Attempt:
    """One solver's attempt at one task."""

    solver: str
    kind: str
    """`gold`, `noop`, `stub`, `search` or `hack`."""
    reward: float | None
    evidence: str
    cost_s: float
    data: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Examined:
    """A packaged task with everything the solvers did to it."""

    specification: Specification
    task: Task
    attempts: tuple[Attempt, ...]
    workspace: BuggyWorkspace
    search: Search

    @property
    def solve_rates(self) -> tuple[SolveRate, ...]:
        return tuple(
            SolveRate(solver=one.solver, passed=int(one.reward), attempts=1)
            for one in self.attempts
            if one.reward is not None
        )


@dataclass(frozen=True)
class Judged:
    """An examined task with its gates, and the decisions so far."""

    examined: Examined
    gates: tuple[Gate, ...]
    history: tuple[Decision, ...] = ()

    @property
    def failed(self) -> tuple[Gate, ...]:
        return tuple(gate for gate in self.gates if not gate.passed)
