"""The demo's stages: each one call of a room's entry point or of a job, each resumable on its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catalog.models import CandidateSet, Task
from catalog.store import Catalog
from console import jobs
from console.demo.config import DemoConfig
from console.demo.split import Parts
from console.job_settings import EvaluateJob, OpdJob, RlJob
from console.progress import Stage
from console.runs import record
from console.workshop import Workshop, furnish
from envfactory.synthesis import Synthesis, Tools, synthesize
from model.policy import Policy, load_policy
from opd.config import TeacherConfig
from rollout.config import EngineConfig, ServiceConfig
from rollout.evaluate import Evaluation, EvaluationConfig
from sandbox.base import SandboxProvider
from sandbox.images import ImageStore
from sft.config import SftConfig
from sft.data import Example
from sft.demonstrations import demonstrations


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


def acting(bench: Bench) -> dict[str, Any]:
    """Settings that the demo's jobs share."""
    return {"jobs": bench.config.synth.jobs, "engine": engine_config(bench.config)}


def service(bench: Bench, config: ServiceConfig) -> ServiceConfig:
    """The rollout service's settings, with the demo's seed and mode."""
    return config.model_copy(update={"deterministic": bench.config.deterministic, "seed": bench.config.seed})


def workshop(bench: Bench) -> AbstractAsyncContextManager[Workshop]:
    """A workshop on the demo's catalog and sandboxes."""
    return furnish(bench.catalog, bench.provider, bench.images, jobs=bench.config.synth.jobs)


async def reinforce(bench: Bench, parts: Parts, start: Path, name: str) -> Path:
    """Asynchronous RL from `start`; returns the policy's folder."""
    train = bench.config.rl.model_copy(update={"policy": "sft", "seed": bench.config.seed})
    job = RlJob(train=train, service=service(bench, bench.config.service), **acting(bench))
    async with workshop(bench) as room:
        return (await jobs.reinforce(room, job, parts.rl, bench.folder / name, start=str(start))).policy


async def distil(
    bench: Bench, parts: Parts, start: Path, teachers: tuple[TeacherConfig, ...], domains: Mapping[str, str]
) -> Path:
    """On-policy distillation into `start`. `domains`: task id -> domain."""
    train = bench.config.opd.model_copy(
        update={"policy": "sft", "seed": bench.config.seed, "teachers": teachers}
    )
    job = OpdJob(train=train, service=service(bench, bench.config.opd_service), **acting(bench))
    async with workshop(bench) as room:
        result = await jobs.distil(
            room, job, parts.rl, bench.folder / "opd",
            domain_of=lambda sample: domains[sample.task_id], start=str(start),
        )  # fmt: skip
    return result.policy


async def measure(bench: Bench, tasks: Sequence[Task], policy: Path, name: str) -> Evaluation:
    """Pass rate of a policy, every verdict made anew; a killed one goes on in its folder."""
    evaluation = EvaluationConfig(
        samples=bench.config.eval_samples,
        effort=bench.config.eval_effort,
        sampling=bench.config.sampling,
        seed=bench.config.seed,
    )
    job = EvaluateJob(policy=name, split="test", evaluation=evaluation, **acting(bench))
    async with workshop(bench) as room:
        return await jobs.measure(room, job, tasks, bench.folder / "evaluation" / name, start=str(policy))
