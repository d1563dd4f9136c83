"""Eight candidate repairs of a task, for the agent that chooses among them.

    search -> its success and seven other edits of the same pool -> each judged -> shuffled by task id

The others are drawn so that nothing but reading the code tells them apart: by weights of the operators
under which the right one is an edit like any other, and from a window of lines of the function in which
it stands at a random rank. `envfactory.shortcuts` measures how far rules that do not read get. A set in
which none or more than two pass the hidden tests is left out, with the reason. The gold patch is never
read: the right one is what the search found in the buggy workspace.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from catalog.models import Candidate, CandidateSet
from envfactory.repair import BuggyWorkspace, Choice, Runner, Search, attempt
from verifiers.operators import even_weights, window

Judge = Callable[[Mapping[str, bytes | None]], Awaitable[bool | None]]
"""Verdict of the hidden tests on the workspace with these files changed; None: it could not be judged."""


class Blobs(Protocol):
    """Where file contents go (`catalog.blobs.Blobs`)."""

    def put(self, data: bytes) -> str: ...


class CandidateConfig(BaseModel):
    """Settings of the choice."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 0
    count: PositiveInt = 8
    most_passing: NonNegativeInt = 2
    """A set with more passing candidates is left out."""
    window: PositiveInt = 48
    """Edits of neighbouring lines among which the others are drawn."""
    timeout_s: PositiveFloat = 2.0


@dataclass(frozen=True)
class Chosen:
    """The set of one task, or why it has none."""

    candidates: CandidateSet | None
    reason: str = ""


def draw(
    search: Search, task_id: str, weights: Mapping[str, float], config: CandidateConfig
) -> list[int] | None:
    """Indices in the pool of the candidates, in the order shown; None: the pool is too small.

    `weights`: of one edit of each operator (`fit_weights`); edits of weight 0 are drawn when nothing else
    is left.
    """
    assert search.found is not None
    rng = random.Random(f"candidates {config.seed} {task_id}")
    near = [i for i in _window(search, task_id, config) if i != search.found]
    chosen = [search.found]
    while len(chosen) < config.count and near:
        odds = [weights.get(search.pool[i].edit.operator, 0.0) for i in near]
        index = rng.choices(near, odds if any(odds) else None)[0]
        near.remove(index)
        chosen.append(index)
    if len(chosen) < config.count:
        return None
    # shuffled from a canonical order by task id alone: the place says nothing about the search
    chosen.sort(key=lambda i: search.pool[i].key)
    random.Random(task_id).shuffle(chosen)
    return chosen


def fit_weights(
    searches: Mapping[str, Search], config: CandidateConfig | None = None, *, rounds: int = 30
) -> dict[str, float]:
    """Weights under which the right ones look like any other draw from their windows (`even_weights`).

    `searches`: task id -> search, of one split.
    """
    config = config or CandidateConfig()
    windows: list[tuple[Counter[str], str]] = []
    for task_id, search in searches.items():
        if search.found is not None:
            near = _window(search, task_id, config)
            counts = Counter(search.pool[i].edit.operator for i in near)
            windows.append((counts, search.pool[search.found].edit.operator))
    return even_weights(windows, rounds=rounds)


def _window(search: Search, task_id: str, config: CandidateConfig) -> list[int]:
    """Edits on lines around the right one, which stands at a random rank among them."""
    pool, right = search.pool, search.found
    assert right is not None
    rng = random.Random(f"window {config.seed} {task_id}")
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
    return window(same, right, config.window, rng)


async def choose(
    task_id: str,
    workspace: BuggyWorkspace,
    search: Search,
    runner: Runner,
    judge: Judge,
    blobs: Blobs,
    weights: Mapping[str, float],
    config: CandidateConfig | None = None,
) -> Chosen:
    """Draw the candidates and judge each of them.

    A candidate that fails the visible test fails the verifier, of which the visible tests are a part, so
    only the others are judged by hidden tests.
    """
    config = config or CandidateConfig()
    if search.found is None:
        return Chosen(None, f"search: {search.reason}")
    indices = draw(search, task_id, weights, config)
    if indices is None:
        return Chosen(None, f"pool: only {len(search.pool)} edits, {config.count} are needed")
    known = {one.index: one for one in search.tries}
    fresh = [i for i in indices if i not in known]
    runs = [attempt(workspace, search.pool[i], i, runner, config.timeout_s) for i in fresh]
    known |= {one.index: one for one in await asyncio.gather(*runs)}
    visible = tuple(known[i].passed for i in indices)
    verdicts = await asyncio.gather(*(_verdict(search.pool[i], known[i].passed, judge) for i in indices))
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
        messages=tuple("" if known[i].passed else known[i].message or known[i].outcome for i in indices),
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
