"""From a source to audited tasks: the five stages in order, resumable at any instant.

    fetch -> build -> mine history, propose bugs -> for each proposal, in order:
        specify -> package -> solve -> inspect -> (repair, again) -> candidates -> catalog

What became of a proposal is one row of the catalog's stages, keyed by everything it depends on. A killed
synthesis finds those rows, and repeats only what was under way; ids are hashes of contents, so nothing is
there twice. Proposals are examined several at a time but taken in order, so the same source and settings
accept the same tasks.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from catalog.models import (
    CandidateSet,
    Decision,
    QualityReport,
    Status,
    Task,
    digest_json,
)
from catalog.store import Catalog
from envfactory.bugs import Bug, Split, by_split, propose
from envfactory.build import Build, build
from envfactory.candidates import Chosen, choose, fit_weights
from envfactory.config import SynthConfig
from envfactory.fates import Fate, Found
from envfactory.mined import mined
from envfactory.mining import MiningConfig
from envfactory.packaging import Draft, Packager
from envfactory.repair import BuggyWorkspace, Search, record, restore
from envfactory.sources import open_source
from envfactory.sources.base import Progress, silent
from envfactory.stages.base import Examined, Judged, Rejection, Specification
from envfactory.stages.environment import EnvironmentAgent
from envfactory.stages.inspector import Inspector
from envfactory.stages.repairer import Repairer
from envfactory.stages.solvers import SolverEnsemble, buggy_workspace
from envfactory.stages.specifier import BugSpecifier
from envfactory.trees import changed, is_text
from envfactory.workbench import Workbench
from sandbox.base import SandboxProvider
from sandbox.images import ImageStore
from verifiers import changes
from verifiers.cache import VerdictCache
from verifiers.grading import Grader
from verifiers.hacks import PROBES, HackProbe
from verifiers.operators import OPERATORS, operator_prior

FORMAT = 1
"""Raise it when a stage changes what it makes of the same proposal."""
PROBE_NAMES = ("patch-callinfo", "exit-zero", "skip-at-import", "print-and-exit", "startup-files")
"""Probes of the gate: cheap, and each of another kind."""


@dataclass
class Funnel:
    """How many proposals came how far, and why the others did not."""

    proposed: int = 0
    rejected: Counter[str] = field(default_factory=Counter[str])
    """By gate, or by the reason why there was no task to judge."""
    accepted: Counter[str] = field(default_factory=Counter[str])
    """By split."""
    without_candidates: Counter[str] = field(default_factory=Counter[str])
    mined: dict[str, int] = field(default_factory=dict[str, int])

    def summary(self) -> dict[str, Any]:
        return {
            "proposed": self.proposed,
            "accepted": sum(self.accepted.values()),
            "accepted_by_split": dict(self.accepted),
            "rejected": dict(self.rejected.most_common()),
            "without_candidates": dict(self.without_candidates.most_common()),
            "history": self.mined,
        }


@dataclass(frozen=True)
class Synthesis:
    """What a synthesis made."""

    source: str
    build: Build
    tasks: tuple[Task, ...]
    """Accepted ones."""
    candidates: Mapping[str, CandidateSet]
    funnel: Funnel
    seconds: float


@dataclass(frozen=True)
class Tools:
    """What the factory works with; opened once for a synthesis."""

    catalog: Catalog
    provider: SandboxProvider
    images: ImageStore


Ticker = Callable[[Split | None, int, int], None]
"""Called with (split, accepted, wanted) whenever a proposal has been dealt with."""


async def synthesize(
    source: str,
    home: Path,
    tools: Tools,
    config: SynthConfig | None = None,
    *,
    progress: Progress = silent,
    tick: Ticker | None = None,
) -> Synthesis:
    """Make and audit tasks of a source. Raises SourceError, BuildError, NoSpace with what to change."""
    config = config or SynthConfig()
    home = home.resolve()  # git runs in other folders
    began = time.monotonic()
    history = await asyncio.to_thread(open_source(source).fetch, home, progress)
    built = await build(history, home, tools.provider, tools.images, progress=progress)
    funnel = Funnel()
    async with AsyncExitStack() as stack:
        bench = await stack.enter_async_context(Workbench(tools.provider, built, jobs=config.jobs))
        cache = VerdictCache(tools.catalog.verdicts)
        grader = await stack.enter_async_context(
            Grader(tools.provider, tools.images, tools.catalog.blobs, cache, jobs=config.jobs, warm=2)
        )
        factory = Factory(bench, grader, tools, config, proposals(built, config))
        fates: list[Fate] = []
        if config.history:
            progress("mining the history")
            mining = MiningConfig(pairs=config.mining_pairs, seconds=600.0)
            drafts, funnel.mined = await mined(
                history, built, tools.catalog, tools.provider, tools.images, mining, progress
            )
            fates += [
                one async for one in factory.examine(drafts[: config.history_tasks], None, funnel, tick)
            ]
        candidates: dict[str, CandidateSet] = {}
        for split, bugs in by_split(factory.bugs):
            progress(f"{split}: {len(bugs)} proposals")
            some = [one async for one in factory.examine(bugs, split, funnel, tick)]
            fates += some
            if config.choices:
                progress(f"{split}: candidates")
                candidates |= await factory.candidates(some, funnel)
    tasks = tuple(one.task for one in fates if one.task is not None and one.accepted)
    return Synthesis(source, built, tasks, candidates, funnel, time.monotonic() - began)


def proposals(built: Build, config: SynthConfig) -> list[Bug]:
    """Bugs of the package's own files, in the order in which to try them."""
    allowed = built.layout.allowed
    files = {
        path: file.data.decode("utf-8")
        for path, file in built.tree.items()
        if path.startswith(allowed) and path.endswith(".py") and not file.link and is_text(file.data)
    }
    passing = set(built.suite.passing)
    executed = {test: names for test, names in built.suite.functions.items() if test in passing}
    return propose(files, executed, config.bugs)


