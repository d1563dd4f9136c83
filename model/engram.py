"""Engram: rows of learned tables, found by hashing the last tokens, gated into the residual streams.

Every position looks up the n-grams (n = 2 .. N) of compressed tokens that end there, in several tables each,
whose sizes are distinct primes. The rows give one key a stream and a common value:

    gate_s = sigmoid(signed_sqrt(<norm(h_s) q_s, norm(k_s) k'_s> / sqrt(d))),  h_s += gate_s v.

Addresses depend on token ids alone, so that rows may be fetched before the layer runs. An n-gram never
reaches over the start of its sequence or over a dead token (an image): what is beyond counts as padding.

Axes: B rows, T tokens, H history, N longest n-gram, C tables (n-gram orders times heads), S streams, d width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, normalizers
from torch import Tensor, nn

from model.config import EngramConfig, NetworkConfig
from model.layers import linear, precise
from model.quantize import fp8_ue8m0

DEAD = -1
"""Compressed id of what no n-gram may contain."""
_LONE_SPACE = "\ue000"
_SEED_STEP = 10_007


def compress_tokens(texts: Sequence[str], raw: Callable[[int], str]) -> list[int]:
    """Compressed id of every token id: tokens that differ in case, accents or white space share one.

    Args:
        texts: each id decoded on its own.
        raw: the vocabulary's own spelling of an id, for tokens that are no whole characters.

    Returns:
        Ids by first appearance, so that the largest is their number less one.
    """
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
    seen: dict[str, int] = {}
    ids: list[int] = []
    for token, text in enumerate(texts):
        key = raw(token) if "\ufffd" in text else normalizer.normalize_str(text) or text
        ids.append(seen.setdefault(key, len(seen)))
    return ids


def table_sizes(config: EngramConfig) -> tuple[tuple[int, ...], ...]:
    """Rows of each of the C tables of every Engram layer: ascending primes from `table_rows` on.

    In order of layer, then n-gram order, then head; no prime twice.
    """
    count = (config.max_ngram - 1) * config.heads
    sizes: list[tuple[int, ...]] = []
    number = config.table_rows - 1
    for _ in config.layers:
        own: list[int] = []
        while len(own) < count:
            number += 1
            if _is_prime(number):
                own.append(number)
        sizes.append(tuple(own))
    return tuple(sizes)


def multipliers(layer: int, compressed_vocab: int, max_ngram: int) -> list[int]:
    """Odd factors of the tokens at distance 0 .. N-1; products with compressed ids fit in 63 bits."""
    bound = max(1, int(np.iinfo(np.int64).max) // compressed_vocab // 2)
    drawn = np.random.default_rng(_SEED_STEP * layer).integers(0, bound, size=max_ngram, dtype=np.int64)
    return [int(value) * 2 + 1 for value in drawn]


class NgramHash(nn.Module):
    """Rows [B, T, C] of one layer's table, from compressed tokens.

    hash_n = t_0 m_0 xor t_-1 m_1 xor ... t_-(n-1) m_(n-1), modulo a table's size, plus that table's offset.
    """

    factors_N: Tensor
    sizes_GH: Tensor
    offsets_GH: Tensor

    def __init__(self, config: EngramConfig, layer: int) -> None:
        super().__init__()
        sizes = table_sizes(config)[config.layers.index(layer)]
        grid = (config.max_ngram - 1, config.heads)
        self.rows = sum(sizes)
        factors = multipliers(layer, config.compressed_vocab, config.max_ngram)
        for name, values in (
            ("factors_N", torch.tensor(factors)),
            ("sizes_GH", torch.tensor(sizes).view(grid)),
            ("offsets_GH", torch.tensor([0, *accumulate(sizes[:-1])]).view(grid)),
        ):
            self.register_buffer(name, values, persistent=False)

    def forward(self, ids_BX: Tensor, positions_BT: Tensor, pad: Tensor) -> Tensor:
        """Row numbers.

        Args:
            ids_BX: compressed ids of N-1 tokens of history (any, where a sequence has none) and T new ones.
            positions_BT: of the new ones within their sequence.
            pad: compressed id that stands for what an n-gram may not reach.
        """
        T = positions_BT.shape[1]
        mixed = torch.zeros_like(positions_BT)
        blocked = torch.zeros_like(positions_BT, dtype=torch.bool)
        columns: list[Tensor] = []
        for distance in range(len(self.factors_N)):
            first = ids_BX.shape[1] - T - distance
            ids_BT = ids_BX[:, first : first + T]
            blocked = blocked | (positions_BT < distance) | (ids_BT == DEAD)
            mixed = mixed ^ torch.where(blocked, pad, ids_BT) * self.factors_N[distance]
            if distance:
                columns.append(mixed.unsqueeze(-1) % self.sizes_GH[distance - 1])
        return (torch.stack(columns, -2) + self.offsets_GH).flatten(-2)


class Engram(nn.Module):
    """Tables, projection and gate of one layer."""

    def __init__(self, config: NetworkConfig, layer: int) -> None:
        super().__init__()
        assert config.engram is not None
        shape = config.engram
        self.streams, self.width, self.eps = config.streams, config.width, config.norm_eps
        self.row_fp8 = shape.row_format == "fp8"
        self.hash = NgramHash(shape, layer)
        self.table = nn.Embedding(self.hash.rows, shape.head_dim)
        nn.init.normal_(self.table.weight, std=0.02)
        channels = (shape.max_ngram - 1) * shape.heads * shape.head_dim
        self.project = linear(channels, (config.streams + 1) * config.width)
        self.matrix_blocks = {"project.weight": config.streams + 1}
        self.lookup_tables = {"table.weight": 5.0}
        # Gains, kept as vectors so that they are trained like those of norms.
        self.query_gain = nn.Parameter(torch.ones(config.streams * config.width))
        self.key_gain = nn.Parameter(torch.ones(config.streams * config.width))

    def forward(self, x: Tensor, ids_BX: Tensor, positions_BT: Tensor, pad: Tensor) -> Tensor:
        """The stream [B, T, d] or streams [B, T, S, d] with what the tables add; nothing at dead tokens."""
        rows = self.table(self.hash(ids_BX, positions_BT, pad))
        if self.row_fp8:
            rows = fp8_ue8m0(rows)
        keys, value = self.project(rows.flatten(-2)).split([self.streams * self.width, self.width], dim=-1)
        dead_BT = ids_BX[:, -positions_BT.shape[1] :] == DEAD
        streams = x.unsqueeze(-2) if self.streams == 1 else x
        gate_BTS = self.gate(streams, keys.unflatten(-1, (self.streams, self.width)))
        gate_BTS = gate_BTS.masked_fill(dead_BT.unsqueeze(-1), 0.0)
        added = gate_BTS.unsqueeze(-1) * precise(value).unsqueeze(-2)
        return (precise(streams) + added).to(x.dtype).view(x.shape)

    def gate(self, x_BTSd: Tensor, keys_BTSd: Tensor) -> Tensor:
        """How well each stream agrees with its key, in (0, 1), float32: [B, T, S]."""
        gain = (precise(self.query_gain) * precise(self.key_gain)).view(self.streams, self.width)
        x, keys = (F.rms_norm(precise(v), v.shape[-1:], None, self.eps) for v in (x_BTSd, keys_BTSd))
        dot = (x * gain * keys).sum(-1) * self.width**-0.5
        return torch.sigmoid(torch.sign(dot) * dot.abs().clamp_min(1e-6).sqrt())


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    return number % 2 == 1 and all(number % factor for factor in range(3, int(number**0.5) + 1, 2))
