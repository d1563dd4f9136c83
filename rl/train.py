"""Asynchronous reinforcement learning: one page, in pipeline order.

    next_batch -> rewards -> advantages -> log-probabilities -> loss -> step -> checkpoint -> publish

The service keeps samples in flight all the time; training takes finished ones, whatever policy version
they began under, and corrects per token for the versions that sampled them. Log-probabilities are
recomputed by the very computation that sampled them (quantized main cache, bounded replay of the
decoder), so at staleness 0 they agree with the engine's; `mismatch_max` watches that, and a value above
`mismatch_alarm` means that the two compute different networks.

Order of writes: a step's checkpoint holds the ids of all samples consumed so far and is on disk before
its weights are published. Killed before the checkpoint, the run trains the same batch again (the
service's journal still has it); killed after it, the samples are not handed out again. Nothing is lost,
nothing counts twice.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from catalog.models import RunKind, Trajectory
from catalog.runs import RunFolder
from model.policy import Policy
from model.training import TrainEngine
from rl.config import RlConfig
from rl.step import learn


class Samples(Protocol):
    """Where trajectories come from: the rollout service, or a recording in tests."""

    async def start(self, weights: Path, version: int, consumed: Sequence[str]) -> None:
        """Begin, or go on, under this publication; samples with these ids are never handed out again."""
        ...

    async def next_batch(self) -> Sequence[Trajectory]:
        """Finished samples for one step, whole groups; generation may be preempted until `publish`."""
        ...

    async def publish(self, weights: Path, version: int) -> None:
        """Go on under these weights: a folder that stays until the next publication."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Of the time since the last call: utilisation, staleness, failures."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class RlResult:
    """What a finished run leaves."""

    policy: Path
    """Folder of the trained policy."""
    steps: int
    """Steps done; the publication number of the last weights."""
    seconds: float
    last: dict[str, float]
    """Metrics of the last step."""


async def train(config: RlConfig, policy: Policy, samples: Samples, *, run: Path) -> RlResult:
    """Train, or go on training, in the folder `run`.

    Raises:
        UserError: `run` belongs to another configuration or another process.
        TrainingError: gradients that are not finite, or a fatal mismatch between trainer and engine.
    """
    engine = TrainEngine(policy, config.optimizer)
    checkpoints = run / "checkpoints"
    with RunFolder.open(
        run, kind=RunKind.RL, config=config.model_dump(mode="json"), seed=config.seed, resume=True
    ) as folder:
        saved = engine.resume(checkpoints)
        state = RlState(**saved) if saved else RlState()
        folder.rewind(state.step)
        if saved is None:
            engine.checkpoint(checkpoints, 0, vars(state), keep=1)
        if not state.finished:
            await samples.start(weights_of(run, state.step), state.step, state.consumed)
        while not state.finished:
            began = time.monotonic()
            batch = await samples.next_batch()
            waited = time.monotonic() - began
            done = max(state.step / config.steps, state.seconds / (config.max_seconds or math.inf))
            metrics = await asyncio.to_thread(learn, config, engine, batch, version=state.step, progress=done)
            metrics |= {"wait_s": waited, **samples.metrics()}
            state = after(config, state, batch, metrics, time.monotonic() - began)
            # One more than asked for: the engine may still read the weights published last.
            engine.checkpoint(checkpoints, state.step, vars(state), keep=config.checkpoint.keep + 1)
            folder.log(state.step, **metrics)
            if not state.finished:
                await samples.publish(weights_of(run, state.step), state.step)
        await samples.close()
        folder.finish(state.last)
    return RlResult(weights_of(run, state.step), state.step, state.seconds, state.last)


@dataclass(frozen=True)
class RlState:
    """Everything beside weights and optimizer that a step leaves behind. Step = publication number."""

    format: int = 1
    step: int = 0
    seconds: float = 0.0
    finished: bool = False
    consumed: tuple[str, ...] = ()
    last: dict[str, float] = field(default_factory=dict)


def after(
    config: RlConfig, state: RlState, batch: Sequence[Trajectory], metrics: dict[str, float], took: float
) -> RlState:
    """The state behind a step on `batch` that took so many seconds."""
    step, seconds = state.step + 1, state.seconds + took
    finished = step >= config.steps or seconds >= (config.max_seconds or math.inf)
    consumed = (*state.consumed, *(sample.id for sample in batch))
    return RlState(step=step, seconds=seconds, finished=finished, consumed=consumed, last=metrics)


def weights_of(run: Path, step: int) -> Path:
    """Folder of the policy that step `step` left; its number is also the publication's."""
    return run / "checkpoints" / f"{step:08d}" / "policy"
