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

from model.policy import Policy

from catalog.models import Trajectory
from model.checkpoints import Checkpoints, JsonlMonitor, claim_run, read_json, write_json
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
    version: int
    """Publication number of the last weights."""
    seconds: float
    last: dict[str, float]
    """Metrics of the last step."""


async def train(config: RlConfig, policy: Policy, samples: Samples, *, run: Path) -> RlResult:
    """Train, or go on training, in the folder `run`.

    Raises:
        ValueError: `run` belongs to another configuration.
        TrainingError: gradients that are not finite, or a fatal mismatch between trainer and engine.
    """
    claim_run(run, config.model_dump(mode="json"))
    engine = TrainEngine(policy, config.optimizer)
    checkpoints = Checkpoints(run / "checkpoints", config.checkpoint.keep + 1)
    state = resume(engine, checkpoints)
    monitor = JsonlMonitor(run / "metrics.jsonl", last_step=state.step)
    folder = checkpoints.folder(state.step)
    if not state.finished:
        await samples.start(folder / "policy", state.step, state.consumed)
    while not state.finished:
        began = time.monotonic()
        batch = await samples.next_batch()
        waited = time.monotonic() - began
        done = max(state.step / config.steps, state.seconds / (config.max_seconds or math.inf))
        metrics = await asyncio.to_thread(learn, config, engine, batch, version=state.step, progress=done)
        seconds = state.seconds + time.monotonic() - began
        step = state.step + 1
        finished = step >= config.steps or (config.max_seconds is not None and seconds >= config.max_seconds)
        metrics |= {"wait_s": waited, "train_s": time.monotonic() - began - waited, **samples.metrics()}
        state = RlState(step, seconds, finished, (*state.consumed, *(sample.id for sample in batch)), metrics)
        folder = checkpoints.write(step, lambda folder, state=state: save(engine, folder, state))
        monitor.log(step, metrics)
        if not finished:
            await samples.publish(folder / "policy", step)
    await samples.close()
    monitor.close()
    return RlResult(folder / "policy", state.step, state.step, state.seconds, state.last)


@dataclass(frozen=True)
class RlState:
    """Everything beside weights and optimizer that a step leaves behind. Step = publication number."""

    step: int = 0
    seconds: float = 0.0
    finished: bool = False
    consumed: tuple[str, ...] = ()
    last: dict[str, float] = field(default_factory=dict)


def resume(engine: TrainEngine, checkpoints: Checkpoints) -> RlState:
    """State of the newest checkpoint, with the engine restored; a new run writes its checkpoint 0."""
    newest = checkpoints.latest()
    if newest is None:
        checkpoints.write(0, lambda folder: save(engine, folder, RlState()))
        return RlState()
    engine.restore(checkpoints.folder(newest))
    saved = read_json(checkpoints.folder(newest) / "state.json")
    return RlState(
        saved["step"], saved["seconds"], saved["finished"], tuple(saved["consumed"]), saved["last"]
    )


def save(engine: TrainEngine, folder: Path, state: RlState) -> None:
    """Fill a checkpoint's folder."""
    engine.save(folder)
    write_json(folder / "state.json", {"format": 1, **vars(state)})
