"""Which samples share a row: best fit over a stream of lengths, and cuts of what is longer; torch-free.

Waste is what a row holds beyond tokens. It has two parts. Alignment: a sample starts at an even column, so an
odd one leaves a column open, half a column a sample on average. Room: what is left at a row's end, which best
fit brings to less than one row in all, spread over rows that ran out of small samples; `Packer` holds those
back for the samples that come next.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

ALIGN = 2
"""Columns that a sample's start is a multiple of: the largest compress ratio."""


def best_fit(lengths: Sequence[int], columns: int) -> list[list[int]]:
    """Best-fit decreasing: longest first, each into the fullest row that still holds it.

    Deterministic; n samples take n log n comparisons.

    Returns:
        Indices into `lengths` by row, rows in the order of their smallest index.

    Raises:
        ValueError: a sample that is empty or longer than a row.
    """
    for index, length in enumerate(lengths):
        if not 0 < length <= columns:
            raise ValueError(f"sequence {index} has {length} tokens; a row holds 1 to {columns}")
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []
    """Room and number of every row that is not full, fullest first."""
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(open_rows, (lengths[index], -1))
        if at < len(open_rows):
            room, row = open_rows.pop(at)
        else:
            room, row = columns, len(rows)
            rows.append([])
        rows[row].append(index)
        room -= aligned(lengths[index])
        if room > 0:
            insort(open_rows, (room, row))
    return sorted(rows, key=min)


def aligned(length: int) -> int:
    """Columns that a sample takes."""
    return -(-length // ALIGN) * ALIGN


def waste(rows: Sequence[Sequence[int]], columns: int) -> float:
    """Part of all columns that holds no token; `rows` are the lengths in each row."""
    return 1 - sum(map(sum, rows)) / (len(rows) * columns) if rows else 0.0


def cuts(length: int, longest: int, shortest: int = ALIGN) -> list[range]:
    """Cut a sample that is longer than a row, before anything is shuffled.

    The pieces depend on its length alone, so they are the same in every run, order and number of ranks. All
    but the last two are `longest` tokens and fill a row; they start at even tokens. A rest below `shortest`
    takes from the piece before it. Each cut costs one target: the first token of a piece has no context.

    Raises:
        ValueError: `longest` is odd, or not at least twice `shortest`.
    """
    if longest % ALIGN or longest < 2 * shortest:
        raise ValueError(f"pieces of {longest} tokens: take an even number of at least {2 * shortest}")
    ends = [*range(longest, length, longest), length]
    if len(ends) > 1 and length - ends[-2] < shortest:
        ends[-2] = (length - shortest) // ALIGN * ALIGN
    return [range(a, b) for a, b in zip([0, *ends], ends, strict=False)]


class Packer:
    """Packs a stream of samples: rows come out full, and what would leave them open waits for more.

        packer = Packer(65_536)
        for window in windows:             # some thousand samples: the more, the less waits
            rows = packer.add([len(s) for s in window])
        rows = packer.finish()

    Samples are numbered from 0 in the order of their arrival. The same stream in the same windows gives the
    same rows; `state` goes into a checkpoint, and a packer made from it goes on as this one would have.

    Args:
        columns: tokens of a row.
        room: part of the columns given out so far that may stay empty at the ends of rows.
        state: of a packer to go on from.
    """

    def __init__(self, columns: int, *, room: float = 2e-5, state: Mapping[str, Any] | None = None) -> None:
        self.columns = columns
        self.room = room
        self._count: int = state["count"] if state else 0
        self._waiting: list[tuple[int, int]] = [(i, n) for i, n in state["waiting"]] if state else []
        """Number and length."""
        self._rows: int = state["rows"] if state else 0
        self._empty: int = state["empty"] if state else 0

    @property
    def state(self) -> dict[str, Any]:
        """What the next rows depend on, for JSON."""
        return {
            "count": self._count,
            "waiting": [list(sample) for sample in self._waiting],
            "rows": self._rows,
            "empty": self._empty,
        }

    def add(self, lengths: Sequence[int]) -> list[list[int]]:
        """Take samples; numbers of those that go into each row that is full by now.

        Raises:
            ValueError: a sample that is empty or longer than a row; none of these were taken.
        """
        arrived = [*self._waiting, *enumerate(lengths, start=self._count)]
        planned = self._plan(arrived)
        self._count += len(lengths)
        done: list[list[int]] = []
        waiting: list[tuple[int, int]] = []
        for room, row in sorted(planned):
            allowed = self.room * self.columns * (self._rows + 1)
            if self._empty + room <= allowed:
                self._rows, self._empty = self._rows + 1, self._empty + room
                done.append([arrived[i][0] for i in row])
            else:
                waiting += [arrived[i] for i in row]
        self._waiting = sorted(waiting)
        return sorted(done, key=min)

    def finish(self) -> list[list[int]]:
        """The rows of what still waits, full or not."""
        rows = [[self._waiting[i][0] for i in row] for _, row in self._plan(self._waiting)]
        self._waiting = []
        return rows

    def _plan(self, samples: Sequence[tuple[int, int]]) -> list[tuple[int, list[int]]]:
        """Room left and indices into `samples` of each row."""
        lengths = [length for _, length in samples]
        rows = best_fit(lengths, self.columns)
        return [(max(0, self.columns - sum(aligned(lengths[i]) for i in row)), row) for row in rows]
