"""The key-value state of a flash network for many sequences at once.

Kept for each slot: the last W window keys of every layer, every latent and index key of each memory, and the
raw projection of a token whose pair is incomplete; with Engram, the last tokens. Values are stored as the
low-precision cache gives them back (quantize-dequantize), in the network's type.

The window is a ring: the key of position p lies in column p modulo W; one more column takes the token that
is being decoded, and what padding writes.

Axes: B rows of one forward pass, S slots, T new columns, W window, M groups, D channels, n tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import QUERY_BLOCK
from model.latent import Memory
from model.layers import precise
from model.network import MemorySource, Network


@dataclass
class _SourceStore:
    """Memory of one source layer: the last column takes what padding writes."""

    latents_SMD: Tensor
    keys_SMK: Tensor
    pending_SC: Tensor


class FlashCache:
    """See `model.policy.Cache`.

    Args:
        network: read at every call, so that new weights apply from the next token on.
        slots: S.
        max_tokens: of one slot.
    """

    def __init__(self, network: Network, slots: int, max_tokens: int) -> None:
        config = network.config
        self.network, self.slots, self.max_tokens = network, slots, max_tokens
        self._lengths = [0] * slots
        self._starts = [0] * slots
        weight = network.embedding.weight
        self._windows_LSWD = weight.new_zeros(config.layers, slots, config.window + 1, config.head_dim)
        reach = 0 if config.engram is None else config.engram.max_ngram - 1
        self._tokens_SH = torch.zeros(slots, reach, dtype=torch.long, device=weight.device)
        self._sources: dict[int, _SourceStore] = {}
        for layer in config.kv_source:
            groups = max_tokens // config.compress_ratios[layer] + 1
            raw = config.head_dim * config.compress_ratios[layer]
            self._sources[layer] = _SourceStore(
                weight.new_zeros(slots, groups, config.head_dim, dtype=precise(weight).dtype),
                weight.new_zeros(slots, groups, config.index_dim, dtype=precise(weight).dtype),
                weight.new_zeros(slots, raw, dtype=precise(weight).dtype),
            )

    @torch.no_grad()
    def extend(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """See `Cache.extend`."""
        self._check(slots, tokens)
        logits: list[Tensor | None] = [None] * len(slots)
        kinds: dict[int, list[int]] = {}
        for i, slot in enumerate(slots):
            kind = 0 if self._lengths[slot] == 0 else 1 if len(tokens[i]) == 1 else 2
            kinds.setdefault(kind, []).append(i)
        for rows in kinds.values():
            found = self._forward([slots[i] for i in rows], [tokens[i] for i in rows])
            for i, row in zip(rows, found, strict=True):
                logits[i] = row
        return torch.stack([row for row in logits if row is not None])

    def fork(self, src: int, dst: int) -> None:
        """See `Cache.fork`."""
        self._lengths[dst], self._starts[dst] = self._lengths[src], self._starts[src]
        self._windows_LSWD[:, dst] = self._windows_LSWD[:, src]
        self._tokens_SH[dst] = self._tokens_SH[src]
        for layer, store in self._sources.items():
            groups = self._lengths[src] // self.network.config.compress_ratios[layer]
            store.latents_SMD[dst, :groups] = store.latents_SMD[src, :groups]
            store.keys_SMK[dst, :groups] = store.keys_SMK[src, :groups]
            store.pending_SC[dst] = store.pending_SC[src]

    def free(self, slot: int) -> None:
        """See `Cache.free`."""
        self._lengths[slot] = self._starts[slot] = 0

    def length(self, slot: int) -> int:
        """See `Cache.length`."""
        return self._lengths[slot]

    def starts(self, slot: int) -> int:
        """See `Cache.starts`."""
        return self._starts[slot]

    def _check(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        if len(slots) != len(tokens) or len(set(slots)) != len(slots):
            raise ValueError("extend needs one list of tokens for each slot, and each slot once")
        for slot, new in zip(slots, tokens, strict=True):
            if not new:
                raise ValueError(f"slot {slot}: extend needs at least one token")
            if self._lengths[slot] + len(new) > self.max_tokens:
                raise ValueError(f"slot {slot}: more than {self.max_tokens} tokens; open a larger cache")

    def _forward(self, slots: list[int], tokens: list[Sequence[int]]) -> Tensor:
        """Logits [B, V] of slots that are all empty, or all not."""
        device = self._windows_LSWD.device
        counts = [len(new) for new in tokens]
        columns = max(counts)
        padded = torch.tensor([[*new, *[0] * (columns - len(new))] for new in tokens], device=device)
        view = _View(self, slots, counts)
        steps = torch.arange(columns, device=device)
        segments = (steps < view.counts_B.unsqueeze(1)).long()
        positions = view.lengths_B.unsqueeze(1) + steps
        decoder_columns = None
        if view.fresh:
            window = self.network.config.window
            for slot, count in zip(slots, counts, strict=True):
                self._starts[slot] = max(0, count - window)
            if columns > window:
                steps = steps[:window]
                decoder_columns = (view.counts_B - window).clamp_min(0).unsqueeze(1) + steps
                decoder_columns = torch.where(steps < view.counts_B.unsqueeze(1), decoder_columns, -1)
        starts = torch.tensor([self._starts[slot] for slot in slots], device=device)
        hidden, _ = self.network(
            padded, segments, positions, starts.unsqueeze(1).expand(-1, columns), decoder_columns, view
        )
        for slot, count in zip(slots, counts, strict=True):
            self._lengths[slot] += count
        last = view.counts_B.clamp_max(hidden.shape[1]) - 1
        final_Bd = hidden[torch.arange(len(slots), device=device), last]
        return (final_Bd @ self.network.head_Vd.T).float()


@dataclass
class _View:
    """The rows of one forward pass, as a `model.network.State`."""

    cache: FlashCache
    slots: list[int]
    counts: list[int]
    slots_B: Tensor = field(init=False)
    lengths_B: Tensor = field(init=False)
    counts_B: Tensor = field(init=False)
    fresh: bool = field(init=False)

    def __post_init__(self) -> None:
        device = self.cache._windows_LSWD.device
        lengths = [self.cache._lengths[slot] for slot in self.slots]
        self.fresh = not any(lengths)
        self.slots_B, self.lengths_B, self.counts_B = torch.tensor(
            [self.slots, lengths, self.counts], device=device
        )

    def history(self, tokens_BT: Tensor, count: int) -> Tensor:
        """See `State`."""
        before = self.cache._tokens_SH[self.slots_B]
        joined = torch.cat((before, tokens_BT), 1)
        newest = self.counts_B.unsqueeze(1) + torch.arange(count, device=joined.device)
        self.cache._tokens_SH[self.slots_B] = joined.gather(1, newest)
        return before

    def window_positions(self, layer: int) -> Tensor:
        """See `State`."""
        window = self.cache.network.config.window
        if self._in_order:
            return self.lengths_B.unsqueeze(1) + torch.arange(-window, 0, device=self.lengths_B.device)
        newest_B1 = self.lengths_B.unsqueeze(1) - 1
        return newest_B1 - (newest_B1 - torch.arange(window, device=newest_B1.device)) % window

    @property
    def _in_order(self) -> bool:
        """Whether history must stand in order of position: only several blocks of queries need that."""
        return max(self.counts) > QUERY_BLOCK

    def window(self, layer: int, keys_BTD: Tensor) -> Tensor:
        """See `State`."""
        store_SWD = self.cache._windows_LSWD[layer]
        window = store_SWD.shape[1] - 1
        keys_BTD = keys_BTD.to(store_SWD.dtype)
        columns = keys_BTD.shape[1]
        if max(self.counts) == 1:
            key_BD = keys_BTD.squeeze(1)
            store_SWD[self.slots_B, window] = key_BD
            both = self._of_rows(store_SWD)
            store_SWD[self.slots_B, self.lengths_B % window] = key_BD
            return both
        rows = self.slots_B.unsqueeze(1)
        held = (
            self.window_positions(layer) % window
            if self._in_order
            else torch.arange(window, device=rows.device)
        )
        both = torch.cat((store_SWD[rows, held], keys_BTD), 1)
        # The last columns of `keys_BTD` may be padding, and its first may precede the decoder's start.
        new_B1 = self.counts_B.clamp_max(columns).unsqueeze(1)
        step = torch.arange(columns, device=new_B1.device)
        position = self.lengths_B.unsqueeze(1) + self.counts_B.unsqueeze(1) - new_B1 + step
        kept = (step < new_B1) & (step >= new_B1 - window)
        store_SWD[rows, torch.where(kept, position % window, window)] = keys_BTD
        return both

    def memory(self, layer: int, source: MemorySource, x_BTd: Tensor) -> Memory:
        """See `State`."""
        store = self.cache._sources[layer]
        ratio = source.compressor.ratio
        raw_BTC = source.compressor.raw(x_BTd)
        odd_B = self.lengths_B % ratio
        if ratio == 2:
            raw_BTC = self._pair_up(store, raw_BTC, odd_B)
        first_group_B = self.lengths_B // ratio
        new = raw_BTC.shape[1] // ratio
        steps = torch.arange(new, device=odd_B.device)
        groups_BM = first_group_B.unsqueeze(1) + steps
        latents, keys = source.entries(raw_BTC, groups_BM * ratio)
        whole_B = (odd_B + self.counts_B) // ratio
        trash = store.latents_SMD.shape[1] - 1
        at = torch.where(steps < whole_B.unsqueeze(1), groups_BM, trash)
        row = self.slots_B.unsqueeze(1)
        store.latents_SMD[row, at] = latents
        store.keys_SMK[row, at] = keys
        total = max(
            (self.cache._lengths[s] + c) // ratio for s, c in zip(self.slots, self.counts, strict=True)
        )
        groups = torch.arange(total, device=row.device).expand(len(self.slots), -1)
        return Memory(
            ratio,
            store.latents_SMD,
            self.slots_B,
            self._of_rows(store.keys_SMK)[:, :total],
            torch.ones_like(groups),
            groups,
        )

    def _of_rows(self, store: Tensor) -> Tensor:
        """The rows' slots of a store: a view if they are the first ones in order, else a copy."""
        if self.slots == list(range(len(self.slots))):
            return store[: len(self.slots)]
        return store.index_select(0, self.slots_B)

    def _pair_up(self, store: _SourceStore, raw_BTC: Tensor, odd_B: Tensor) -> Tensor:
        """Put the token that waits for its pair before the new ones; keep the one that waits now."""
        joined = torch.cat((store.pending_SC[self.slots_B].unsqueeze(1), raw_BTC), 1)
        columns = joined.shape[1] + joined.shape[1] % 2
        index = torch.arange(columns, device=odd_B.device) + (1 - odd_B).unsqueeze(1)
        joined = F.pad(joined, (0, 0, 0, 2))
        last = joined.gather(1, self.counts_B.view(-1, 1, 1).expand(-1, 1, joined.shape[2]))
        store.pending_SC[self.slots_B] = last.squeeze(1)
        return joined.gather(
            1, index.clamp_max(joined.shape[1] - 1).unsqueeze(-1).expand(-1, -1, joined.shape[2])
        )
