"""From student trajectories to what is distilled: token pieces, and for each its teachers.

A sample bears loss where the student sampled, whatever its reward: on-policy distillation learns from the
teachers' distribution, not from success. Samples that we broke are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from catalog.trajectory import Trajectory
from model.batch import Batch, pack
from model.batch import Sequence as PackedSequence
from model.forks import pack_forks
from model.policy import Policy
from opd.config import TeacherConfig
from opd.order import Work


@dataclass(frozen=True)
class Piece:
    """One sample as student and teachers read it."""

    id: str
    group: str
    """Samples of one prompt share it."""
    domain: str
    tokens: tuple[int, ...]
    start: int
    """Position at which the decoder begins (networks with bounded replay)."""
    targets: tuple[int, ...]
    """Ascending positions of the tokens that bear loss."""


def piece(trajectory: Trajectory, mask: Sequence[bool], domain: str, *, window: int | None) -> Piece:
    """The part of a sample that bears loss.

    Args:
        mask: per token, whether it bears loss (sampled, and not too stale); at least one does.
        domain: picks the teachers.
        window: tokens of the decoder's bounded replay; None for networks without one.
    """
    bearing = tuple(at for at, bears in enumerate(mask) if bears)
    prompt = trajectory.sampled.index(True)
    first = next((segment.end for segment in trajectory.segments if segment.start == 0), prompt)
    start = 0 if window is None else max(0, min(first, prompt) - window)
    group = trajectory.group or trajectory.task_id
    return Piece(trajectory.id, group, domain, trajectory.token_ids[: bearing[-1] + 1], start, bearing)


def assign(pieces: Sequence[Piece], teachers: Sequence[TeacherConfig]) -> list[Work[Piece]]:
    """Each sample under each teacher of its domain, weights of a sample summing to 1.

    Raises:
        ValueError: no teacher for a domain.
    """
    work: list[Work[Piece]] = []
    for item in pieces:
        chosen = [t for t in teachers if not t.domains or item.domain in t.domains]
        if not chosen:
            raise ValueError(
                f"no teacher for domain {item.domain!r} of sample {item.id}: "
                "name it in a teacher's `domains`, or give one teacher none"
            )
        total = sum(teacher.weight for teacher in chosen)
        work += [Work(item, teacher.name, teacher.weight / total) for teacher in chosen]
    return work


def split(pieces: Sequence[Piece], parts: int) -> list[list[Piece]]:
    """So many minibatches of nearly equal size, in order; fewer when there are fewer samples."""
    parts = min(parts, len(pieces))
    return [list(pieces[at::parts]) for at in range(parts)]


def packed(pieces: Sequence[Piece], policy: Policy, micro_tokens: int) -> list[Batch]:
    """The pieces in micro-batches: a prompt is computed once for its samples, if the network can do that."""
    sequences = [PackedSequence(item.tokens, item.start) for item in pieces]
    if not policy.shares_prefixes:
        return pack(sequences, micro_tokens)
    needed_from = [item.targets[0] - 1 for item in pieces]
    return pack_forks(sequences, [item.group for item in pieces], needed_from, micro_tokens)


DomainOf = Callable[[Trajectory], str]
"""Names the domain of a sample."""
