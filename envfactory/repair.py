"""The search-based repair solver: localise, make edits, try them in order, confirm, submit.

    failing test -> suspicious functions (Ochiai, traceback, names in the test)
                 -> pool of edits of all operators, ordered by prior x suspiciousness
                 -> run the visible failing test on each until it passes

It sees what an agent sees: the buggy workspace and its visible tests. It never sees the gold patch, the
clean tree or a hidden test. Its tries are kept as plain data, the trajectory that SFT learns from. Left
out: repairs that need two edits, or an edit of something that is not inside a function.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from catalog.models import TestStatus, digest_json
from envfactory.bugs import named_function
from verifiers.operators import OPERATORS, Edit, edits, functions, operator_prior


class Report(Protocol):
    """What a run tells (`verifiers.runner.TestRun`)."""

    @property
    def tests(self) -> Mapping[str, TestStatus]: ...
    @property
    def messages(self) -> Mapping[str, str]: ...
    @property
    def outcome(self) -> str: ...
    @property
    def duration_s(self) -> float: ...
    @property
    def tampered(self) -> Sequence[str]: ...
    @property
    def functions(self) -> Mapping[str, tuple[str, ...]]: ...


class Runner(Protocol):
    """What runs tests (`verifiers.runner.TestRunner`)."""

    async def run(
        self,
        files: Mapping[str, bytes | None],
        arguments: Sequence[str],
        *,
        timeout: float = 60,
        trace: bool = False,
    ) -> Report: ...


class RepairConfig(BaseModel):
    """Settings of the search."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 0
    budget: NonNegativeInt = 80
    """Most edits to run."""
    parallel: PositiveInt = 2
    """Edits run at once; the first success in order counts, so the result does not depend on timing."""
    pool: PositiveInt = 600
    """Most edits in the pool; functions are taken whole, the most suspicious ones first."""
    hangs: PositiveInt = 3
    """The search gives up after so many edits that hang: where one blocks, most do."""
    timeout_s: PositiveFloat = 2.0
    """For one run. An edit may loop for ever, so this is also cut to `slow` times the buggy run."""
    slow: PositiveFloat = 8.0
    lossy: NonNegativeFloat = 0.1
    """Factor on operators without a way back: seldom a repair, but sometimes the only one."""
    noise: NonNegativeFloat = 0.5
    """Spread of the seeded noise on the logarithm of the weights; 0: strictly by weight."""
    traceback_bonus: NonNegativeFloat = 3.0
    """Factor for functions and again for lines that the failure message names."""
    mention_bonus: NonNegativeFloat = 3.0
    """Factor for functions whose name occurs in the failing test."""


@dataclass(frozen=True)
class BuggyWorkspace:
    """What the solver is given."""

    files: Mapping[str, str]
    """Source files of the buggy workspace that may be edited."""
    visible: tuple[str, ...]
    """Failing tests that the agent may run."""
    others: tuple[str, ...] = ()
    """Other tests of the workspace, for the spectrum; may be files."""
    test_source: str = ""
    """Text of the failing tests."""
    base: Mapping[str, bytes | None] = field(default_factory=dict[str, bytes | None])
    """What to lay over the runner's image to get the buggy workspace (empty: the image is buggy already)."""


@dataclass(frozen=True)
class Choice:
    """One edit of the pool."""

    path: str
    edit: Edit
    weight: float

    @property
    def key(self) -> tuple[str, int, str]:
        """File, place of the outermost function, its new text: one key, one repair."""
        return self.path, self.edit.segment[0], self.edit.text

    @property
    def files(self) -> dict[str, bytes | None]:
        return {self.path: self.edit.source.encode()}


@dataclass(frozen=True)
class Try:
    """One edit that was run on the visible failing tests."""

    index: int
    """In the pool."""
    passed: bool
    outcome: str
    message: str
    duration_s: float


@dataclass(frozen=True)
class Search:
    """The whole search of one workspace."""

    pool: tuple[Choice, ...]
    """In the order of trying."""
    tries: tuple[Try, ...]
    found: int | None
    """Index in the pool of the first confirmed success."""
    message: str
    """Failure text of the buggy workspace."""
    suspicion: Mapping[str, float]
    """`path::qualname` -> suspiciousness."""
    reason: str = ""
    """Why nothing was found."""
    first: int | None = None
    """Index in the pool of the first edit that passed the visible tests twice."""

    def trajectory(self) -> list[dict[str, Any]]:
        """The search as plain data: every try with its result, then `submit` when one was confirmed."""
        steps: list[dict[str, Any]] = []
        for one in self.tries:
            choice = self.pool[one.index]
            steps.append(
                {
                    "action": "try",
                    "index": one.index,
                    "path": choice.path,
                    "function": choice.edit.function,
                    "operator": choice.edit.operator,
                    "line": choice.edit.line,
                    "before": choice.edit.before,
                    "after": choice.edit.after,
                    "passed": one.passed,
                    "outcome": one.outcome,
                    "message": one.message,
                }
            )
        if self.found is not None:
            steps.append({"action": "submit", "index": self.found})
        return steps


