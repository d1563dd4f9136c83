"""The demo's stages: each one call of a room's own entry point, each resumable on its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catalog.models import CandidateSet, RunKind, Task
from catalog.runs import RunFolder, read_run
from catalog.store import Catalog
from catalog.trajectory import Trajectory
from console.demo.config import DemoConfig
from console.demo.split import Parts, endless
from console.progress import Stage
from console.runs import record
from envfactory.synthesis import Synthesis, Tools, synthesize
from model.policy import Policy, load_policy
from opd.config import TeacherConfig
from rollout.agents.repair_choice import RepairChoice
from rollout.config import EngineConfig, ServiceConfig
from rollout.evaluate import Evaluation, EvaluationConfig, evaluate
from rollout.handover import OpenSamples, samples_from
from rollout.native import NativeEngine
from rollout.samples import Speaker
from rollout.service import RolloutService
from rollout.visible import GraderVisibleTests
from sandbox.base import SandboxProvider
from sandbox.images import ImageStore
from sft.config import SftConfig
from sft.data import Example
from sft.demonstrations import demonstrations
from verifiers.cache import VerdictCache
from verifiers.grading import Grader


@dataclass(frozen=True)
class Bench:
    """What every stage works with."""

    config: DemoConfig
    folder: Path
    """Run folder of the demo; each stage has one of its own beneath."""
    catalog: Catalog
    provider: SandboxProvider
    images: ImageStore
    sets: Mapping[str, CandidateSet]
    """Candidate sets by task id; empty before the synthesis."""

    @property
    def home(self) -> Path:
        return self.folder / "home"


async def make_tasks(bench: Bench, stage: Stage) -> Synthesis:
    """Synthesis: a source becomes audited tasks with candidate sets."""
    wanted = sum(bench.config.synth.tasks.values())
    reached: dict[str, int] = {}

    def tick(split: Any, accepted: int, _: int) -> None:
        reached[split or "history"] = accepted
        done = sum(count for name, count in reached.items() if name != "history")
        stage.update(min(done, wanted), total=wanted)

    tools = Tools(bench.catalog, bench.provider, bench.images)
    return await synthesize(
        bench.config.source, bench.home, tools, bench.config.synth, progress=stage.note, tick=tick
    )


def agent(bench: Bench, grader: Grader, *, fresh: bool) -> RepairChoice:
    """The `repair-choice` agent; `fresh` for evaluation, where nothing comes from a cache.

    In training a task shows its candidates in another order each time, in evaluation always in its own.
    """
    visible = GraderVisibleTests(grader, cache=not fresh)
    return RepairChoice(
        bench.sets.__getitem__, bench.catalog.blobs, visible, grader, fresh=fresh, reshuffle=not fresh
    )


def grader(bench: Bench) -> Grader:
    """A grader on the catalog's verdict cache."""
    cache = VerdictCache(bench.catalog.verdicts)
    return Grader(bench.provider, bench.images, bench.catalog.blobs, cache, jobs=bench.config.synth.jobs)


def examples(bench: Bench, tasks: Sequence[Task], policy: Policy, variants: int) -> list[Example]:
    """Demonstrations of the repair solver on these tasks."""
    return demonstrations(
        [bench.sets[task.id] for task in tasks],
        policy.chat,
        variants=variants,
        efforts=bench.config.rl.effort.efforts,
        seed=bench.config.seed,
        window=policy.replay_window,
        count=lambda text: len(policy.tokenizer.encode(text)),
    )


def fine_tune(bench: Bench, parts: Parts, config: SftConfig, name: str) -> Path:
    """SFT; returns the policy's folder."""
    from sft.train import train

    policy = load_policy(config.policy)
    data = examples(bench, parts.sft, policy, bench.config.variants)
    dev = examples(bench, parts.dev, policy, 2)
    config = config.model_copy(update={"seed": bench.config.seed})
    result = train(config, policy, data, run=bench.folder / name, dev=dev)
    record(bench.catalog, bench.folder / name)
    return result.policy


