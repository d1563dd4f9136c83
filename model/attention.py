"""Attention of every layer: one softmax over a sliding window, selected latents and a sink.

Key and value are one vector a token, shared by all heads; it carries rotary positions in its last channels,
so that the output is rotated back by the query's position. Queries are low rank, the output projection is
grouped. Windows are computed in blocks of queries against a band of keys, never T x T.

Axes: B rows, T queries, N blocks, Q queries of a block, S keys, H heads, D channels of a head, M latents,
W window, d width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.banded import attend_banded
from model.config import NetworkConfig
from model.indexer import Selection
from model.layers import RMSNorm, linear, precise
from model.quantize import fp8_ue8m0
from model.rope import rotate_tail

QUERY_BLOCK = 64


@dataclass(frozen=True)
class Band:
    """Which window keys each block of queries sees. Keys are `history` columns followed by the T new ones."""

    block: int
    window: int
    mask_BNQS: Tensor
    """bool; S = window + block."""

    @property
    def blocks(self) -> int:
        """N."""
        return self.mask_BNQS.shape[1]

    def queries(self, x_BTx: Tensor, fill: bool | float = 0) -> Tensor:
        """[B, T, ...] padded and cut into blocks: [B, N, Q, ...]."""
        missing = self.blocks * self.block - x_BTx.shape[1]
        if missing:
            x_BTx = F.pad(x_BTx, (0, 0) * (x_BTx.dim() - 2) + (0, missing), value=fill)
        return x_BTx.unflatten(1, (self.blocks, self.block))

    def padded(self, keys_BSD: Tensor) -> Tensor:
        """History and new keys [B, W+T, D], filled up to whole blocks."""
        missing = self.window + self.blocks * self.block - keys_BSD.shape[1]
        return F.pad(keys_BSD, (0, 0, 0, missing)) if missing else keys_BSD

    def keys(self, keys_BSD: Tensor) -> Tensor:
        """The same cut into overlapping spans [B, N, W+Q, D]."""
        return self.padded(keys_BSD).unfold(1, self.window + self.block, self.block).mT


def band(
    segments_BT: Tensor,
    positions_BT: Tensor,
    floors_BT: Tensor,
    window: int,
    history_positions_BW: Tensor | None = None,
) -> Band:
    """The sliding windows of packed rows.

    Query at position p of segment s sees keys of s at positions max(floor, p-W+1) .. p.

    Args:
        segments_BT, positions_BT: of queries, which are also the new keys; segment 0 sees nothing.
        floors_BT: first position that may be seen: 0, or the start of the decoder's bounded replay.
        window: W.
        history_positions_BW: positions of cached keys of segment 1 that stand before the new ones; negative
            where there is none. No history by default.
    """
    B, T = segments_BT.shape
    block = min(QUERY_BLOCK, T)
    shape = Band(block, window, torch.empty(B, -(-T // block), 0, 0))
    if history_positions_BW is None:
        history_positions_BW = positions_BT.new_full((B, window), -1)
    history_segments_BW = (history_positions_BW >= 0).to(segments_BT.dtype)
    key_segments = shape.keys(torch.cat((history_segments_BW, segments_BT), 1).unsqueeze(-1)).mT
    key_positions = shape.keys(torch.cat((history_positions_BW, positions_BT), 1).unsqueeze(-1)).mT
    segments, positions, floors = (
        shape.queries(x.unsqueeze(-1)) for x in (segments_BT, positions_BT, floors_BT)
    )
    mask = (key_segments == segments) & (segments > 0)
    mask &= (key_positions <= positions) & (key_positions > positions - window) & (key_positions >= floors)
    return Band(block, window, mask)


def attend(q_BQHD: Tensor, keys_BSD: Tensor, mask_BQS: Tensor, sink_H: Tensor) -> Tensor:
    """softmax of q.k / sqrt(D), with exp(sink) in the denominator, times the same keys: [B, Q, H, D].

    The sink is one more key: queries get a channel that holds it, of which the key has 1 and the others 0. So
    any fused attention serves, forward and backward, and a query that sees nothing gives 0.
    """
    B, Q, H, D = q_BQHD.shape
    missing_channels, missing_keys = 7 - D % 8 + 1, 7 - keys_BSD.shape[1] % 8 + 1
    scale = D**-0.5
    sink = (sink_H / scale).to(q_BQHD.dtype).view(1, 1, H, 1).expand(B, Q, H, 1)
    q = F.pad(torch.cat((q_BQHD, sink), -1), (0, missing_channels - 1))
    keys = F.pad(keys_BSD.to(q.dtype), (0, missing_channels, 0, missing_keys))
    is_sink = torch.zeros(missing_keys, missing_channels + D, dtype=q.dtype, device=q.device)
    is_sink[0, D] = 1
    keys = torch.cat((keys[:, : keys_BSD.shape[1]], is_sink.expand(B, -1, -1)), 1)
    mask = F.pad(F.pad(mask_BQS, (0, 1), value=True), (0, missing_keys - 1)).unsqueeze(1)
    shared = keys.unsqueeze(1).expand(B, H, -1, -1)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), shared, shared, mask, scale=scale)
    return out[..., :D].transpose(1, 2)


def attend_one(
    q_B1HD: Tensor, keys_BSD: Tensor, mask_B1S: Tensor, selection: Selection | None, sink_H: Tensor
) -> Tensor:
    """`attend` of one query a row over window and selection, without joining the keys: [B, 1, H, D]."""
    q = q_B1HD.squeeze(1) * q_B1HD.shape[-1] ** -0.5
    S = keys_BSD.shape[1]
    scores, mask = q @ keys_BSD.mT, mask_B1S
    if selection is not None:
        latents = selection.latents_BMD.to(q.dtype)
        scores = torch.cat((scores, q @ latents.mT), -1)
        mask = torch.cat((mask, selection.mask_BTM), -1)
    scores = precise(scores).masked_fill_(~mask, -torch.inf)
    joined = torch.cat((scores, precise(sink_H).view(1, -1, 1).expand(len(q), -1, 1)), -1)
    weights = joined.softmax(-1).to(q.dtype)
    out = weights[..., :S] @ keys_BSD
    if selection is not None:
        out = out + weights[..., S:-1] @ latents
    return out.unsqueeze(1)


def attend_blocks(
    q_BTHD: Tensor, keys_BSD: Tensor, band: Band, selection: Selection | None, sink_H: Tensor
) -> Tensor:
    """Many queries a row, in blocks over their spans of the window and over the selection: [B, T, H, D].

    CPUs in float32 take `attend_banded`, everything else the fused attention of torch.
    """
    B, T, _, D = q_BTHD.shape
    if selection is None:
        latents = keys_BSD.new_empty(B, 0, D)
        seen = band.mask_BNQS[..., :0]
    else:
        latents = selection.latents_BMD.to(keys_BSD.dtype)
        seen = band.queries(selection.mask_BTM, False)
    if q_BTHD.device.type == "cpu" and q_BTHD.dtype == precise(q_BTHD).dtype == keys_BSD.dtype:
        q_BNHQD = band.queries(q_BTHD * D**-0.5).transpose(2, 3).contiguous()
        out = attend_banded(q_BNHQD, band.padded(keys_BSD), latents, band.mask_BNQS, seen, sink_H)
        return out.transpose(2, 3).flatten(1, 2)[:, :T]
    keys = torch.cat((band.keys(keys_BSD), latents.unsqueeze(1).expand(-1, band.blocks, -1, -1)), 2)
    mask = torch.cat((band.mask_BNQS, seen), 3).flatten(0, 1)
    out = attend(band.queries(q_BTHD).flatten(0, 1), keys.flatten(0, 1), mask, sink_H)
    return out.unflatten(0, (B, -1)).flatten(1, 2)[:, :T]


class Attention(nn.Module):
    """Projections around `attend`."""

    def __init__(self, config: NetworkConfig, *, output_gain: float) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.groups = config.output_groups
        self.matrix_blocks = {"query_up.weight": config.heads}
        self.window_fp8 = config.window_format == "fp8"
        channels = config.heads * config.head_dim
        self.query_down = linear(config.width, config.query_rank)
        self.query_norm = RMSNorm(config.query_rank, config.norm_eps)
        self.query_up = linear(config.query_rank, channels)
        self.kv = linear(config.width, config.head_dim)
        self.kv_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.sink = nn.Parameter(torch.zeros(config.heads))
        per_group = channels // config.output_groups
        self.output_down = nn.Parameter(torch.empty(config.output_groups, config.output_rank, per_group))
        nn.init.normal_(self.output_down, std=per_group**-0.5)
        self.output_up = linear(config.output_groups * config.output_rank, config.width, gain=output_gain)

    def low_rank(self, x_BTd: Tensor) -> Tensor:
        """The query before it is spread over heads, which the indexer reads too."""
        return self.query_norm(self.query_down(x_BTd))

    def query(self, low_BTr: Tensor, rotation: Tensor) -> Tensor:
        """Rotated queries [B, T, H, D] from `low_rank`."""
        q_BTHD = self.query_up(low_BTr).unflatten(-1, (self.heads, self.head_dim))
        return rotate_tail(q_BTHD, rotation.unsqueeze(2))

    def window_keys(self, x_BTd: Tensor, rotation: Tensor) -> Tensor:
        """Keys (and values) of the window as its cache holds them: [B, T, D]."""
        keys = rotate_tail(self.kv_norm(self.kv(x_BTd)), rotation)
        return fp8_ue8m0(keys) if self.window_fp8 else keys

    def forward(
        self,
        low_BTr: Tensor,
        rotation: Tensor,
        keys_BSD: Tensor,
        band: Band,
        selection: Selection | None,
    ) -> Tensor:
        """[B, T, d].

        Args:
            low_BTr: from `low_rank`.
            rotation: of the queries' positions.
            keys_BSD: window keys, W of history first.
            band: which of them each query sees.
            selection: latents of the memory, if the layer reads one.
        """
        B, T, _ = low_BTr.shape
        q_BTHD = self.query(low_BTr, rotation)
        if T == 1 and not torch.is_grad_enabled():
            out_BTHD = attend_one(q_BTHD, keys_BSD, band.mask_BNQS.squeeze(1), selection, self.sink)
        else:
            out_BTHD = attend_blocks(q_BTHD, keys_BSD, band, selection, self.sink)
        out_BTHD = rotate_tail(out_BTHD, rotation.unsqueeze(2), inverse=True)
        grouped = out_BTHD.reshape(B * T, self.groups, -1).transpose(0, 1)
        low = torch.bmm(grouped, self.output_down.to(grouped.dtype).mT)
        return self.output_up(low.transpose(0, 1).reshape(B, T, -1))
