"""On-policy distillation from several teachers: one page, in pipeline order.

    next_batch -> pieces -> teachers -> hidden states -> by teacher: logits of both, exact KL -> step ->
    publish

The student samples, each teacher reads (once: only its last hidden states are kept), and the loss rebuilds
both distributions over the whole vocabulary through the two heads. Inside a minibatch samples are ordered
by teacher, so every head is loaded once and at most one is on the device; the order changes no gradient.
Checkpoints and publications keep the order of `rl.train`, so that a killed run goes on exactly.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from catalog.models import RunKind
from catalog.runs import RunFolder
from model.policy import Policy
from model.training import TrainEngine
from opd.cache import HiddenCache
from opd.config import OpdConfig
from opd.data import DomainOf
from opd.order import Heads
from opd.step import learn
from opd.teachers import TeacherPool
from rollout.handover import OpenSamples


@dataclass(frozen=True)
class OpdResult:
    """What a finished run leaves."""

    policy: Path
    """Folder of the trained student."""
    steps: int
    """Batches trained on; the publication number of the last weights."""
    seconds: float
    last: dict[str, float]
    """Metrics of the last step."""


@dataclass(frozen=True)
class OpdState:
    """Everything beside weights and optimizer that a step leaves behind. Step = publication number."""

    step: int = 0
    seconds: float = 0.0
    finished: bool = False
    last: dict[str, float] = field(default_factory=dict)


async def train(
    config: OpdConfig,
    policy: Policy,
    open_samples: OpenSamples,
    *,
    run: Path,
    domain_of: DomainOf,
    cache: Path | None = None,
) -> OpdResult:
    """Distil, or go on distilling, in the folder `run`; the student is written to `run/policy`.

    Args:
        policy: the student; not the one inside the engine.
        open_samples: starts the rollout service, see `rollout.handover.samples_from`.
        domain_of: names a sample's domain, which picks its teachers.
        cache: folder of hidden states, shared by runs; `run/hidden` by default.

    Raises:
        UserError: `run` belongs to another configuration or another process.
        ValueError: a teacher has another vocabulary, or a domain has none.
        NonFiniteError: a loss or gradient was not finite.
        RolloutError: the service cannot go on.
    """
    engine = TrainEngine(
        policy.module.train(), config.optimizer, folder=run / "checkpoints",
        clip_norm=config.clip_norm, keep=config.checkpoint.keep,
    )  # fmt: skip
    resolved = config.model_dump(mode="json")
    with RunFolder.open(run, kind=RunKind.OPD, config=resolved, seed=config.seed, resume=True) as folder:
        state = OpdState(**(engine.resume() or {}))
        folder.rewind(state.step)
        if not state.finished:
            states = HiddenCache(cache or run / "hidden", getattr(torch, config.cache_dtype))
            pool = TeacherPool(config.teachers, policy, states, run / "heads")
            heads = Heads(pool.head, str(policy.head().device))
            samples = await open_samples(policy.module.state_dict(), state.step)
            try:
                while not state.finished:
                    began = time.monotonic()
                    batch = await samples.next_batch()
                    waited = time.monotonic() - began
                    metrics = await asyncio.to_thread(
                        learn, config, engine, policy, pool, heads, batch, domain_of
                    )
                    seconds = state.seconds + time.monotonic() - began
                    step = state.step + 1
                    finished = step >= config.steps or seconds >= (config.max_seconds or math.inf)
                    state = OpdState(step, seconds, finished, {**batch.metrics, **metrics, "wait_s": waited})
                    engine.save(vars(state))
                    folder.log(step, **state.last)
                    states.prune(config.cache_max_mb * 2**20)
                    if not finished:
                        await samples.publish(policy.module.state_dict(), step)
            finally:
                await samples.close()
                heads.close()
        policy.save(run / "policy")
        folder.finish(state.last)
    return OpdResult(run / "policy", state.step, state.seconds, state.last)
