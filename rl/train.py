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
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from catalog.models import RunKind
from catalog.runs import RunFolder
from model.policy import Policy
from model.training import TrainEngine
from rl.config import RlConfig
from rl.step import learn
from rollout.handover import OpenSamples


@dataclass(frozen=True)
class RlResult:
    """What a finished run leaves."""

    policy: Path
    """Folder of the trained policy."""
    steps: int
    """Batches trained on; the publication number of the last weights."""
    seconds: float
    last: dict[str, float]
    """Metrics of the last step."""


@dataclass(frozen=True)
class RlState:
    """Everything beside weights and optimizer that a step leaves behind. Step = publication number."""

    step: int = 0
    seconds: float = 0.0
    finished: bool = False
    last: dict[str, float] = field(default_factory=dict)


async def train(config: RlConfig, policy: Policy, open_samples: OpenSamples, *, run: Path) -> RlResult:
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
        state = RlState(**(engine.resume() or {}))
        folder.rewind(state.step)
        if not state.finished:
            samples = await open_samples(policy.module.state_dict(), state.step)
            try:
                while not state.finished:
                    began = time.monotonic()
                    batch = await samples.next_batch()
                    waited = time.monotonic() - began
                    metrics = await asyncio.to_thread(learn, config, engine, policy, batch)
                    seconds = state.seconds + time.monotonic() - began
                    step = state.step + 1
                    finished = step >= config.steps or seconds >= (config.max_seconds or math.inf)
                    state = RlState(step, seconds, finished, {**batch.metrics, **metrics, "wait_s": waited})
                    engine.save(vars(state))
                    folder.log(step, **state.last)
                    if not finished:
                        await samples.publish(policy.module.state_dict(), step)
            finally:
                await samples.close()
        policy.save(run / "policy")
        folder.finish(state.last)
    return RlResult(run / "policy", state.step, state.seconds, state.last)
