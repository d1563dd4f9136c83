"""One batch of student samples to one or more optimizer steps, teacher by teacher."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from model.batch import Batch
from model.policy import Policy
from model.targets import targets
from model.training import LossSum, StepReport, TrainEngine
from opd.config import OpdConfig
from opd.data import DomainOf, Piece, assign, packed, piece, split
from opd.loss import reverse_kl
from opd.order import Heads, Work, by_teacher
from opd.teachers import TeacherPool
from rollout.service import RolloutBatch


class Micro(NamedTuple):
    """A micro-batch of one teacher's samples, with that teacher's head."""

    batch: Batch
    teacher: str
    head_VE: Tensor
    items: list[Work[Piece]]


def learn(
    config: OpdConfig,
    engine: TrainEngine,
    policy: Policy,
    pool: TeacherPool,
    heads: Heads,
    batch: RolloutBatch,
    domain_of: DomainOf,
) -> dict[str, float]:
    """Distil one batch and return its metrics.

    Raises:
        ValueError: a domain without a teacher, or a teacher with another vocabulary.
        NonFiniteError: a loss or gradient was not finite; nothing was changed.
    """
    began = time.monotonic()
    pieces = [
        piece(sample, mask, domain_of(sample), window=policy.replay_window)
        for sample, mask in zip(batch.trajectories, batch.masks, strict=True)
    ]
    reports = [
        update(config, engine, policy, pool, heads, share)
        for share in split(pieces, config.updates_per_batch)
    ]
    seconds = time.monotonic() - began
    found: dict[str, float] = {
        "loss_tokens": sum(len(item.targets) for item in pieces),
        "updates": len(reports),
        "cache_hits": pool.cache.hits,
        "cache_misses": pool.cache.misses,
        "head_loads": heads.loads,
        "learn_s": seconds,
        "trained_tokens_per_s": sum(len(item.tokens) for item in pieces) / seconds,
    }
    for name in ("loss", "grad_norm", "lr"):
        if reports:
            found[name] = fmean(getattr(report, name) for report in reports)
    for teacher in config.teachers:
        count = sum(report.metrics.get(f"tokens_{teacher.name}", 0.0) for report in reports)
        if count:
            total = sum(report.metrics.get(f"kl_{teacher.name}", 0.0) for report in reports)
            found[f"kl_{teacher.name}"] = total / count
    return found


def update(
    config: OpdConfig,
    engine: TrainEngine,
    policy: Policy,
    pool: TeacherPool,
    heads: Heads,
    pieces: Sequence[Piece],
) -> StepReport:
    """One optimizer step on these pieces: each teacher's samples together, one denominator for all."""
    work = by_teacher(assign(pieces, config.teachers), backwards=engine.steps % 2 == 1)
    states = {
        name: pool.hidden(name, [item.sample for item in items], config.micro_tokens) for name, items in work
    }

    def loss(micro: Micro) -> LossSum:
        mine = [item.sample for item in micro.items]
        wanted = targets(micro.batch, [item.targets for item in mine])
        hidden_ND = wanted.hidden(policy.hidden(micro.batch))
        teacher_NE = torch.cat([states[micro.teacher][mine[index].id] for index, _ in wanted.owners])
        total, kl_N = reverse_kl(
            hidden_ND,
            policy.head(),
            teacher_NE.to(hidden_ND.device, hidden_ND.dtype),
            micro.head_VE.to(hidden_ND.dtype),
            wanted.spread([item.weight for item in micro.items]),
            chunk=config.chunk_tokens,
        )
        return LossSum(
            total, {f"kl_{micro.teacher}": kl_N.sum(), f"tokens_{micro.teacher}": float(len(wanted))}
        )

    denominator = sum(len(item.targets) for item in pieces)
    return engine.step(micro_batches(config, policy, heads, work), loss, denominator=denominator)


def micro_batches(
    config: OpdConfig, policy: Policy, heads: Heads, work: Sequence[tuple[str, list[Work[Piece]]]]
) -> Iterator[Micro]:
    """Teacher by teacher, so that each head is on the device once, while the next one is read."""
    visits = heads.visit([name for name, _ in work])
    for (name, head_VE), (_, items) in zip(visits, work, strict=True):
        for batch in packed([item.sample for item in items], policy, config.micro_tokens):
            yield Micro(batch, name, head_VE, items)
