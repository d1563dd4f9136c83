"""The causal encoder-decoder: layers, the order in which they share memory and selection, and the two halves.

The encoder runs on every token. The decoder's memory is made from the encoder's output for every token
too, but its layers run only from each sequence's start on (bounded replay): at prefill on the last W tokens.
One `forward` serves training on packed rows and, with a `State`, prefill and decoding: hence their parity.

Axes: B rows, T columns, U columns of the decoder, d width, W window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from model.attention import Attention, Band, band
from model.auxiliary import Auxiliary, alignment_loss
from model.config import LayerKind, NetworkConfig
from model.engram import Engram
from model.indexer import Indexer, IndexKey, Selection, select
from model.latent import Compressor, Memory
from model.layers import RMSNorm
from model.moe import MoE
from model.quantize import fp4_e4m3
from model.rope import rotate_tail, rotation
from model.streams import StreamSite, collapse, spread, update


class State(Protocol):
    """What a cache gives to a forward pass over the next tokens of its sequences (one a row)."""

    def window_positions(self, layer: int) -> Tensor:
        """Positions [B, W] of the cached window keys of a layer, negative where there is none."""
        ...

    def window(self, layer: int, keys_BTD: Tensor) -> Tensor:
        """Append new window keys; returns cached and new ones, [B, W+T, D]."""
        ...

    def memory(self, layer: int, source: MemorySource, x_BTd: Tensor) -> Memory:
        """Append the latents that the new tokens complete; returns the whole memory of that source."""
        ...

    def history(self, tokens_BT: Tensor, count: int) -> Tensor:
        """The last `count` tokens [B, count] before the new ones, anything before a sequence; asked once."""
        ...


@dataclass(frozen=True)
class Rows:
    """The tokens that one half of the network runs on."""

    segments_BT: Tensor
    positions_BT: Tensor
    band: Band
    plain: Tensor
    """Of layers without memory."""
    compressed: Tensor
    """Of layers with one."""
    index: Tensor
    valid_n: Tensor
    auxiliary: Auxiliary | None

    def every(self, stride: int) -> Rows:
        """Every `stride`-th column, for what needs no window."""
        return replace(
            self,
            segments_BT=self.segments_BT[:, ::stride],
            positions_BT=self.positions_BT[:, ::stride],
            compressed=self.compressed[:, ::stride],
            index=self.index[:, ::stride],
        )


class MemorySource(nn.Module):
    """What a Full layer adds: the compressor and the index keys of its memory."""

    def __init__(self, config: NetworkConfig, ratio: int) -> None:
        super().__init__()
        self.config = config
        self.compressor = Compressor(config, ratio)
        self.index_key = IndexKey(config)

    def entries(self, raw_BTC: Tensor, first_positions_BM: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [B, M, D] and index keys [B, M, K], as cached, of whole groups of raw projections."""
        c = self.config
        latents = self.compressor.pool(raw_BTC)
        keys = self.index_key(
            latents.detach(), rotation(first_positions_BM, c.index_rope_dim, c.compress_rope_theta, c.yarn)
        )
        latents = rotate_tail(
            latents, rotation(first_positions_BM, c.rope_dim, c.compress_rope_theta, c.yarn)
        )
        return (fp4_e4m3(latents) if c.memory_format == "fp4" else latents), keys

    def of_rows(self, x_BTd: Tensor, segments_BT: Tensor, positions_BT: Tensor) -> Memory:
        """The memory of packed rows, in which groups are aligned columns."""
        r = self.compressor.ratio
        first = positions_BT[:, ::r]
        latents, keys = self.entries(self.compressor.raw(x_BTd), first)
        return Memory(r, latents, None, keys, segments_BT[:, ::r], first // r)


class Layer(nn.Module):
    """Attention and experts, each behind a norm and added to the stream, or mixed into the streams."""

    def __init__(self, config: NetworkConfig, index: int) -> None:
        super().__init__()
        self.kind = config.kind(index)
        gain = (2 * config.layers) ** -0.5
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, output_gain=gain)
        self.source = (
            MemorySource(config, config.compress_ratios[index]) if self.kind is LayerKind.FULL else None
        )
        self.indexer = Indexer(config) if self.kind in (LayerKind.FULL, LayerKind.REINDEX) else None
        self.moe_norm = RMSNorm(config.width, config.norm_eps)
        self.moe = MoE(config, output_gain=gain)
        self.attention_site = StreamSite(config) if config.streams > 1 else None
        self.moe_site = StreamSite(config) if config.streams > 1 else None
        has_engram = config.engram is not None and index in config.engram.layers
        self.engram = Engram(config, index) if has_engram else None

    def forward(
        self,
        x: Tensor,
        pre_BTn: Tensor | None,
        rows: Rows,
        keys: WindowAppend,
        memory: Memory | None,
        selection: Selection | None,
    ) -> tuple[Tensor, Tensor | None, Selection | None]:
        """The stream (or streams, and how to collapse them) after this layer, and its selection.

        Following Reuse layers take the selection.
        """
        turn = rows.plain if self.kind is LayerKind.WINDOW else rows.compressed
        normed = self.attention_norm(collapse(x, pre_BTn))
        low = self.attention.low_rank(normed)
        if self.indexer is not None:
            assert memory is not None
            with torch.no_grad():
                scores = self.indexer.scores(normed, low, rows.index, memory)
                visible = memory.visible(rows.segments_BT, rows.positions_BT)
            selection = select(scores, visible, memory, self.indexer.topk)
            if rows.auxiliary is not None:
                self._report_alignment(rows.auxiliary, rows, normed, low, memory)
        window = keys(self.attention.window_keys(normed, turn))
        read = None if self.kind is LayerKind.WINDOW else selection
        y = self.attention(low, turn, window, rows.band, read)
        # A site collapses with the previous site's pre: experts with that of attention.
        x, pre_BTn = update(self.attention_site, x, y)
        normed = self.moe_norm(collapse(x, pre_BTn))
        fed = self.moe(normed.flatten(0, 1), rows.valid_n, rows.auxiliary, len(normed))
        x, pre_BTn = update(self.moe_site, x, fed.view_as(normed))
        return x, pre_BTn, selection

    def _report_alignment(
        self, to: Auxiliary, rows: Rows, normed_BTd: Tensor, low_BTr: Tensor, memory: Memory
    ) -> None:
        assert self.indexer is not None
        some, low = rows.every(to.stride), low_BTr[:, :: to.stride].detach()
        scores = self.indexer.scores(normed_BTd[:, :: to.stride].detach(), low, some.index, memory)
        with torch.no_grad():
            q_BTHD = self.attention.query(low, some.compressed)
            visible = memory.visible(some.segments_BT, some.positions_BT)
        to.alignments.append(alignment_loss(q_BTHD, memory.latents_BMD, scores, visible))


