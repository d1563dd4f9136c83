"""Lightning indexer: which latents of the memory a query reads.

score(t, g) = sum_h w_h(t) * (heads * channels)^-0.5 * relu(q_h(t) . k(g)); the top-k visible groups are read.
Queries and keys are MXFP4. Products of such numbers are exact in float32 and heads are summed one after the
other, so that equal keys score equally on every path; ties go to the newer group.

Axes: B rows, T queries, M groups, H index heads, K index channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model.config import NetworkConfig
from model.latent import Memory
from model.layers import RMSNorm, linear, precise
from model.quantize import mxfp4
from model.rope import rotate_tail

_INDEX_BITS = 24


@dataclass(frozen=True)
class Selection:
    """The latents that a layer's queries read, and which query reads which."""

    latents_BMD: Tensor
    mask_BTM: Tensor


class IndexKey(nn.Module):
    """Keys of the memory, made beside it by its source layer."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.project = linear(config.head_dim, config.index_dim)
        self.norm = RMSNorm(config.index_dim, config.norm_eps)
        self.quantized = config.index_format == "mxfp4"

    def forward(self, latents_BMD: Tensor, rotation: Tensor) -> Tensor:
        """[B, M, K] from latents that are not rotated yet."""
        keys = rotate_tail(precise(self.norm(self.project(latents_BMD))), rotation)
        return mxfp4(keys) if self.quantized else keys


class Indexer(nn.Module):
    """Queries and head weights of an index source layer (Full or Reindex)."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.heads, self.channels, self.topk = config.index_heads, config.index_dim, config.index_topk
        self.matrix_blocks = {"query_up.weight": config.index_heads}
        self.quantized = config.index_format == "mxfp4"
        self.query_up = linear(config.query_rank, self.heads * self.channels)
        self.weight = linear(config.width, self.heads)

    def scores(self, x_BTd: Tensor, low_BTr: Tensor, rotation: Tensor, memory: Memory) -> Tensor:
        """[B, T, M] float32, visible or not.

        Args:
            x_BTd: the layer's normalised input.
            low_BTr: its low-rank query.
            rotation: of the queries' positions.
            memory: with rotated, quantized keys.
        """
        query = precise(self.query_up(low_BTr)).unflatten(-1, (self.heads, self.channels))
        query_BTHK = rotate_tail(query, rotation.unsqueeze(2))
        if self.quantized:
            query_BTHK = mxfp4(query_BTHK)
        weight_BTH = precise(self.weight(x_BTd)) * (self.heads * self.channels) ** -0.5
        with torch.autocast(x_BTd.device.type, enabled=False):
            rows = query_BTHK.flatten(1, 2)
            dots_BTHM = (rows @ memory.index_keys_BMK.to(rows.dtype).mT).unflatten(1, (-1, self.heads))
        return (dots_BTHM.relu() * weight_BTH.unsqueeze(-1)).sum(2).float()


def select(scores_BTM: Tensor, visible_BTM: Tensor, memory: Memory, topk: int) -> Selection:
    """Keep each query's `topk` best visible groups.

    One query a row (decoding) gathers them; several share the whole memory under a mask.
    """
    if scores_BTM.shape[2] <= topk:
        return Selection(memory.latents_BMD, visible_BTM)
    chosen_BTk = top_groups(scores_BTM, visible_BTM, topk)
    if scores_BTM.shape[1] == 1:
        return Selection(memory.take(chosen_BTk.squeeze(1)), visible_BTM.gather(2, chosen_BTk))
    chosen_BTM = torch.zeros_like(visible_BTM).scatter_(2, chosen_BTk, True)
    return Selection(memory.latents_BMD, chosen_BTM & visible_BTM)


def top_groups(scores_BTM: Tensor, visible_BTM: Tensor, topk: int) -> Tensor:
    """Indices [B, T, topk] of the best groups, invisible ones last, ties to the higher index."""
    bits = (scores_BTM + 0.0).view(torch.int32)  # + 0.0 turns -0 into 0
    ordered = (bits ^ ((bits >> 31) & 0x7FFF_FFFF)).long()
    ordered = torch.where(visible_BTM, ordered, -(1 << 33))
    index = torch.arange(scores_BTM.shape[2], device=scores_BTM.device)
    return ((ordered << _INDEX_BITS) + index).topk(topk, dim=-1, sorted=False).indices