def record(search: Search) -> dict[str, Any]:
    """What `restore` needs, as plain data; the pool is made again from the workspace."""
    return {
        "format": 1,
        "pool": pool_digest(search.pool),
        "tries": [asdict(one) for one in search.tries],
        "found": search.found,
        "message": search.message,
        "suspicion": dict(search.suspicion),
        "reason": search.reason,
        "first": search.first,
    }


def restore(
    data: Mapping[str, Any],
    workspace: BuggyWorkspace,
    config: RepairConfig | None = None,
    *,
    prior: Mapping[str, float] | None = None,
) -> Search:
    """The search again, without running anything. The arguments must be those of the search.

    Raises ValueError when they give another pool: its indices would name other edits.
    """
    pool = make_pool(workspace, data["suspicion"], data["message"], config or RepairConfig(), prior)
    if data["pool"] != pool_digest(pool) and data["pool"] != pool_digest(()):
        raise ValueError("the recorded search belongs to another workspace or other settings")
    tries = tuple(Try(**one) for one in data["tries"])
    return Search(
        pool, tries, data["found"], data["message"], data["suspicion"], data["reason"], data["first"]
    )


def pool_digest(pool: Sequence[Choice]) -> str:
    """Identity of a pool: its edits in their order."""
    return digest_json([choice.key for choice in pool])


def ochiai(failing: Collection[Collection[str]], passing: Collection[Collection[str]]) -> dict[str, float]:
    """Suspiciousness of each function that a failing test executed: ef / sqrt((ef + nf)(ef + ep)).

    Source: Abreu, Zoeteweij, van Gemund, "On the accuracy of spectrum-based fault localization" (2007).
    """
    ef = Counter(name for run in failing for name in set(run))
    ep = Counter(name for run in passing for name in set(run))
    return {name: n / math.sqrt(len(failing) * (n + ep[name])) for name, n in sorted(ef.items())}


def traceback_lines(message: str, paths: Collection[str]) -> dict[str, set[int]]:
    """Lines of the given files that a pytest failure text or a traceback names."""
    found: dict[str, set[int]] = {}
    pairs = re.findall(r'File "([^"]+)", line (\d+)', message) + re.findall(r"^(\S+?):(\d+):", message, re.M)
    for name, line in pairs:
        for path in paths:
            if name == path or name.endswith("/" + path):
                found.setdefault(path, set()).add(int(line))
    return found


def localise(
    workspace: BuggyWorkspace,
    failing: Mapping[str, Collection[str]],
    passing: Mapping[str, Collection[str]],
    message: str,
    config: RepairConfig,
) -> dict[str, float]:
    """Suspiciousness of the functions that the failing tests executed; more than 1 is possible."""

    def named(runs: Mapping[str, Collection[str]]) -> list[set[str]]:
        return [{named_function(name) for name in executed} for executed in runs.values()]

    scores = ochiai(named(failing), named(passing))
    seen = traceback_lines(message, workspace.files)
    words = set(re.findall(r"\w+", workspace.test_source))
    for name in scores:
        path, _, qualname = name.partition("::")
        spans = [span for span in functions(workspace.files.get(path, "")) if span.qualname == qualname]
        if any(span.start_line <= line <= span.end_line for span in spans for line in seen.get(path, ())):
            scores[name] *= config.traceback_bonus
        short = qualname.rpartition(".")[2]
        if short in words or (
            short == "__init__" and qualname.split(".")[-2:-1] and qualname.split(".")[-2] in words
        ):
            scores[name] *= config.mention_bonus
    return dict(sorted(scores.items(), key=lambda item: (-item[1], item[0])))


