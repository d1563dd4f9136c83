"""What one optimizer step trains on, sorted out of finished samples. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from catalog.trajectory import Trajectory
from rollout.staleness import Mask, bound_ratio, histogram, loss_mask, off_policy_ratio


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """All samples of `batch_prompts` prompts, less what must not count."""

    number: int
    """From 1; the number of optimizer steps after it."""
    version: int
    """The trainer's publication number when it was made."""
    trajectories: tuple[Trajectory, ...]
    """Judged samples with at least one token to train on."""
    masks: tuple[Mask, ...]
    """Per trajectory and token: it bears loss (sampled, and not too stale)."""
    failed: tuple[Trajectory, ...]
    """Infrastructure failures: neither loss nor baseline."""
    dropped: tuple[str, ...]
    """Ids of samples whose every token was too stale."""
    metrics: dict[str, float]
    staleness: dict[int, int]
    """Loss-bearing tokens by staleness in publications."""


def compose(
    samples: Sequence[Trajectory],
    *,
    number: int,
    version: int,
    max_staleness: int,
    ratio: float,
    metrics: dict[str, float],
) -> RolloutBatch:
    """Mask what is too old, set failures apart, and count.

    Args:
        version: staleness is counted from this publication.
        max_staleness: in publications; older tokens are masked.
        ratio: largest off-policy ratio.
        metrics: more numbers for the batch's own.
    """
    failed = tuple(sample for sample in samples if sample.reward is None)
    judged = [sample for sample in samples if sample.reward is not None]
    masks = [loss_mask(sample, version, max_staleness) for sample in judged]
    stale = sum(s.sampled_tokens - sum(mask) for s, mask in zip(judged, masks, strict=True))
    masks, surplus = bound_ratio(judged, masks, version, ratio)
    kept = [(s, mask) for s, mask in zip(judged, masks, strict=True) if any(mask)]
    dropped = tuple(s.id for s, mask in zip(judged, masks, strict=True) if not any(mask))
    counts = histogram([s for s, _ in kept], [mask for _, mask in kept], version)
    rewards = [sample.reward for sample in judged if sample.reward is not None]
    own = {
        "samples": len(samples),
        "failed": len(failed),
        "dropped_stale": len(dropped),
        "reward_mean": sum(rewards) / len(rewards) if rewards else 0.0,
        "sampled_tokens_mean": sum(s.sampled_tokens for s in samples) / max(1, len(samples)),
        "truncated": sum(s.truncated for s in samples),
        "repercussions": sum(s.repercussion for s in samples),
        "tool_calls": sum(len(s.tool_calls) for s in samples),
        "masked_tokens": stale,
        "masked_for_ratio": surplus,
        "max_staleness": max(counts, default=0),
        "off_policy_ratio": off_policy_ratio(counts),
    }
    return RolloutBatch(
        number=number,
        version=version,
        trajectories=tuple(s for s, _ in kept),
        masks=tuple(mask for _, mask in kept),
        failed=failed,
        dropped=dropped,
        metrics={**own, **metrics},
        staleness=counts,
    )