class WindowAppend(Protocol):
    """Puts a layer's new window keys [B, T, D] behind its history: [B, W+T, D]."""

    def __call__(self, keys_BTD: Tensor, /) -> Tensor: ...


class Network(nn.Module):
    """Embedding, layers, final norm. The head is `head_Vd`, kept apart so that losses may chunk it."""

    compressed_V: Tensor
    """Compressed id of every token, where there is Engram; -1 for tokens that no n-gram may contain. Starts
    as id modulo `compressed_vocab`; set it from `model.engram.compress_tokens` before training."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.auxiliary: Auxiliary | None = None
        """Set by `model.auxiliary.collect`."""
        self.embedding = nn.Embedding(config.vocab, config.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        if config.engram is not None:
            self.register_buffer("compressed_V", torch.arange(config.vocab) % config.engram.compressed_vocab)
        if not config.tie_embeddings:
            self.output = nn.Parameter(torch.randn(config.vocab, config.width) * 0.02)

    @property
    def head_Vd(self) -> Tensor:
        """Logits are hidden @ head.T."""
        return self.embedding.weight if self.config.tie_embeddings else self.output

    def forward(
        self,
        tokens_BT: Tensor,
        segments_BT: Tensor,
        positions_BT: Tensor,
        starts_BT: Tensor,
        decoder_columns_BU: Tensor | None = None,
        state: State | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Final normalised hidden states, and the columns that they belong to.

        Args:
            tokens_BT, segments_BT, positions_BT, starts_BT: as in `model.batch.Batch`.
            decoder_columns_BU: columns that the decoder runs on, -1 = none; None is all.
            state: a cache. Each row is then one sequence (segment 1), whose new tokens come left-justified.

        Returns:
            [B, U, d] and `decoder_columns_BU`, or [B, T, d] and None.
        """
        middle = self.config.encoder_layers
        rows = self._rows(segments_BT, positions_BT, torch.zeros_like(starts_BT), state, 0)
        x, pre = spread(self.embedding(tokens_BT), self.config.streams)
        compressed_BX = self._compressed(tokens_BT, state)
        memory: Memory | None = None
        selection: Selection | None = None
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            if layer.engram is not None:
                assert compressed_BX is not None
                assert self.config.engram is not None
                pad = self.compressed_V[self.config.engram.pad_token]
                x = layer.engram(x, compressed_BX, positions_BT, pad)
            if layer.source is not None:
                normed = layer.attention_norm(collapse(x, pre))
                if state is None:
                    memory = layer.source.of_rows(normed, segments_BT, positions_BT)
                else:
                    memory = state.memory(index, layer.source, normed)
            if index == middle:
                if self.auxiliary is not None:
                    self.auxiliary.encoded_BTd = collapse(x, pre)
                x, pre, rows = self._enter_decoder(
                    x, pre, segments_BT, positions_BT, starts_BT, decoder_columns_BU, state, index
                )
            x, pre, selection = layer(x, pre, rows, self._appender(state, index), memory, selection)
        return self.norm(collapse(x, pre)), decoder_columns_BU

    def _compressed(self, tokens_BT: Tensor, state: State | None) -> Tensor | None:
        """Compressed ids of the history that n-grams reach into, and of the new tokens."""
        engram = self.config.engram
        if engram is None:
            return None
        reach = engram.max_ngram - 1
        before = (
            tokens_BT.new_zeros(len(tokens_BT), reach) if state is None else state.history(tokens_BT, reach)
        )
        return self.compressed_V[torch.cat((before, tokens_BT), 1)]

    def _enter_decoder(
        self,
        x: Tensor,
        pre_BTn: Tensor | None,
        segments_BT: Tensor,
        positions_BT: Tensor,
        starts_BT: Tensor,
        columns_BU: Tensor | None,
        state: State | None,
        layer: int,
    ) -> tuple[Tensor, Tensor | None, Rows]:
        """Keep the columns that the decoder runs on."""
        if columns_BU is not None:
            index, valid = columns_BU.clamp_min(0), columns_BU >= 0
            segments_BT = torch.where(valid, segments_BT.gather(1, index), 0)
            positions_BT, starts_BT = positions_BT.gather(1, index), starts_BT.gather(1, index)
            x = _columns(x, index)
            pre_BTn = None if pre_BTn is None else _columns(pre_BTn, index)
        return x, pre_BTn, self._rows(segments_BT, positions_BT, starts_BT, state, layer)

    def _rows(
        self,
        segments_BT: Tensor,
        positions_BT: Tensor,
        floors_BT: Tensor,
        state: State | None,
        layer: int,
    ) -> Rows:
        c = self.config
        history = None if state is None else state.window_positions(layer)
        return Rows(
            segments_BT,
            positions_BT,
            band(segments_BT, positions_BT, floors_BT, c.window, history),
            rotation(positions_BT, c.rope_dim, c.rope_theta),
            rotation(positions_BT, c.rope_dim, c.compress_rope_theta, c.yarn),
            rotation(positions_BT, c.index_rope_dim, c.compress_rope_theta, c.yarn),
            (segments_BT > 0).flatten().float(),
            self.auxiliary,
        )

    def _appender(self, state: State | None, layer: int) -> WindowAppend:
        if state is not None:
            return lambda keys: state.window(layer, keys)
        window = self.config.window
        return lambda keys: nn.functional.pad(keys, (0, 0, window, 0))


def _columns(x_BTx: Tensor, index_BU: Tensor) -> Tensor:
    """Some columns of [B, T, ...]: [B, U, ...]."""
    flat = x_BTx.flatten(2)
    return flat.gather(1, index_BU.unsqueeze(-1).expand(-1, -1, flat.shape[2])).unflatten(2, x_BTx.shape[2:])
