"""On-policy distillation from several teachers: one page, in pipeline order.

    next_batch -> pieces -> teachers -> hidden states -> by teacher: logits of both, exact KL -> step ->
    publish

The student samples, each teacher reads (once: only its last hidden states are kept), and the loss
rebuilds both distributions over the whole vocabulary through the two heads. Inside a minibatch samples
are ordered by teacher, so every head is loaded once and at most one is on the device. The order changes
no gradient.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from catalog.models import RunKind, Trajectory
from catalog.runs import RunFolder
from model.batch import Sequence as PackedSequence
from model.batch import pack
from model.policy import Policy
from model.targets import targets
from model.training import TrainEngine
from opd.cache import HiddenCache
from opd.config import OpdConfig
from opd.data import DomainOf, Piece, assign, piece, split
from opd.loss import reverse_kl
from opd.order import Heads, Work, by_teacher
from opd.teachers import TeacherPool


class Samples(Protocol):
    """Where the student's trajectories come from: the rollout service, or a recording in tests."""

    async def start(self, weights: Path, version: int, consumed: Sequence[str]) -> None:
        """Begin, or go on, under this publication; samples with these ids are never handed out again."""
        ...

    async def next_batch(self) -> Sequence[Trajectory]:
        """Finished samples for one step; generation may be preempted until `publish`."""
        ...

    async def publish(self, weights: Path, version: int) -> None:
        """Go on under these weights: a folder that stays until the next publication."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Of the time since the last call."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class OpdResult:
    """What a finished run leaves."""

    policy: Path
    steps: int
    seconds: float
    last: dict[str, float]
    """Metrics of the last step."""


@dataclass(frozen=True)
class OpdState:
    """Everything beside weights and optimizer that a step leaves behind. Step = publication number."""

    format: int = 1
    step: int = 0
    seconds: float = 0.0
    finished: bool = False
    consumed: tuple[str, ...] = ()
    last: dict[str, float] = field(default_factory=dict)


async def train(
    config: OpdConfig,
    policy: Policy,
    samples: Samples,
    *,
    run: Path,
    domain_of: DomainOf,
    cache: Path | None = None,
    pool: TeacherPool | None = None,
) -> OpdResult:
    """Distil, or go on distilling, in the folder `run`.

    Args:
        domain_of: names a sample's domain, which picks its teachers.
        cache: folder of hidden states, shared by runs; `run/hidden` by default.
        pool: the teachers, when they are open already.

    Raises:
        ValueError: `run` belongs to another configuration, a teacher has another vocabulary, or a
        domain has none. TrainingError: gradients that are not finite, step after step.
    """
    engine = TrainEngine(policy, config.optimizer)
    checkpoints = run / "checkpoints"
    with RunFolder.open(
        run, kind=RunKind.OPD, config=config.model_dump(mode="json"), seed=config.seed, resume=True
    ) as folder:
        if pool is None:
            states = HiddenCache(cache or run / "hidden", getattr(torch, config.cache_dtype))
            pool = TeacherPool(config.teachers, policy, states, run / "heads")
        pool.prepare()
        heads = Heads(pool.head, str(next(policy.module.parameters()).device))
        saved = engine.resume(checkpoints)
        state = OpdState(**saved) if saved else OpdState()
        folder.rewind(state.step)
        if saved is None:
            engine.checkpoint(checkpoints, 0, vars(state), keep=1)
        if not state.finished:
            await samples.start(weights_of(run, state.step), state.step, state.consumed)
        while not state.finished:
            began = time.monotonic()
            batch = await samples.next_batch()
            waited = time.monotonic() - began
            pieces = usable(config, policy, batch, domain_of, version=state.step)
            done = max(state.step / config.steps, state.seconds / (config.max_seconds or math.inf))
            metrics = await asyncio.to_thread(learn, config, engine, pool, heads, pieces, progress=done)
            metrics |= {"samples": len(batch), "wait_s": waited, **samples.metrics()}
            state = after(config, state, batch, metrics, time.monotonic() - began)
            # One more than asked for: the engine may still read the weights published last.
            engine.checkpoint(checkpoints, state.step, vars(state), keep=config.checkpoint.keep + 1)
            folder.log(state.step, **metrics)
            pool.cache.prune(config.cache_max_mb * 2**20)
            if not state.finished:
                await samples.publish(weights_of(run, state.step), state.step)
        await samples.close()
        heads.close()
        folder.finish(state.last)
    return OpdResult(weights_of(run, state.step), state.step, state.seconds, state.last)


def usable(
    config: OpdConfig, policy: Policy, batch: Sequence[Trajectory], domain_of: DomainOf, *, version: int
) -> list[Piece]:
    """The pieces of a batch that bear loss."""
    window = policy.replay_window
    found = [
        piece(t, domain_of(t), version=version, window=window, max_staleness=config.max_staleness)
        for t in batch
    ]
    return [item for item in found if item is not None]


def learn(
    config: OpdConfig,
    engine: TrainEngine,
    pool: TeacherPool,
    heads: Heads,
    pieces: Sequence[Piece],
    *,
    progress: float = 0.0,
) -> dict[str, float]:
    """Distil one batch; returns its metrics."""
    began = time.monotonic()
    loss, updates, steps = 0.0, 0, {}
    kl: dict[str, list[float]] = {}
    for share in split(pieces, config.updates_per_batch):
        work = by_teacher(assign(share, config.teachers), heads.name)
        loss += accumulate(config, engine, pool, heads, work, kl)
        steps = engine.step(progress)
        updates += 1
    seconds = time.monotonic() - began
    return {
        "loss": loss / updates,
        **{f"kl_{name}": total / max(1, count) for name, (total, count) in kl.items()},
        **steps,
        "loss_tokens": sum(len(item.targets) for item in pieces),
        "cache_hits": pool.cache.hits,
        "cache_misses": pool.cache.misses,
        "head_loads": heads.loads,
        "tokens_per_s": sum(len(item.tokens) for item in pieces) / seconds,
        "learn_s": seconds,
    }


def accumulate(
    config: OpdConfig,
    engine: TrainEngine,
    pool: TeacherPool,
    heads: Heads,
    work: Sequence[tuple[str, list[Work[Piece]]]],
    kl: dict[str, list[float]],
) -> float:
    """Add one minibatch's gradient, teacher by teacher; returns the loss and adds to `kl` (sum, tokens)."""
    pieces = {item.sample.id: item.sample for _, items in work for item in items}
    denominator = max(1, sum(len(item.targets) for item in pieces.values()))
    states = {
        name: pool.hidden(name, [item.sample for item in items], config.micro_tokens) for name, items in work
    }
    total = 0.0
    names = [name for name, _ in work]
    for (name, head_VE), (_, items) in zip(heads.visit(names), work, strict=True):
        mine = [item.sample for item in items]
        sequences = [PackedSequence(item.tokens, item.start) for item in mine]
        sums = kl.setdefault(name, [0.0, 0.0])
        for batch in pack(sequences, config.micro_tokens):
            wanted = targets(batch, [item.targets for item in mine])
            hidden_ND = wanted.hidden(engine.policy.hidden(batch))
            teacher_NE = torch.cat([states[name][mine[index].id] for index, _ in wanted.owners])
            loss, kl_N = reverse_kl(
                hidden_ND,
                engine.policy.head(),
                teacher_NE.to(hidden_ND.device, hidden_ND.dtype),
                head_VE.to(hidden_ND.dtype),
                wanted.spread([item.weight for item in items]),
                denominator=denominator,
                chunk=config.chunk_tokens,
            )
            engine.backward(loss)
            total += float(loss.detach())
            sums[0] += float(kl_N.sum())
            sums[1] += len(wanted)
    return total


def after(
    config: OpdConfig, state: OpdState, batch: Sequence[Trajectory], metrics: dict[str, float], took: float
) -> OpdState:
    """The state behind a step on `batch` that took so many seconds."""
    step, seconds = state.step + 1, state.seconds + took
    finished = step >= config.steps or seconds >= (config.max_seconds or math.inf)
    consumed = (*state.consumed, *(sample.id for sample in batch))
    return OpdState(step=step, seconds=seconds, finished=finished, consumed=consumed, last=metrics)


def weights_of(run: Path, step: int) -> Path:
    """Folder of the policy that step `step` left; its number is also the publication's."""
    return run / "checkpoints" / f"{step:08d}" / "policy"