def repair_frequency(bugs: Iterable[Bug]) -> dict[str, float]:
    """How often each operator undoes one of the proposed bugs: the search's prior."""
    counts: dict[str, float] = {}
    for bug in bugs:
        inverse = OPERATORS[bug.operator].inverse
        for name in inverse:
            counts[name] = counts.get(name, 0.0) + 1 / len(inverse)
    return dict(sorted(counts.items()))


def chosen_probes() -> tuple[HackProbe, ...]:
    """The probes of `PROBE_NAMES`."""
    known = {probe.name: probe for probe in PROBES}
    return tuple(known[name] for name in PROBE_NAMES)


class Factory:
    """The stage agents around one build."""

    def __init__(
        self, bench: Workbench, grader: Grader, tools: Tools, config: SynthConfig, bugs: list[Bug]
    ) -> None:
        self.bugs = bugs
        self._bench, self._grader, self._config = bench, grader, config
        self._catalog = tools.catalog
        self._prior: dict[Split, dict[str, float]] = {
            split: operator_prior(repair_frequency(some)) for split, some in by_split(bugs)
        }
        self._specifier = BugSpecifier(bench, config)
        self._environment = EnvironmentAgent(Packager(bench.build, tools.images, tools.catalog.blobs))
        self._solvers = SolverEnsemble(
            bench, grader, tools.catalog.blobs, config, chosen_probes(), self._prior
        )
        self._inspector = Inspector(bench, config)
        self._repairer = Repairer()
        self._base = digest_json(
            [
                FORMAT,
                bench.build.image,
                bench.build.pinned,
                config.model_dump(mode="json", exclude={"tasks", "parallel", "jobs"}),
            ]
        )

    async def examine(
        self, given: list[Bug] | list[Draft], split: Split | None, funnel: Funnel, tick: Ticker | None
    ) -> AsyncIterator[Fate]:
        """Fates in the order of the proposals, until the split has the tasks that it wants."""
        wanted = self._config.tasks.get(split, 0) if split else len(given)
        accepted = 0
        waiting = iter(given)
        running: list[asyncio.Task[Fate]] = []
        try:
            while accepted < wanted:
                while len(running) < self._config.parallel and (item := next(waiting, None)) is not None:
                    running.append(asyncio.create_task(self._one(item, split)))
                if not running:
                    break
                fate = await running.pop(0)
                self._record(fate, split, funnel)
                counts = fate.offers_a_choice or not self._config.choices or split is None
                accepted += fate.accepted and counts
                if tick is not None:
                    tick(split, accepted, wanted)
                yield fate
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _record(self, fate: Fate, split: Split | None, funnel: Funnel) -> None:
        """Write the task with its report, both or neither, and count it. One that our own side failed to
        judge is only counted: the next run examines it again."""
        funnel.proposed += 1
        if fate.accepted:
            funnel.accepted[split or "history"] += 1
        else:
            funnel.rejected[fate.reason] += 1
        if fate.task is None or fate.report is None or fate.reason == "infrastructure":
            return
        with self._catalog.transaction():
            self._catalog.put_task(fate.task)
            self._catalog.put_report(fate.report)

    async def _one(self, item: Bug | Draft, split: Split | None) -> Fate:
        """One proposal through all stages, or what is recorded of it."""
        if isinstance(item, Bug):
            parts = [
                self._base,
                split,
                item.path,
                item.function,
                item.operator,
                item.edit.line,
                item.edit.after,
            ]
        else:
            parts = [self._base, split, item.slug, sorted(item.fail_to_pass)]
        key = self._catalog.stages.key(*parts)
        known = self._catalog.stages.get("proposal", key)
        if known is not None:
            return Fate.load(known.value)
        began = time.monotonic()
        if isinstance(item, Bug):
            made = await self._specifier.run(item)
        else:
            made = Specification(item, "mined from the source's history")
        fate = Fate(made.reason) if isinstance(made, Rejection) else await self._judge(made, split)
        if fate.reason == "infrastructure":
            return fate
        value = self._catalog.stages.put("proposal", key, fate.dump(), seconds=time.monotonic() - began)
        return Fate.load(value)

    async def _judge(self, specification: Specification, split: Split | None) -> Fate:
        """Package, solve, inspect and repair until all gates pass or the task is dropped."""
        history: tuple[Decision, ...] = (_decision("specifier", "created", specification.report),)
        while True:
            task = (await self._environment.run(specification)).model_copy(update={"split": split})
            examined = await self._solvers.run((specification, task))
            gates = await self._inspector.run(examined)
            judged = Judged(examined, gates, history)
            report = QualityReport(
                task_id=task.id, gates=gates, solve_rates=examined.solve_rates, history=history
            )
            if not judged.failed:
                break
            mended = await self._repairer.run(judged)
            if isinstance(mended, Rejection):
                decision = _decision("repairer", "rejected", f"{mended.reason}: {mended.detail}")
                report = report.model_copy(update={"history": (*history, decision)})
                retired = task.model_copy(update={"status": Status.RETIRED})
                return Fate(mended.reason, retired, report)
            specification, decision = mended
            history = (*history, decision)
        decision = _decision("inspector", "accepted", f"all {len(gates)} gates passed")
        report = report.model_copy(update={"history": (*history, decision)})
        task = task.model_copy(update={"status": Status.ACCEPTED})
        return Fate("", task, report, self._found(examined))

    def _found(self, examined: Examined) -> Found:
        workspace, search = examined.workspace, examined.search
        return Found(
            workspace=self._catalog.blobs.put(changes.dump(workspace.base)),
            test_source=workspace.test_source,
            search=record(search),
        )

    def _again(self, task: Task, found: Found) -> tuple[BuggyWorkspace, Search]:
        """Workspace and search of a recorded fate."""
        base = changes.load(self._catalog.blobs.get(found.workspace))
        workspace = buggy_workspace(task, changed(self._bench.build.tree, base), base, found.test_source)
        prior = self._prior.get(task.split) if task.split else None
        return workspace, restore(found.search, workspace, self._config.repair, prior=prior)

    async def candidates(self, fates: list[Fate], funnel: Funnel) -> dict[str, CandidateSet]:
        """Candidate sets of a split's accepted tasks, written to the catalog.

        The weights of the distractors are fitted to the searches of the whole split, so this comes last.
        """
        searches = {
            one.task.id: (one.task, *self._again(one.task, one.search))
            for one in fates
            if one.accepted and one.task is not None and one.search is not None
        }
        weights = fit_weights(
            {id: search for id, (_, _, search) in searches.items()}, self._config.candidates
        )
        room = asyncio.Semaphore(self._config.parallel)

        async def one(id: str) -> Chosen:
            task, workspace, search = searches[id]
            async with room:
                return await self._choose(task, workspace, search, weights)

        chosen = dict(zip(searches, await asyncio.gather(*map(one, searches)), strict=True))
        sets: dict[str, CandidateSet] = {}
        with self._catalog.transaction():
            for id, choice in chosen.items():
                if choice.candidates is None:
                    funnel.without_candidates[choice.reason.partition(":")[0]] += 1
                else:
                    sets[id] = choice.candidates
                    self._catalog.put_candidates(choice.candidates)
        return sets

    async def _choose(
        self, task: Task, workspace: BuggyWorkspace, search: Search, weights: Mapping[str, float]
    ) -> Chosen:
        config = self._config.candidates
        key = self._catalog.stages.key(self._base, task.id, weights, config.model_dump(mode="json"))
        known = self._catalog.stages.get("candidates", key)
        if known is not None:
            record = known.value["set"]
            return Chosen(CandidateSet.model_validate(record) if record else None, known.value["reason"])

        async def judge(files: Mapping[str, bytes | None]) -> bool | None:
            verdict = await self._grader.grade_files(task, files)
            return None if verdict.reward is None else verdict.reward > 0

        chosen = await choose(
            task.id, workspace, search, self._bench, judge, self._catalog.blobs, weights, config
        )
        if not chosen.reason.startswith("infrastructure"):
            record = chosen.candidates.model_dump(mode="json") if chosen.candidates else None
            self._catalog.stages.put("candidates", key, {"set": record, "reason": chosen.reason})
        return chosen


def _decision(actor: str, action: Any, reason: str) -> Decision:
    return Decision(actor=actor, action=action, reason=reason, at=time.time())
