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
import time
from dataclasses import replace
from pathlib import Path

import torch

from catalog.models import RunKind
from catalog.runs import RunFolder
from model.policy import Policy
from model.training import TrainEngine, TrainResult, TrainState
from opd.cache import HiddenCache
from opd.config import OpdConfig
from opd.data import DomainOf
from opd.order import Heads
from opd.step import learn
from opd.teachers import TeacherPool
from rollout.handover import OpenSamples


async def train(
    config: OpdConfig,
    policy: Policy,
    open_samples: OpenSamples,
    *,
    run: Path,
    domain_of: DomainOf,
    cache: Path | None = None,
) -> TrainResult:
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
        clip_norm=config.clip_norm, keep=config.checkpoint.keep, bias_speed=config.bias_speed,
    )  # fmt: skip
    resolved = config.model_dump(mode="json")
    with RunFolder.open(run, kind=RunKind.OPD, config=resolved, seed=config.seed, resume=True) as folder:
        state = TrainState(**(engine.resume() or {}))
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
                    took = time.monotonic() - began
                    state = state.after(took, steps=config.steps, max_seconds=config.max_seconds)
                    state = replace(state, last={**batch.metrics, **metrics, "wait_s": waited})
                    engine.save(vars(state))
                    folder.log(state.step, **state.last)
                    states.prune(config.cache_max_mb * 2**20)
                    if not state.finished:
                        await samples.publish(policy.module.state_dict(), state.step)
            finally:
                await samples.close()
                heads.close()
        policy.save(run / "policy")
        folder.finish(state.last)
    return TrainResult(run / "policy", state.step, state.seconds, state.last)
