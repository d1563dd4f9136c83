"""Which tokens of a batch may enter the loss: pure functions over trajectories.

Staleness of a token = the trainer's publication number - the publication that sampled it. Off-policy ratio
= share of the loss-bearing tokens whose staleness is 1 or more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from catalog.trajectory import Trajectory

Mask = tuple[bool, ...]


def staleness(trajectory: Trajectory, version: int) -> list[int | None]:
    """Per token; None where it was given."""
    return [None if at is None else version - at for at in trajectory.versions]


def loss_mask(trajectory: Trajectory, version: int, bound: int) -> Mask:
    """Per token: sampled, and at most `bound` publications old. All False: drop the sample."""
    return tuple(age is not None and age <= bound for age in staleness(trajectory, version))


def histogram(trajectories: Iterable[Trajectory], masks: Iterable[Mask], version: int) -> dict[int, int]:
    """Loss-bearing tokens by staleness."""
    counts: Counter[int] = Counter()
    for trajectory, mask in zip(trajectories, masks, strict=True):
        ages = staleness(trajectory, version)
        counts.update(age for age, bears in zip(ages, mask, strict=True) if bears and age is not None)
    return dict(sorted(counts.items()))


def off_policy_ratio(counts: dict[int, int]) -> float:
    """Share of tokens with staleness of 1 or more in a histogram."""
    total = sum(counts.values())
    return sum(n for age, n in counts.items() if age >= 1) / total if total else 0.0


def bound_ratio(
    trajectories: Sequence[Trajectory], masks: Sequence[Mask], version: int, bound: float
) -> tuple[list[Mask], int]:
    """Masks whose off-policy ratio is at most `bound`, and how many tokens that cost.

    Dispatch keeps the ratio near its bound, counted in samples; samples differ in length, so the rest is
    done here: the stalest tokens are masked first, later samples before earlier ones.
    """
    counts = histogram(trajectories, masks, version)
    fresh = counts.get(0, 0)
    stale = sum(counts.values()) - fresh
    # stale / (stale + fresh) <= bound
    allowed = stale if bound >= 1 else int(fresh * bound / (1 - bound) + 1e-9)
    surplus = max(0, stale - allowed)
    result = [list(mask) for mask in masks]
    for age in sorted((age for age in counts if age >= 1), reverse=True):
        for index in reversed(range(len(result))):
            ages = staleness(trajectories[index], version)
            for place in reversed(range(len(ages))):
                if surplus and result[index][place] and ages[place] == age:
                    result[index][place] = False
                    surplus -= 1
    return [tuple(mask) for mask in result], max(0, stale - allowed)
