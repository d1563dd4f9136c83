"""One batch of trajectories to one or more optimizer steps, and the metrics that say how it went."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

from catalog.trajectory import Trajectory
from model.batch import Batch, pack
from model.batch import Sequence as PackedSequence
from model.forks import pack_forks
from model.policy import Policy
from model.targets import Targets, targets, token_logprobs
from model.training import LossSum, TrainEngine
from rl.advantages import Advantages, advantages
from rl.config import RlConfig
from rl.data import Piece, length, piece, score, split
from rl.losses import TokenData, TokenStats, denominator, policy_loss
from rollout.service import RolloutBatch

log = logging.getLogger(__name__)


class MismatchError(RuntimeError):
    """Trainer and engine give different probabilities to tokens that the same weights sampled."""


def learn(config: RlConfig, engine: TrainEngine, policy: Policy, batch: RolloutBatch) -> dict[str, float]:
    """Train on one batch and return the metrics of the step.

    A batch in which every subgroup is dropped takes no optimizer step: momentum alone must not move weights.

    Raises:
        NonFiniteError: a loss or gradient was not finite; nothing was changed.
        MismatchError: with `mismatch_fatal`.
    """
    began = time.monotonic()
    samples = [*batch.trajectories, *batch.failed]
    judged = advantages([score(config, sample) for sample in samples], failed_at=config.failed_at)
    window = policy.replay_window
    pieces = [
        piece(sample, mask, judged.values[sample.id], version=batch.version, window=window)
        for sample, mask in zip(batch.trajectories, batch.masks, strict=True)
        if sample.id in judged.values
    ]
    stats = TokenStats()
    reports = []
    shares = split(pieces, config.updates_per_batch)
    starts: list[dict[str, Tensor] | None] = [None] * len(shares)
    if len(shares) > 1 and config.loss.anchor == "start":
        starts = [start_logprobs(config, policy, share) for share in shares]
    for share, start in zip(shares, starts, strict=True):
        if share:
            reports.append(update(config, engine, policy, share, start, stats))
    measured = stats.metrics()
    check_mismatch(config, measured)
    seconds = time.monotonic() - began
    found = rewards(config, batch, judged) | measured | {"updates": len(reports), "learn_s": seconds}
    found["trained_tokens_per_s"] = sum(len(item.tokens) for item in pieces) / seconds
    if reports:
        for name in ("loss", "grad_norm", "lr"):
            found[name] = fmean(getattr(report, name) for report in reports)
    return found


def update(
    config: RlConfig,
    engine: TrainEngine,
    policy: Policy,
    pieces: Sequence[Piece],
    start: dict[str, Tensor] | None,
    stats: TokenStats,
):
    """One optimizer step on these pieces.

    Args:
        start: log-probabilities by sample id before the batch's first update; None: as they are now.
        stats: is added to.
    """

    def loss(batch: Batch) -> LossSum:
        wanted, now_N, entropy_N = logprobs(policy, pieces, batch)
        data = TokenData(
            rollout_N=wanted.lay([item.logprobs for item in pieces]),
            advantage_N=wanted.spread([item.advantage for item in pieces]),
            staleness_N=wanted.lay([item.staleness for item in pieces], torch.long),
            bears_N=wanted.lay([item.bears for item in pieces], torch.bool),
            same_N=wanted.lay([item.same for item in pieces], torch.bool),
        )
        old_N = now_N.detach()
        if start is not None:
            old_N = torch.cat([start[pieces[index].id] for index, _ in wanted.owners])
        stats.update(config.loss, now_N.detach(), entropy_N, data)
        return LossSum(policy_loss(config.loss, now_N, old_N, data))

    over = denominator(config.loss, sum(len(item.targets) for item in pieces), len(pieces))
    return engine.step(packed(config, policy, pieces), loss, denominator=over)


def packed(config: RlConfig, policy: Policy, pieces: Sequence[Piece]) -> list[Batch]:
    """The pieces in micro-batches: a prompt is computed once for its samples, if the network can do that."""
    sequences = [PackedSequence(item.tokens, item.start) for item in pieces]
    if not policy.shares_prefixes:
        return pack(sequences, config.micro_tokens)
    needed_from = [item.targets[0] - 1 for item in pieces]
    return pack_forks(sequences, [item.group for item in pieces], needed_from, config.micro_tokens)


def logprobs(policy: Policy, pieces: Sequence[Piece], batch: Batch) -> tuple[Targets, Tensor, Tensor]:
    """A micro-batch's targets, their log-probabilities under the weights of this moment, and entropies."""
    wanted = targets(batch, [item.targets for item in pieces])
    kept = [ids for index, count in wanted.owners for ids in (pieces[index].kept or (None,) * count)]
    now_N, entropy_N = token_logprobs(
        wanted.hidden(policy.hidden(batch)),
        policy.head(),
        wanted.ids_N,
        temperature_N=wanted.spread([item.temperature for item in pieces]),
        kept=kept,
    )
    return wanted, now_N, entropy_N


@torch.no_grad()
def start_logprobs(config: RlConfig, policy: Policy, pieces: Sequence[Piece]) -> dict[str, Tensor]:
    """Log-probabilities by sample id before the first update of a batch."""
    found: dict[str, Tensor] = {}
    for batch in packed(config, policy, pieces):
        wanted, now_N, _ = logprobs(policy, pieces, batch)
        parts = now_N.split([count for _, count in wanted.owners])
        found |= {pieces[index].id: part for (index, _), part in zip(wanted.owners, parts, strict=True)}
    return found


def check_mismatch(config: RlConfig, measured: dict[str, float]) -> None:
    """Alarm when trainer and engine disagree about tokens that the same weights sampled."""
    gap = measured["mismatch_max"]
    measured["mismatch_alarm"] = float(gap > config.mismatch_alarm)
    if gap <= config.mismatch_alarm:
        return
    message = (
        f"trainer and engine differ by {gap:.2g} nats on a token that the same weights sampled "
        f"(bound {config.mismatch_alarm:g}): check decoder start, quantization, temperature, top-p"
    )
    if config.mismatch_fatal:
        raise MismatchError(message)
    log.warning(message)


def rewards(config: RlConfig, batch: RolloutBatch, judged: Advantages) -> dict[str, float]:
    """Rewards and lengths, over all and by effort, and what was dropped why."""
    efforts = sorted({sample.effort for sample in batch.trajectories if sample.effort is not None})
    found: dict[str, float] = {}
    for effort in [None, *efforts] if len(efforts) > 1 else [None]:
        members: list[Trajectory] = [s for s in batch.trajectories if effort in (None, s.effort)]
        suffix = "" if effort is None else f"_{effort}"
        if members:
            found[f"reward{suffix}"] = fmean(sample.reward or 0.0 for sample in members)
            found[f"length{suffix}"] = fmean(length(config, sample) for sample in members)
    found |= {f"dropped_{reason}": count for reason, count in judged.counts().items()}
    return found | {"subgroups": judged.subgroups, "kept_subgroups": judged.kept_subgroups}
