"""Which teacher's samples come when, and how its head gets there in time.

Inside a minibatch the work is sorted by teacher, so each head is loaded once; the next minibatch starts
with the teacher that the last one ended with, so the resident head is used twice for one load. While one
teacher's samples are worked on, the next head is read from storage in the background into host memory;
the device holds at most one. Sorting inside a minibatch changes no gradient: the step's loss is a sum
with one denominator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Work(Generic[T]):
    """One sample under one of its teachers."""

    sample: T
    teacher: str
    weight: float


def by_teacher(work: Iterable[Work[T]], resident: str | None = None) -> list[tuple[str, list[Work[T]]]]:
    """Work grouped by teacher: the resident one first, the others by name; samples keep their order."""
    groups: dict[str, list[Work[T]]] = {}
    for item in work:
        groups.setdefault(item.teacher, []).append(item)
    names = sorted(groups, key=lambda name: (name != resident, name))
    return [(name, groups[name]) for name in names]


def plan(minibatches: Iterable[Sequence[Work[T]]]) -> list[list[tuple[str, list[Work[T]]]]]:
    """`by_teacher` over consecutive minibatches, each starting where the last one ended."""
    planned: list[list[tuple[str, list[Work[T]]]]] = []
    resident: str | None = None
    for minibatch in minibatches:
        planned.append(by_teacher(minibatch, resident))
        if planned[-1]:
            resident = planned[-1][-1][0]
    return planned


@dataclass
class Heads:
    """Teachers' heads on a device, one at a time, the next one being read meanwhile.

    Args:
        load: reads one head [V, E] into host memory; called in a background thread, one call at a time.
        device: where the loss is computed.
    """

    load: Callable[[str], Tensor]
    device: str = "cpu"
    loads: int = 0
    """Heads read from storage so far."""
    name: str | None = None
    """Teacher whose head is on the device."""
    _head: Tensor | None = field(default=None, repr=False)
    _reader: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="teacher-head"), repr=False
    )

    def visit(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (teacher, head) in this order. The head of the last one stays on the device."""
        waiting = None if not names or names[0] == self.name else self._reader.submit(self.load, names[0])
        for i, name in enumerate(names):
            if waiting is not None:
                self._head = None  # the former head leaves the device before the next one arrives
                host = waiting.result()
                self._head, self.name = host.to(self.device), name
                self.loads += 1
            assert self._head is not None
            assert self.name == name
            following = names[i + 1] if i + 1 < len(names) else None
            waiting = None
            if following is not None and following != name:
                waiting = self._reader.submit(self.load, following)
            yield name, self._head

    def close(self) -> None:
        """Drop the head and stop the reader."""
        self._head, self.name = None, None
        self._reader.shutdown(wait=True)
