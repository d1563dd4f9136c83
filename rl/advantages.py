"""From rewards to advantages: each subgroup of one (prompt, effort) is its own baseline.

    A_i = r_i - mean of the r_j of the other valid samples of the subgroup        r = r_task + r_len

Leave-one-out, because plain mean-centring shrinks the gradient of a subgroup of M by (M - 1) / M, which
would weigh subgroups of different size differently. There is no division by a standard deviation: it
rewards easy and hopeless prompts, and floating-point noise makes it explode when rewards are equal.

Rules (each has a known fault of public trainers behind it):
- an infrastructure failure (reward None) is in neither loss nor baseline, and is counted;
- fewer than two valid samples have no baseline: dropped;
- a total reward that is exactly constant carries nothing: dropped. Exact equality of the rewards, never a
  threshold on a deviation. A subgroup in which all succeed at different lengths is kept;
- if all samples failed, only the length penalty differs, and following it teaches to fail briefly: dropped.

Efforts are never compared with each other. Pure functions, no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Literal

Drop = Literal["infrastructure", "alone", "constant", "all_failed"]


@dataclass(frozen=True)
class Scored:
    """One finished sample as the trainer judges it."""

    id: str
    group: str
    """Samples of one prompt share it."""
    effort: int | None
    task_reward: float | None
    """None: it could not be judged, because something of ours broke."""
    length_reward: float = 0.0

    @property
    def reward(self) -> float:
        """r = r_task + r_len."""
        if self.task_reward is None:
            raise ValueError(f"sample {self.id} has no reward: an infrastructure failure is not a zero")
        return self.task_reward + self.length_reward


@dataclass(frozen=True)
class Advantages:
    """What each sample of a batch teaches."""

    values: dict[str, float]
    """Advantage by sample id, of the samples that enter the loss."""
    dropped: dict[str, Drop]
    """Reason by sample id, of those that do not."""
    subgroups: int
    kept_subgroups: int

    def counts(self) -> dict[str, int]:
        """Dropped samples by reason, zero counts included, for the metrics."""
        found = Counter(self.dropped.values())
        return {reason: found[reason] for reason in ("infrastructure", "alone", "constant", "all_failed")}


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean of the others, in an order-independent sum (`fsum`). At least two rewards.

    >>> leave_one_out([1.0, 0.0, 0.0])
    [1.0, -0.5, -0.5]
    """
    if len(rewards) < 2:
        raise ValueError("a baseline needs at least two samples")
    total = fsum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


def drop_reason(members: Sequence[Scored], failed_at: float = 0.0) -> Drop | None:
    """Why a subgroup of valid samples teaches nothing; None when it does.

    Args:
        members: the valid samples (reward not None) of one (prompt, effort).
        failed_at: a task reward of at most this is a failure.
    """
    if len(members) < 2:
        return "alone"
    if all(member.reward == members[0].reward for member in members):
        return "constant"
    if all(member.task_reward is not None and member.task_reward <= failed_at for member in members):
        return "all_failed"
    return None


def advantages(samples: Sequence[Scored], *, failed_at: float = 0.0) -> Advantages:
    """Advantages of a batch that holds whole or partial subgroups, in any order.

    Raises:
        ValueError: two samples share an id (one would silently overwrite the other).
    """
    ids = [sample.id for sample in samples]
    if len(set(ids)) != len(ids):
        twice = [key for key, count in Counter(ids).items() if count > 1]
        raise ValueError(f"sample ids must be unique, these occur twice: {twice[:3]}")
    subgroups: dict[tuple[str, int | None], list[Scored]] = {}
    for sample in samples:
        subgroups.setdefault((sample.group, sample.effort), []).append(sample)

    values: dict[str, float] = {}
    dropped: dict[str, Drop] = {}
    for members in subgroups.values():
        valid = [member for member in members if member.task_reward is not None]
        dropped.update({member.id: "infrastructure" for member in members if member.task_reward is None})
        reason = drop_reason(valid, failed_at)
        if reason is not None:
            dropped.update({member.id: reason for member in valid})
            continue
        for member, value in zip(valid, leave_one_out([m.reward for m in valid]), strict=True):
            values[member.id] = value
    kept = {(sample.group, sample.effort) for sample in samples if sample.id in values}
    return Advantages(values, dropped, len(subgroups), len(kept))
