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
    return Piece(trajectory.id, domain, trajectory.token_ids[: bearing[-1] + 1], start, bearing)


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


DomainOf = Callable[[Trajectory], str]
"""Names the domain of a sample."""
