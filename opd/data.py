"""From student trajectories to what is distilled: token pieces, and for each its teachers.

A sample bears loss where the student sampled, whatever its reward: on-policy distillation learns from the
teachers' distribution, not from success. Samples that we broke are left out. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from catalog.models import Trajectory
from opd.config import TeacherConfig
from opd.order import Work


@dataclass(frozen=True)
class Piece:
    """One sample as student and teachers read it."""

    id: str
    domain: str
    tokens: tuple[int, ...]
    start: int
    """Position at which the decoder begins (networks with bounded replay)."""
    targets: tuple[int, ...]
    """Ascending positions of the tokens that bear loss."""


def piece(
    trajectory: Trajectory, domain: str, *, version: int, window: int | None, max_staleness: int
) -> Piece | None:
    """The sample's loss-bearing part; None when it has none.

    Args:
        domain: picks the teachers.
        version: publication number of the student.
        window: tokens of the decoder's bounded replay; None for networks without one.
        max_staleness: tokens older than this bear no loss.
    """
    sampled = [at for at, mine in enumerate(trajectory.sampled) if mine]
    fresh = [at for at in sampled if version - (trajectory.versions[at] or 0) <= max_staleness]
    if trajectory.failure is not None or not fresh:
        return None
    first = next((segment.end for segment in trajectory.segments if segment.start == 0), sampled[0])
    start = 0 if window is None else max(0, min(first, sampled[0]) - window)
    return Piece(trajectory.id, domain, trajectory.token_ids[: fresh[-1] + 1], start, tuple(fresh))


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
    parts = max(1, min(parts, len(pieces)))
    return [list(pieces[at::parts]) for at in range(parts)]


DomainOf = Callable[[Trajectory], str]
"""Names the domain of a sample."""
