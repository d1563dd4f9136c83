"""Losses beside the main one, computed inside the layers while they are asked for.

    with collect(policy.module) as found:
        hidden = policy.hidden(batch)
    loss = ... + 1e-4 * found.balance() + found.indexer()

- Balance (DeepSeek-V3, sequence-wise, here over each packed row): experts E, picks k, f_i = E/k * share of
  tokens that picked i, P_i = mean normalised affinity; the loss is sum_i f_i P_i, 1 when even.
- Indexer: KL from the attention over all visible latents, averaged over heads, to the softmax of the index
  scores. Selection passes no gradient, so this is how an indexer learns; it reaches only indexer weights.
  Computed for every `stride`-th query.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Auxiliary:
    """What the layers of one forward pass report."""

    stride: int
    balances: list[Tensor] = field(default_factory=list)
    alignments: list[Tensor] = field(default_factory=list)
    encoded_BTd: Tensor | None = None
    """The encoder's output, of which the decoder's memory is made."""

    def balance(self) -> Tensor:
        """Mean over layers; scalar."""
        return torch.stack(self.balances).mean()

    def indexer(self) -> Tensor:
        """Mean over index sources, of the mean over queries in nats; scalar."""
        return torch.stack(self.alignments).mean()


@contextmanager
def collect(module: nn.Module, *, stride: int = 8) -> Iterator[Auxiliary]:
    """Have the flash network `module` report auxiliary losses of the forward passes inside."""
    found = Auxiliary(stride)
    target: Any = module
    target.auxiliary = found
    try:
        yield found
    finally:
        target.auxiliary = None


def balance_loss(affinity_nE: Tensor, weight_nE: Tensor, valid_n: Tensor, rows: int) -> Tensor:
    """Mean over rows of sum_i f_i P_i; `n` is rows times columns."""
    valid = valid_n.view(rows, -1, 1)
    count = valid.sum(1).clamp_min(1)
    picked = (weight_nE > 0).float().view(rows, -1, weight_nE.shape[1])
    share = affinity_nE / affinity_nE.sum(-1, keepdim=True)
    f = (picked * valid).sum(1) / count
    f = f * (weight_nE.shape[1] / f.sum(-1, keepdim=True).clamp_min(1e-9))
    P = (share.view_as(picked) * valid).sum(1) / count
    return (f * P).sum(-1).mean()


def alignment_loss(q_BTHD: Tensor, latents_BMD: Tensor, scores_BTM: Tensor, visible_BTM: Tensor) -> Tensor:
    """Mean KL(attention || index) over queries that see two latents or more; gradient to scores only."""
    with torch.no_grad():
        rows = q_BTHD.float().flatten(1, 2)
        dots = (rows @ latents_BMD.float().mT).unflatten(1, q_BTHD.shape[1:3]) * q_BTHD.shape[-1] ** -0.5
        target = dots.masked_fill_(~visible_BTM.unsqueeze(2), -1e30).softmax(-1).mean(2)
        counts = (visible_BTM.sum(-1) > 1).float()
        target = target * visible_BTM
    log_index = scores_BTM.masked_fill(~visible_BTM, -1e30).log_softmax(-1).masked_fill(~visible_BTM, 0)
    divergence = (torch.xlogy(target, target) - target * log_index).sum(-1)
    return (divergence * counts).sum() / counts.sum().clamp_min(1)
