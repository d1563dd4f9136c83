"""From trajectories to what the loss needs: scores for the baseline, pieces for the network.

A piece is the token sequence of one sample up to its last sampled token, with the positions that were
sampled and what the engine recorded of each. Token ids are taken as they are; nothing is decoded and
encoded again. `start` rebuilds the computation that sampled them: the engine read the first stretch of
the prompt in one piece, of which a decoder with bounded replay saw the last `window` tokens. After the
loss of a cache the engine computes the same stretches again, so the first segment's end decides for the
whole sample.

No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from catalog.trajectory import Trajectory
from rl.advantages import Scored
from rl.config import RlConfig
from rl.effort import length_reward


@dataclass(frozen=True)
class Piece:
    """One sample as the trainer computes it."""

    id: str
    group: str
    tokens: tuple[int, ...]
    start: int
    """Position at which the decoder begins."""
    targets: tuple[int, ...]
    """Ascending positions of the sampled tokens."""
    logprobs: tuple[float, ...]
    """By target: what the engine recorded."""
    staleness: tuple[int, ...]
    """By target: publications since the one that sampled it."""
    bears: tuple[bool, ...]
    """By target: it bears loss, being not too stale."""
    same: tuple[bool, ...]
    """By target: the trainer's very weights sampled it and wrote all key-values that it read."""
    kept: tuple[tuple[int, ...] | None, ...] | None
    """By target: ids that top-p left; None when it cut nothing."""
    temperature: float
    advantage: float


def length(config: RlConfig, trajectory: Trajectory) -> float:
    """l of the length penalty: sampled tokens, plus what the calls of priced tools count as."""
    calls = sum(config.call_tokens.get(call.name, 0.0) for call in trajectory.tool_calls)
    return trajectory.sampled_tokens + calls


def score(config: RlConfig, trajectory: Trajectory) -> Scored:
    """Reward of one sample. One whose tokens are missing, or that we failed, has none."""
    reward = trajectory.reward if trajectory.sampled_tokens else None
    penalty = 0.0
    if reward is not None:
        success = reward > config.failed_at
        spent = length(config, trajectory)
        penalty = length_reward(config.effort, trajectory.effort, spent, success=success)
    return Scored(trajectory.id, trajectory.group or trajectory.task_id, trajectory.effort, reward, penalty)


def piece(
    trajectory: Trajectory, mask: Sequence[bool], advantage: float, *, version: int, window: int | None
) -> Piece:
    """What the network computes of one sample.

    Args:
        mask: per token, whether it bears loss.
        advantage: of all its sampled tokens.
        version: the trainer's publication number.
        window: tokens of the decoder's bounded replay; None for networks without one.

    Raises:
        ValueError: nothing was sampled, or greedily: a temperature of 0 has no gradient.
    """
    targets = tuple(at for at, sampled in enumerate(trajectory.sampled) if sampled)
    if not targets or trajectory.temperature <= 0:
        raise ValueError(
            f"trajectory {trajectory.id} has no token sampled at a temperature above 0: nothing to reinforce"
        )
    first = next((segment.end for segment in trajectory.segments if segment.start == 0), targets[0])
    same = {
        at
        for segment in trajectory.segments
        if segment.version == segment.kv_version == version
        for at in range(segment.start, segment.end)
    }
    kept = None if trajectory.kept is None else tuple(trajectory.kept[at] for at in targets)
    return Piece(
        id=trajectory.id,
        group=trajectory.group or trajectory.task_id,
        tokens=trajectory.token_ids[: targets[-1] + 1],
        start=0 if window is None else max(0, min(first, targets[0]) - window),
        targets=targets,
        logprobs=tuple(trajectory.logprobs[at] or 0.0 for at in targets),
        staleness=tuple(version - (trajectory.versions[at] or 0) for at in targets),
        bears=tuple(mask[at] for at in targets),
        same=tuple(at in same for at in targets),
        kept=kept if kept is not None and any(ids is not None for ids in kept) else None,
        temperature=trajectory.temperature,
        advantage=advantage,
    )


def split(pieces: Sequence[Piece], parts: int) -> list[list[Piece]]:
    """Distribute whole groups over so many updates, evenly by count; fewer parts when there are fewer
    groups."""
    groups: dict[str, list[Piece]] = {}
    for item in pieces:
        groups.setdefault(item.group, []).append(item)
    shares: list[list[Piece]] = [[] for _ in range(min(parts, len(groups)))]
    for group in sorted(groups.values(), key=lambda members: (-len(members), members[0].group)):
        min(shares, key=len).extend(group)
    return shares
