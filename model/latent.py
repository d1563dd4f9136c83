"""The shared latent global memory: a latent for every 1 or 2 tokens, made once, read by many layers.

Axes: B rows, T columns, M groups, D channels of a latent (key and value in one), K index channels.
Group g of a sequence holds tokens g*r .. g*r+r-1 and is visible to position p iff g < (p+1)//r.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model.config import NetworkConfig
from model.layers import RMSNorm, linear, precise


@dataclass(frozen=True)
class Memory:
    """What the layers of one key-value source read."""

    ratio: int
    stored_SMD: Tensor
    """Latents, rotated to each group's first position and quantized; M may exceed the groups that exist."""
    rows_B: Tensor | None
    """Row of `stored_SMD` that each batch row reads; None means in order."""
    index_keys_BMK: Tensor
    segments_BM: Tensor
    """Segment of the group; 0 is none."""
    groups_BM: Tensor
    """Number of the group within its segment."""

    @property
    def latents_BMD(self) -> Tensor:
        """All latents of every row."""
        stored = self.stored_SMD[:, : self.groups_BM.shape[1]]
        return stored if self.rows_B is None else stored[self.rows_B]

    def take(self, groups_Bk: Tensor) -> Tensor:
        """Some latents of every row, [B, k, D]."""
        rows = torch.arange(len(groups_Bk), device=groups_Bk.device) if self.rows_B is None else self.rows_B
        return self.stored_SMD[rows.unsqueeze(1), groups_Bk]

    def visible(self, segments_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """Which groups each token may read: [B, T, M] bool."""
        same = segments_BT.unsqueeze(2) == self.segments_BM.unsqueeze(1)
        complete = self.groups_BM.unsqueeze(1) < ((positions_BT + 1) // self.ratio).unsqueeze(2)
        return same & complete & (segments_BT > 0).unsqueeze(2)


class Compressor(nn.Module):
    """Tokens to latents: at ratio 2 a channelwise softmax over the pair's gates mixes both."""

    def __init__(self, config: NetworkConfig, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.project_kv = linear(config.width, config.head_dim)
        self.project_gate = linear(config.width, config.head_dim) if ratio > 1 else None
        self.norm = RMSNorm(config.head_dim, config.norm_eps)

    @property
    def raw_channels(self) -> int:
        """Channels of `raw`: what a cache keeps of a token whose group is incomplete."""
        return self.norm.weight.shape[0] * (1 if self.project_gate is None else 2)

    def raw(self, x_BTd: Tensor) -> Tensor:
        """Per-token projections [B, T, D] or, with gates behind, [B, T, 2D]; float32."""
        kv = precise(self.project_kv(x_BTd))
        return kv if self.project_gate is None else torch.cat((kv, precise(self.project_gate(x_BTd))), -1)

    def pool(self, raw_BTC: Tensor) -> Tensor:
        """Latents [B, T//ratio, D] of whole groups, normalised, not yet rotated."""
        if self.project_gate is None:
            return self.norm(raw_BTC)
        kv_BM2D, gate_BM2D = raw_BTC.unflatten(1, (-1, self.ratio)).chunk(2, dim=-1)
        return self.norm((gate_BM2D.softmax(dim=2) * kv_BM2D).sum(2))
