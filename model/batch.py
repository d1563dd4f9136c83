"""Packed token batches: several sequences in one row, and attention that never crosses them.

Axes: B rows, T columns. A sequence starts at an even column, so that pairs of its tokens (compress ratio 2)
are pairs of columns. What an odd sequence leaves open is padding (segment 0).
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from model.packing import aligned, best_fit


@dataclass(frozen=True)
class Sequence:
    """Token ids of one sample, and the position at which its decoder began (`Cache.starts`)."""

    tokens: Sequence_[int]
    start: int = 0


class Place(NamedTuple):
    """Where `pack` put a sequence: its index in the argument, its row, first column and length."""

    index: int
    row: int
    column: int
    length: int


@dataclass(frozen=True)
class Batch:
    """Rows of packed sequences; every tensor has shape [B, T] and type int64."""

    tokens_BT: Tensor
    segments_BT: Tensor
    """Number of the sequence within its row, from 1; 0 is padding."""
    positions_BT: Tensor
    """Position within the sequence, from 0."""
    starts_BT: Tensor
    """Position at which the decoder of the token's sequence began. Hidden states before it are zero."""
    places: tuple[Place, ...] = ()
    decoder_columns_BU: Tensor | None = field(default=None, repr=False)
    """Columns where the decoder runs, left-justified, -1 = none; None runs it everywhere."""
    prefix: Batch | None = field(default=None, repr=False)
    """Beginnings that rows of this batch share (`model.forks`): a row goes on where its prefix ends."""
    prefix_rows_B: Tensor | None = field(default=None, repr=False)
    """Row of `prefix` that each row goes on from."""

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in (
                "tokens_BT",
                "segments_BT",
                "positions_BT",
                "starts_BT",
                "decoder_columns_BU",
                "prefix_rows_B",
            )
            if getattr(self, name) is not None
        }
        if self.prefix is not None:
            moved["prefix"] = self.prefix.to(device)
        return replace(self, **moved)

    def scatter(self, values: Sequence_[Sequence_[float] | Tensor], *, fill: float = 0.0) -> Tensor:
        """Lay per-token values of all packed sequences out as this batch's tokens are.

        Args:
            values: one list or tensor for each sequence given to `pack` (indexed by `Place.index`), one
                number a token.
            fill: value at padding.

        Returns:
            [B, T], float32 or the type of the tensors given, on the batch's device.

        Raises:
            ValueError: a list's length differs from its sequence's.
        """
        first = values[self.places[0].index] if self.places else 0
        dtype = first.dtype if isinstance(first, Tensor) else torch.float32
        out = torch.full(self.tokens_BT.shape, fill, dtype=dtype)
        for index, row, column, length in self.places:
            value = torch.as_tensor(values[index], dtype=dtype)
            if value.shape[0] != length:
                raise ValueError(f"sequence {index} has {length} tokens but {value.shape[0]} values")
            out[row, column : column + length] = value
        return out.to(self.tokens_BT.device)

    def gather(self, values_BT: Tensor) -> dict[int, Tensor]:
        """The inverse of `scatter`: each sequence's values by its index (the first axes are B, T)."""
        return {i: values_BT[row, column : column + n] for i, row, column, n in self.places}


def pack(sequences: Sequence_[Sequence], max_tokens: int, *, row_tokens: int | None = None) -> list[Batch]:
    """Best-fit decreasing (`packing.best_fit`): each sequence goes into the fullest row that still holds it.

    Rows are then grouped, in order of their first sequence, into batches of at most `max_tokens` columns
    (padding included; one row at least). Deterministic.

    Args:
        sequences: at least one token each.
        max_tokens: B*T of a batch at most.
        row_tokens: T; the longest sequence, rounded up to a multiple of 8, by default.

    Raises:
        ValueError: an empty sequence, or one longer than a row.
    """
    if not sequences:
        return []
    longest = max(len(s.tokens) for s in sequences)
    columns = row_tokens or -(-longest // 8) * 8
    rows = best_fit([len(s.tokens) for s in sequences], columns)
    per_batch = max(1, max_tokens // columns)
    return [_lay_out(sequences, rows[at : at + per_batch], columns) for at in range(0, len(rows), per_batch)]


def batch_of(sequences: Sequence_[Sequence]) -> Batch:
    """One row a sequence, in order, without packing (tests, evaluation of few sequences)."""
    columns = aligned(max(len(s.tokens) for s in sequences))
    return _lay_out(sequences, [[i] for i in range(len(sequences))], columns)


def _lay_out(sequences: Sequence_[Sequence], rows: Sequence_[Sequence_[int]], columns: int) -> Batch:
    tokens, segments, positions, starts = (
        torch.zeros(len(rows), columns, dtype=torch.long) for _ in range(4)
    )
    places: list[Place] = []
    for row, indices in enumerate(rows):
        column = 0
        for number, index in enumerate(indices, start=1):
            sequence, length = sequences[index], len(sequences[index].tokens)
            span = slice(column, column + length)
            tokens[row, span] = torch.as_tensor(sequence.tokens, dtype=torch.long)
            segments[row, span] = number
            positions[row, span] = torch.arange(length)
            starts[row, span] = sequence.start
            places.append(Place(index, row, column, length))
            column += aligned(length)
    return Batch(
        tokens, segments, positions, starts, tuple(places), _decoder_columns(segments, positions, starts)
    )


def _decoder_columns(segments_BT: Tensor, positions_BT: Tensor, starts_BT: Tensor) -> Tensor | None:
    """Columns at or after their start, left-justified and padded with -1; None when that is all of them."""
    runs_BT = (segments_BT > 0) & (positions_BT >= starts_BT)
    most = int(runs_BT.sum(1).max())
    if most >= 0.9 * segments_BT.shape[1]:
        return None
    order_BT = torch.argsort(~runs_BT, dim=1, stable=True)
    columns_BU = order_BT[:, :most]
    return torch.where(runs_BT.gather(1, columns_BU), columns_BU, -1)
