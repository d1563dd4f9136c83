"""Samples of one prompt computed as one prefix with several continuations.

Agent samples share a long prompt and differ in a few sampled tokens; packing them whole reads the prompt
once a sample. Here the prompt is read once a group, as rows of a first pass whose window keys and latent
memory stay in the autograd graph, and the continuations are rows of a second pass that begins where the
prompt ended, as in a cache. It is the computation of `pack`, reordered: hidden states and gradients agree
to float32 rounding. Only networks of `model.network` can do it; others take `pack`.

Axes: B rows, T columns, G rows of prefixes, W window, M latents, D channels.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from model.batch import Batch, Place, Sequence, pack
from model.latent import Memory
from model.network import MemorySource, Network

SHORTEST = 32
"""Shared tokens below which a prefix of its own does not pay."""


@dataclass
class _Prefix:
    """The `State` of the first pass: no history, and everything the second pass will need is kept."""

    window_size: int
    counts_G: Tensor
    """Tokens of each prefix."""
    decoder_counts_G: Tensor
    """Of them, those that the decoder runs on."""
    encoder_layers: int
    windows: dict[int, Tensor] = field(default_factory=dict)
    memories: dict[int, Memory] = field(default_factory=dict)
    tokens_GT: Tensor | None = None

    def history(self, tokens_BT: Tensor, count: int) -> Tensor:
        self.tokens_GT = tokens_BT
        return tokens_BT.new_zeros(len(tokens_BT), count)

    def window_positions(self, layer: int) -> Tensor:
        return self.counts_G.new_full((len(self.counts_G), self.window_size), -1)

    def window(self, layer: int, keys_BTD: Tensor) -> Tensor:
        both = F.pad(keys_BTD, (0, 0, self.window_size, 0))
        ends_G = self.counts_G if layer < self.encoder_layers else self.decoder_counts_G
        index = ends_G.unsqueeze(1) + torch.arange(self.window_size, device=ends_G.device)
        self.windows[layer] = both.gather(1, index.unsqueeze(-1).expand(-1, -1, both.shape[2]))
        return both

    def memory(self, layer: int, source: MemorySource, x_BTd: Tensor) -> Memory:
        ratio = source.compressor.ratio
        raw = F.pad(source.compressor.raw(x_BTd), (0, 0, 0, -x_BTd.shape[1] % ratio))
        groups = torch.arange(raw.shape[1] // ratio, device=raw.device).expand(len(self.counts_G), -1)
        latents, keys = source.entries(raw, groups * ratio)
        segments = (groups < (self.counts_G // ratio).unsqueeze(1)).long()
        self.memories[layer] = Memory(ratio, latents, None, keys, segments, groups)
        return self.memories[layer]


@dataclass
class _Tail:
    """The `State` of the second pass: each row goes on behind its prefix."""

    prefix: _Prefix
    rows_B: Tensor

    def history(self, tokens_BT: Tensor, count: int) -> Tensor:
        before = self.prefix.tokens_GT
        assert before is not None
        at = self.prefix.counts_G.unsqueeze(1) + torch.arange(-count, 0, device=before.device)
        return before.gather(1, at.clamp_min(0))[self.rows_B]

    def window_positions(self, layer: int) -> Tensor:
        size = self.prefix.window_size
        steps = torch.arange(-size, 0, device=self.rows_B.device)
        return self.prefix.counts_G[self.rows_B].unsqueeze(1) + steps

    def window(self, layer: int, keys_BTD: Tensor) -> Tensor:
        return torch.cat((self.prefix.windows[layer][self.rows_B], keys_BTD), 1)

    def memory(self, layer: int, source: MemorySource, x_BTd: Tensor) -> Memory:
        before = self.prefix.memories[layer]
        ratio = before.ratio
        # Prefixes have even lengths, so pairs of tokens are pairs of columns here too.
        raw = F.pad(source.compressor.raw(x_BTd), (0, 0, 0, -x_BTd.shape[1] % ratio))
        first_B = self.prefix.counts_G[self.rows_B] // ratio
        groups = first_B.unsqueeze(1) + torch.arange(raw.shape[1] // ratio, device=raw.device)
        latents, keys = source.entries(raw, groups * ratio)
        return Memory(
            ratio,
            torch.cat((before.latents_BMD[self.rows_B], latents), 1),
            None,
            torch.cat((before.index_keys_BMK[self.rows_B], keys), 1),
            torch.cat((before.segments_BM[self.rows_B], torch.ones_like(groups)), 1),
            torch.cat((before.groups_BM[self.rows_B], groups), 1),
        )


def hidden_of_tails(network: Network, batch: Batch) -> Tensor:
    """Final hidden states [B, T, d] of the continuations in `batch`; those of its prefixes are not kept."""
    shared, rows_B = batch.prefix, batch.prefix_rows_B
    assert shared is not None
    assert rows_B is not None
    runs_GT = shared.segments_BT > 0
    prefix = _Prefix(
        network.config.window,
        runs_GT.sum(1),
        (runs_GT & (shared.positions_BT >= shared.starts_BT)).sum(1),
        network.config.encoder_layers,
    )
    network(
        shared.tokens_BT,
        shared.segments_BT,
        shared.positions_BT,
        shared.starts_BT,
        shared.decoder_columns_BU,
        prefix,
    )
    states, _ = network(
        batch.tokens_BT, batch.segments_BT, batch.positions_BT, batch.starts_BT, None, _Tail(prefix, rows_B)
    )
    return states * (batch.segments_BT > 0).unsqueeze(-1)


def pack_forks(
    sequences: Sequence_[Sequence],
    groups: Sequence_[Hashable],
    needed_from: Sequence_[int],
    max_tokens: int,
) -> list[Batch]:
    """Like `pack`, but sequences of one group share the computation of their common beginning.

    Args:
        sequences: at least one token each.
        groups: which sequences to compare with each other.
        needed_from: first position of each sequence whose hidden state is wanted; earlier ones may be
        left out. max_tokens: columns of a batch at most, prefixes included (one group at least).
    """
    members: dict[tuple[Hashable, int], list[int]] = {}
    for index, (sequence, group) in enumerate(zip(sequences, groups, strict=True)):
        members.setdefault((group, sequence.start), []).append(index)
    forks: list[tuple[int, list[int]]] = []
    alone: list[int] = []
    for (_, start), indices in members.items():
        shared = _common([sequences[i].tokens for i in indices], min(needed_from[i] for i in indices))
        if len(indices) > 1 and shared >= max(SHORTEST, start + 2):
            forks.append((shared, indices))
        else:
            alone += indices
    batches = [_renamed(batch, alone) for batch in pack([sequences[i] for i in alone], max_tokens)]
    forks.sort(key=lambda fork: (-fork[0], fork[1]))
    while forks:
        taken, forks = _fill(forks, sequences, max_tokens)
        batches.append(_lay_out(sequences, taken))
    return batches


def _common(tokens: list[Sequence_[int]], limit: int) -> int:
    """Length of the common beginning, even, at most `limit`."""
    rows = [tuple(row) for row in tokens]
    first, last = min(rows), max(rows)  # lexicographic extremes differ first where any two do
    shared = 0
    for left, right in zip(first, last, strict=False):
        if left != right or shared >= limit:
            break
        shared += 1
    return min(shared, limit) // 2 * 2


def _fill(
    forks: list[tuple[int, list[int]]], sequences: Sequence_[Sequence], max_tokens: int
) -> tuple[list[tuple[int, list[int]]], list[tuple[int, list[int]]]]:
    """As many of the first forks as fit, and the rest."""
    longest = rows = tail = 0
    for count, (shared, indices) in enumerate(forks):
        longest = max(longest, shared)
        rows += len(indices)
        tail = max(tail, *(len(sequences[i].tokens) - shared for i in indices))
        if count and longest * (count + 1) + rows * tail > max_tokens:
            return forks[:count], forks[count:]
    return forks, []


def _lay_out(sequences: Sequence_[Sequence], forks: list[tuple[int, list[int]]]) -> Batch:
    prefix = _rows([(sequences[indices[0]], 0, shared) for shared, indices in forks])
    pieces = [(sequences[i], shared, len(sequences[i].tokens)) for shared, indices in forks for i in indices]
    tails = _rows(pieces)
    runs = (prefix[1] > 0) & (prefix[2] >= prefix[3])
    order = torch.argsort(~runs, dim=1, stable=True)[:, : int(runs.sum(1).max())]
    columns = torch.where(runs.gather(1, order), order, -1)
    names = [i for _, indices in forks for i in indices]
    places = tuple(
        Place(i, row, 0, end - low) for row, (i, (_, low, end)) in enumerate(zip(names, pieces, strict=True))
    )
    owner = [group for group, (_, indices) in enumerate(forks) for _ in indices]
    return Batch(*tails, places, None, prefix=Batch(*prefix, (), columns), prefix_rows_B=torch.tensor(owner))


def _rows(pieces: list[tuple[Sequence, int, int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tokens, segments, positions, starts of pieces (sequence, first, end), one a row, left-justified."""
    columns = -(-max(end - low for _, low, end in pieces) // 2) * 2
    shape = (len(pieces), columns)
    tokens, segments, positions, starts = (torch.zeros(shape, dtype=torch.long) for _ in range(4))
    for row, (sequence, low, end) in enumerate(pieces):
        tokens[row, : end - low] = torch.as_tensor(sequence.tokens[low:end])
        segments[row, : end - low] = 1
        positions[row] = torch.arange(low, low + columns)
        starts[row] = sequence.start
    return tokens, segments, positions, starts


def _renamed(batch: Batch, names: list[int]) -> Batch:
    return replace(batch, places=tuple(place._replace(index=names[place.index]) for place in batch.places))