def make_pool(
    workspace: BuggyWorkspace,
    suspicion: Mapping[str, float],
    message: str,
    config: RepairConfig,
    prior: Mapping[str, float] | None = None,
) -> tuple[Choice, ...]:
    """Edits of the suspicious functions with all operators, in the order of trying.

    The weight of an edit: prior of its operator, shared among that operator's edits of the function, times
    the function's suspiciousness, over the square root of the function's edits (large functions would
    use up the budget), times a bonus for a line in the traceback. A text that two operators
    make is offered once, under the operator with the larger weight.
    """
    prior = operator_prior() if prior is None else prior
    seen = traceback_lines(message, workspace.files)
    best: dict[tuple[str, int, str], Choice] = {}
    # sorted here, not by the caller: a recorded search comes back with its names in another order
    for name, score in sorted(suspicion.items(), key=lambda item: (-item[1], item[0])):
        path, _, qualname = name.partition("::")
        offered = edits(workspace.files[path], functions={qualname}) if path in workspace.files else []
        counts = Counter(edit.operator for edit in offered)
        for edit in offered:
            weight = prior[edit.operator] / counts[edit.operator] * score / math.sqrt(len(offered))
            if not OPERATORS[edit.operator].invertible:
                weight *= config.lossy
            lines = range(edit.line, edit.line + edit.before.count("\n") + 1)
            if any(line in lines for line in seen.get(path, ())):
                weight *= config.traceback_bonus
            choice = Choice(path, edit, weight)
            known = best.get(choice.key)
            if known is None or known.weight < weight:
                best[choice.key] = choice
        if len(best) >= config.pool:
            break
    rng = random.Random(f"pool {config.seed}")
    keyed = [(math.log(c.weight) + config.noise * _gumbel(rng), i, c) for i, c in enumerate(best.values())]
    return tuple(choice for _, _, choice in sorted(keyed, key=lambda k: (-k[0], k[1])))


def _gumbel(rng: random.Random) -> float:
    return -math.log(-math.log(rng.uniform(1e-12, 1 - 1e-12)))


async def repair(
    workspace: BuggyWorkspace,
    runner: Runner,
    config: RepairConfig | None = None,
    *,
    prior: Mapping[str, float] | None = None,
    confirm: Callable[[Choice], Awaitable[bool | None]] | None = None,
) -> Search:
    """Search a repair.

    Args:
        prior: weights of the operators (`verifiers.operators.operator_prior`).
        confirm: asked about each edit that passes the visible tests; the search goes on until it says yes.
            Without it the first such edit is the end, which is what a solver submits (`Search.first`).
    """
    config = config or RepairConfig()
    first = await runner.run(workspace.base, workspace.visible, timeout=60, trace=True)
    broken = [test for test in workspace.visible if first.tests.get(test) is not TestStatus.PASSED]
    if not broken:
        return Search((), (), None, "", {}, "no visible test fails")
    message = "\n".join(first.messages.get(test, "") for test in broken) or first.outcome
    passing: dict[str, tuple[str, ...]] = {}
    if workspace.others:
        rest = await runner.run(workspace.base, workspace.others, timeout=60, trace=True)
        passing = {t: f for t, f in rest.functions.items() if rest.tests.get(t) is TestStatus.PASSED}
    failing = {test: first.functions.get(test, ()) for test in broken}
    suspicion = localise(workspace, failing, passing, message, config)
    if not suspicion:
        return Search((), (), None, message, {}, "the failing tests executed no function of the package")
    pool = make_pool(workspace, suspicion, message, config, prior)
    timeout = min(config.timeout_s, max(0.5, config.slow * first.duration_s))
    tries: list[Try] = []
    first_hit = found = None
    for start in range(0, min(config.budget, len(pool)), config.parallel):
        batch = range(start, min(start + config.parallel, config.budget, len(pool)))
        done = await asyncio.gather(*(attempt(workspace, pool[i], i, runner, timeout) for i in batch))
        tries += done
        hits = [one.index for one in done if one.passed]
        for index in hits:
            if not (await attempt(workspace, pool[index], index, runner, timeout)).passed:
                continue
            first_hit = index if first_hit is None else first_hit
            if confirm is None or await confirm(pool[index]):
                found = index
                break
        if found is not None or sum(one.outcome == "timeout" for one in tries) >= config.hangs:
            break
    reason = "" if found is not None else f"no success in {len(tries)} of {len(pool)} edits"
    return Search(pool, tuple(tries), found, message, suspicion, reason, first_hit)


async def attempt(
    workspace: BuggyWorkspace, choice: Choice, index: int, runner: Runner, timeout: float
) -> Try:
    """Run the visible failing tests on one edit; it passes when every one of them does."""
    run = await runner.run({**workspace.base, **choice.files}, workspace.visible, timeout=timeout)
    honest = run.outcome == "finished" and not run.tampered
    passed = honest and all(run.tests.get(test) is TestStatus.PASSED for test in workspace.visible)
    message = "" if passed else "\n".join(run.messages.values())
    return Try(index, passed, run.outcome, message, run.duration_s)


def right_operators(searches: Collection[Search]) -> dict[str, float]:
    """How often each operator held the repair: the frequency table for `operator_prior`."""
    counts = Counter(s.pool[s.found].edit.operator for s in searches if s.found is not None)
    return {name: float(counts[name]) for name in OPERATORS if counts[name]}
