"""Eight candidate repairs of a task, for the agent that chooses among them.

    search -> its success and seven other edits of the same pool -> each judged -> shuffled by task id

The others are drawn so that nothing but reading the code tells them apart: operators from the same
distribution as the right ones', lines from a window of the function in which the right one stands at a
random rank. `envfactory.shortcuts` measures how far rules that do not read get. A set in which none or
more than two pass the hidden tests is left out, with the reason. The gold patch is never read: the right
one is what the search found in the buggy workspace.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from catalog.models import Candidate, CandidateSet
from envfactory.repair import Choice, BuggyWorkspace, Runner, Search, attempt

Judge = Callable[[Mapping[str, bytes | None]], Awaitable[bool | None]]
"""Verdict of the hidden tests on the workspace with these files changed; None: it could not be judged."""


class Blobs(Protocol):
    """Where file contents go (`catalog.blobs.Blobs`)."""

    def put(self, data: bytes) -> str: ...


class CandidateConfig(BaseModel):
    """Settings of the choice."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 0
    count: int = 8
    most_passing: int = 2
    """A set with more passing candidates is left out."""
    window: int = 48
    """Edits of neighbouring lines among which the others are drawn."""
    timeout_s: float = 5.0


@dataclass(frozen=True)
class Chosen:
    """The set of one task, or why it has none."""

    candidates: CandidateSet | None
    reason: str = ""


def draw(
    search: Search, task_id: str, frequency: Mapping[str, float], config: CandidateConfig
) -> list[int] | None:
    """Indices in the pool of the candidates, in the order shown; None: the pool is too small.

    `frequency`: how often each operator is right (`repair.right_operators` over the searches of the
    split); operators that are never right are not drawn while others are left.
    """
    assert search.found is not None
    rng = random.Random(f"candidates {config.seed} {task_id}")
    near = _window(search.pool, search.found, config, rng)
    chosen = [search.found]
    while len(chosen) < config.count and near:
        by_operator: dict[str, list[int]] = {}
        for index in near:
            by_operator.setdefault(search.pool[index].edit.operator, []).append(index)
        names = sorted(by_operator)
        weights = [frequency.get(name, 0.0) for name in names]
        if not any(weights):
            weights = [1.0] * len(names)
        index = rng.choice(by_operator[rng.choices(names, weights)[0]])
        near.remove(index)
        chosen.append(index)
    if len(chosen) < config.count:
        return None
    # shuffled from a canonical order by task id alone: the place says nothing about the search
    chosen.sort(key=lambda i: search.pool[i].key)
    random.Random(task_id).shuffle(chosen)
    return chosen


def _window(pool: Sequence[Choice], right: int, config: CandidateConfig, rng: random.Random) -> list[int]:
    """Edits on lines around the right one, which stands at a random rank among them; without it."""
    home = pool[right]
    jitter = [rng.random() for _ in pool]

    def place(index: int) -> tuple[int, float]:
        return pool[index].edit.line, jitter[index]

    same = [i for i, c in enumerate(pool) if c.path == home.path and c.edit.function == home.edit.function]
    if len(same) <= config.count:  # too small a function: take in the rest of the file
        same = [i for i, c in enumerate(pool) if c.path == home.path]
    if len(same) < config.count:
        same = list(range(len(pool)))
    same.sort(key=place)
    at = same.index(right)
    first = max(0, min(at - rng.randrange(config.window), len(same) - config.window))
    return [i for i in same[first : first + config.window] if i != right]


async def choose(
    task_id: str,
    workspace: BuggyWorkspace,
    search: Search,
    runner: Runner,
    judge: Judge,
    blobs: Blobs,
    frequency: Mapping[str, float],
    config: CandidateConfig | None = None,
) -> Chosen:
    """Draw the candidates and judge each of them.

    A candidate that fails the visible test fails the verifier, of which the visible tests are a part, so
    only the others are judged by hidden tests.
    """
    config = config or CandidateConfig()
    if search.found is None:
        return Chosen(None, f"search: {search.reason}")
    indices = draw(search, task_id, frequency, config)
    if indices is None:
        return Chosen(None, f"pool: only {len(search.pool)} edits, {config.count} are needed")
    known = {one.index: one.passed for one in search.tries}
    known[search.found] = True
    fresh = [i for i in indices if i not in known]
    runs = [attempt(workspace, search.pool[i], i, runner, config.timeout_s) for i in fresh]
    known |= {one.index: one.passed for one in await asyncio.gather(*runs)}
    visible = tuple(known[i] for i in indices)
    verdicts = await asyncio.gather(*(_verdict(search.pool[i], known[i], judge) for i in indices))
    if any(verdict is None for verdict in verdicts):
        return Chosen(None, "infrastructure: a candidate could not be judged")
    passes = tuple(bool(verdict) for verdict in verdicts)
    if not any(passes):
        return Chosen(None, "none passes: the search's success fails hidden tests")
    if sum(passes) > config.most_passing:
        return Chosen(None, f"ambiguous: {sum(passes)} of {len(passes)} candidates pass")
    order = tuple(sorted(range(len(indices)), key=lambda n: indices[n]))
    chosen = CandidateSet(
        task_id=task_id,
        candidates=tuple(_record(search.pool[i], blobs) for i in indices),
        passes_visible=visible,
        passes=passes,
        tried=len(search.tries),
        order=order,
        test_source=workspace.test_source,
        failure=search.message,
    )
    return Chosen(chosen)


async def _verdict(choice: Choice, visible: bool, judge: Judge) -> bool | None:
    return await judge(choice.files) if visible else False


def _record(choice: Choice, blobs: Blobs) -> Candidate:
    edit = choice.edit
    return Candidate(
        operator=edit.operator,
        path=choice.path,
        line=edit.line,
        before=edit.before,
        after=edit.after,
        content=blobs.put(edit.source.encode()),
    )


def demonstration(chosen: CandidateSet, *, tries: int = 3) -> list[dict[str, Any]] | None:
    """The solver's way through a set: try in its order until the visible test passes, then submit.

    None when it finds nothing in `tries`, or when what it would submit fails the hidden tests: only
    verified trajectories are taught.
    """
    steps: list[dict[str, Any]] = []
    for index in chosen.order[:tries]:
        passed = chosen.passes_visible[index]
        steps.append({"action": "try", "candidate": index, "passed": passed})
        if passed:
            steps.append({"action": "submit", "candidate": index, "passed": chosen.passes[index]})
            return steps if chosen.passes[index] else None
    return None
