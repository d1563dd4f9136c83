"""Asynchronous reinforcement learning: one page, in pipeline order.

    next_batch -> rewards -> advantages -> log-probabilities -> loss -> step -> checkpoint -> publish

The service keeps samples in flight all the time; training takes finished ones, whatever policy version they
began under, and corrects per token for the versions that sampled them. Log-probabilities are recomputed by
the very computation that sampled them (quantized main cache, bounded replay of the decoder), so at
staleness 0 they agree with the engine's. `mismatch_max` watches that on tokens whose key-values were
written by the same weights too (a sample that spans publications keeps its cache), and a value above
`mismatch_alarm` means that the two compute different networks.

A step's checkpoint is on disk before its weights are published, and says how many batches were trained on.
Killed before it, the run trains the same batch again (the service's ledger hands out the same one); killed
after it, the next. Nothing is lost, nothing counts twice.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

from catalog.models import RunKind
from catalog.runs import RunFolder
from model.policy import Policy
from model.training import TrainEngine, TrainResult, TrainState
from rl.config import RlConfig
from rl.step import learn
from rollout.handover import OpenSamples


async def train(config: RlConfig, policy: Policy, open_samples: OpenSamples, *, run: Path) -> TrainResult:
    """Train, or go on training, in the folder `run`; the policy is written to `run/policy`.

    Args:
        policy: the network to start from; not the one inside the engine.
        open_samples: starts the rollout service, see `rollout.handover.samples_from`.

    Raises:
        UserError: `run` belongs to another configuration or another process.
        NonFiniteError: a loss or gradient was not finite.
        MismatchError: trainer and engine compute different networks (with `mismatch_fatal`).
        RolloutError: the service cannot go on.
    """
    engine = TrainEngine(
        policy.module.train(), config.optimizer, folder=run / "checkpoints",
        clip_norm=config.clip_norm, keep=config.checkpoint.keep, bias_speed=config.bias_speed,
    )  # fmt: skip
    resolved = config.model_dump(mode="json")
    with RunFolder.open(run, kind=RunKind.RL, config=resolved, seed=config.seed, resume=True) as folder:
        state = TrainState(**(engine.resume() or {}))
        folder.rewind(state.step)
        if not state.finished:
            samples = await open_samples(policy.module.state_dict(), state.step)
            try:
                while not state.finished:
                    began = time.monotonic()
                    batch = await samples.next_batch()
                    waited = time.monotonic() - began
                    metrics = await asyncio.to_thread(learn, config, engine, policy, batch)
                    took = time.monotonic() - began
                    state = state.after(took, steps=config.steps, max_seconds=config.max_seconds)
                    state = replace(state, last={**batch.metrics, **metrics, "wait_s": waited})
                    engine.save(vars(state))
                    folder.log(state.step, **state.last)
                    if not state.finished:
                        await samples.publish(policy.module.state_dict(), state.step)
            finally:
                await samples.close()
        policy.save(run / "policy")
        folder.finish(state.last)
    return TrainResult(run / "policy", state.step, state.seconds, state.last)
