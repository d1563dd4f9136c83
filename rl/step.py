"""One batch of trajectories to one or more optimizer steps, and the metrics that say how it went."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from statistics import fmean

import torch
from torch import Tensor

from catalog.models import Trajectory
from model.batch import Sequence as PackedSequence
from model.batch import pack
from model.policy import Policy
from model.targets import Targets, targets, token_logprobs
from model.training import TrainEngine, TrainingError
from rl.advantages import Advantages, advantages
from rl.config import RlConfig
from rl.data import Piece, length, piece, score, split
from rl.losses import TokenData, TokenStats, denominator, policy_loss

log = logging.getLogger(__name__)


def learn(
    config: RlConfig, engine: TrainEngine, batch: Sequence[Trajectory], *, version: int, progress: float = 0.0
) -> dict[str, float]:
    """Train on one batch and return the metrics of the step.

    Args:
        batch: finished samples, whole groups where possible, in any order.
        version: publication number of the weights that the engine holds before the step.
        progress: share of the run that is done, for the learning rate.

    Raises:
        TrainingError: gradients not finite step after step, or a mismatch where `mismatch_fatal` is set.
    """
    began = time.monotonic()
    judged = advantages([score(config, sample) for sample in batch], failed_at=config.failed_at)
    window = engine.policy.replay_window
    kept = [sample for sample in batch if sample.id in judged.values]
    shares = split([piece(t, judged.values[t.id], window=window) for t in kept], config.updates_per_batch)
    starts: list[dict[str, Tensor] | None] = [None] * len(shares)
    if len(shares) > 1 and config.loss.anchor == "start":
        starts = [start_logprobs(config, engine.policy, share) for share in shares]
    stats, losses, steps = TokenStats(), [], []
    for share, start in zip(shares, starts, strict=True):
        losses.append(accumulate(config, engine, share, start, stats, version))
        steps.append(engine.step(progress))
    measured = stats.metrics()
    check_mismatch(config, measured)
    seconds = time.monotonic() - began
    tokens = sum(len(item.tokens) for share in shares for item in share)
    return {
        "loss": fmean(losses),
        **{name: fmean(step[name] for step in steps) for name in steps[0]},
        **rewards(config, batch, judged),
        **measured,
        "tokens_per_s": tokens / seconds,
        "learn_s": seconds,
    }


def accumulate(
    config: RlConfig,
    engine: TrainEngine,
    pieces: Sequence[Piece],
    start: dict[str, Tensor] | None,
    stats: TokenStats,
    version: int,
) -> float:
    """Add the gradient of one update's pieces, micro-batch by micro-batch; returns the loss."""
    over = denominator(config.loss, sum(len(item.targets) for item in pieces), len(pieces))
    total = 0.0
    for wanted, now_N, entropy_N in logprobs(config, engine.policy, pieces):
        data = TokenData(
            rollout_N=wanted.lay([item.logprobs for item in pieces]),
            advantage_N=wanted.spread([item.advantage for item in pieces]),
            staleness_N=version - wanted.lay([item.versions for item in pieces], torch.long),
        )
        old_N = now_N.detach()
        if start is not None:
            old_N = torch.cat([start[pieces[index].id] for index, _ in wanted.owners])
        loss = policy_loss(
            config.loss, now_N, old_N, data, denominator=over, max_staleness=config.max_staleness
        )
        engine.backward(loss)
        stats.update(config.loss, now_N.detach(), entropy_N, data, max_staleness=config.max_staleness)
        total += float(loss.detach())
    return total


def logprobs(
    config: RlConfig, policy: Policy, pieces: Sequence[Piece]
) -> Iterator[tuple[Targets, Tensor, Tensor]]:
    """Per micro-batch its targets, their log-probabilities under the weights of this moment, and
    entropies."""
    sequences = [PackedSequence(item.tokens, item.start) for item in pieces]
    positions = [item.targets for item in pieces]
    for batch in pack(sequences, config.micro_tokens):
        wanted = targets(batch, positions)
        kept = [ids for index, count in wanted.owners for ids in (pieces[index].kept or (None,) * count)]
        now_N, entropy_N = token_logprobs(
            wanted.hidden(policy.hidden(batch)),
            policy.head(),
            wanted.ids_N,
            temperature_N=wanted.spread([item.temperature for item in pieces]),
            kept=kept,
        )
        yield wanted, now_N, entropy_N


@torch.no_grad()
def start_logprobs(config: RlConfig, policy: Policy, pieces: Sequence[Piece]) -> dict[str, Tensor]:
    """Log-probabilities by sample id before the first update of a batch."""
    found: dict[str, Tensor] = {}
    for wanted, now_N, _ in logprobs(config, policy, pieces):
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
        raise TrainingError(message)
    log.warning(message)


def rewards(config: RlConfig, batch: Sequence[Trajectory], judged: Advantages) -> dict[str, float]:
    """Rewards and lengths, over all and by effort, and what was dropped why."""
    valid = [sample for sample in batch if sample.reward is not None]
    found: dict[str, float] = {"samples": len(batch), "truncated": sum(s.truncated for s in valid)}
    efforts = sorted({sample.effort for sample in valid if sample.effort is not None})
    for name, members in [
        ("", valid),
        *((f"_{effort}", [s for s in valid if s.effort == effort]) for effort in efforts),
    ]:
        if members:
            found[f"reward{name}"] = fmean(sample.reward or 0.0 for sample in members)
            found[f"length{name}"] = fmean(length(config, sample) for sample in members)
    found |= {f"dropped_{reason}": count for reason, count in judged.counts().items()}
    found |= {"subgroups": judged.subgroups, "kept_subgroups": judged.kept_subgroups}
    failures: dict[str, int] = {}
    for sample in batch:
        if sample.failure is not None:
            key = f"failed_{sample.failure.boundary}"
            failures[key] = failures.get(key, 0) + 1
    return {**found, **failures}