def engine_config(config: DemoConfig) -> EngineConfig:
    """The engine's settings; exact in deterministic mode."""
    if not config.deterministic:
        return config.engine
    return config.engine.model_copy(update={"exact": True, "compute": "inline"})


class Rollout:
    """An engine, a grader and an agent that a trainer's service runs on."""

    def __init__(
        self, bench: Bench, folder: Path, start: Path, tasks: Sequence[Task], service: ServiceConfig
    ) -> None:
        self._bench = bench
        self._service = service
        self._folder = folder
        self._start = start
        self._order = endless(tasks, bench.config.seed)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> OpenSamples:
        bench = self._bench
        judge = await self._stack.enter_async_context(grader(bench))
        policy = load_policy(str(self._start))
        engine = NativeEngine(policy, engine_config(bench.config))
        self._stack.push_async_callback(engine.close)
        speaker = Speaker(engine, policy.chat, policy.tokenizer, policy.name)
        service = self._service.model_copy(
            update={"deterministic": bench.config.deterministic, "seed": bench.config.seed}
        )

        def make(trained: int) -> RolloutService:
            return RolloutService(
                speaker,
                agent(bench, judge, fresh=False),
                self._order,
                folder=self._folder / "rollout",
                run_id=read_run(self._folder).id,
                config=service,
                trained=trained,
            )

        return samples_from(engine, make)

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()


async def reinforce(bench: Bench, parts: Parts, start: Path, name: str) -> Path:
    """Asynchronous RL from `start`; returns the policy's folder."""
    from rl.train import train

    async with Rollout(bench, bench.folder / name, start, parts.rl, bench.config.service) as open_samples:
        config = bench.config.rl.model_copy(update={"policy": "sft", "seed": bench.config.seed})
        result = await train(config, load_policy(str(start)), open_samples, run=bench.folder / name)
    record(bench.catalog, bench.folder / name)
    return result.policy


async def distil(
    bench: Bench, parts: Parts, start: Path, teachers: tuple[TeacherConfig, ...], domains: Mapping[str, str]
) -> Path:
    """On-policy distillation into `start`. `domains`: task id -> domain."""
    from opd.train import train

    def domain_of(sample: Trajectory) -> str:
        return domains[sample.task_id]

    async with Rollout(
        bench, bench.folder / "opd", start, parts.rl, bench.config.opd_service
    ) as open_samples:
        config = bench.config.opd.model_copy(
            update={"policy": "sft", "seed": bench.config.seed, "teachers": teachers}
        )
        policy = load_policy(str(start))
        result = await train(config, policy, open_samples, run=bench.folder / "opd", domain_of=domain_of)
    record(bench.catalog, bench.folder / "opd")
    return result.policy


async def measure(bench: Bench, tasks: Sequence[Task], policy_folder: Path, name: str) -> Evaluation:
    """Pass rate of a policy, every verdict made anew; a killed one goes on in its folder."""
    config = EvaluationConfig(
        samples=bench.config.eval_samples,
        effort=bench.config.eval_effort,
        sampling=bench.config.sampling,
        seed=bench.config.seed,
    )
    run = bench.folder / "evaluation" / name
    resolved = {"policy": name, "evaluation": config.model_dump(mode="json")}
    policy = load_policy(str(policy_folder))
    engine = NativeEngine(policy, engine_config(bench.config))
    try:
        with RunFolder.open(
            run, kind=RunKind.EVALUATION, config=resolved, seed=config.seed, resume=True
        ) as folder:
            async with grader(bench) as judge:
                found = await evaluate(
                    tasks,
                    Speaker(engine, policy.chat, policy.tokenizer, name),
                    agent(bench, judge, fresh=True),
                    folder=run / "rollout",
                    run_id=folder.run.id,
                    config=config,
                )
            folder.finish(found.summary())
    finally:
        await engine.close()
    record(bench.catalog, run)
    return found
