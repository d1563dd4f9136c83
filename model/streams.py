"""Manifold-constrained hyper-connections, single pass: several residual streams instead of one.

A site (attention or experts of a layer) reads from the streams X the coefficients

    f = rms_norm(flatten(X)) fn^T, cut into pre | post | comb;
    pre = sigmoid(f s0 + b) + eps,  post = 2 sigmoid(f s1 + b),  comb = sinkhorn(f s2 + b),

and turns the streams into out_k = post_k y + sum_j comb[j, k] X_j. Its own input is what the *previous*
site's pre collapses X to, so that one pass over the streams serves collapse, update and coefficients (report,
2.4.1). Mixing rows and columns sum to 1, hence streams neither vanish nor explode over many layers.

Axes: B rows, T tokens, n streams, d width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import NetworkConfig
from model.layers import precise


@dataclass(frozen=True)
class Mix:
    """Coefficients of one site, float32."""

    pre_BTn: Tensor
    """How the *next* site collapses the streams."""
    post_BTn: Tensor
    """How much of the site's output each stream takes."""
    comb_BTnn: Tensor
    """Mixing of the streams, from row to column."""


def sinkhorn(logits_nn: Tensor, steps: int, eps: float) -> Tensor:
    """Nearly doubly stochastic matrices [..., n, n] from any logits.

    Softmax of rows plus eps, a column step, then `steps - 1` times rows and columns. It ends on columns:
    these sum to 1 within 1e-5, rows only as far as it converged.
    """
    mix = logits_nn.softmax(-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(steps - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix


class StreamSite(nn.Module):
    """The coefficients' parameters of one site.

    They start near the plain residual: every stream collapses with 1/4 and takes the output once, mixing is
    the identity but for 2 %, and gates (`scale`) are small.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        n = config.streams
        self.streams, self.steps = n, config.sinkhorn_steps
        self.eps, self.norm_eps = config.stream_eps, config.norm_eps
        self.fn = nn.Parameter(torch.randn(n * (n + 2), n * config.width) * 1e-4)
        self.scale = nn.Parameter(torch.full((3,), 0.01))
        self.base = nn.Parameter(
            torch.cat(
                (torch.full((n,), -math.log(3.0)), torch.zeros(n), 5.0 * (torch.eye(n) - 1.0).flatten())
            )
        )

    def forward(self, x_BTnd: Tensor) -> Mix:
        """Coefficients from the streams before the site changes them."""
        n = self.streams
        with torch.autocast(x_BTnd.device.type, enabled=False):
            flat = precise(x_BTnd.flatten(-2))
            flat = F.rms_norm(flat, flat.shape[-1:], None, self.norm_eps)
            scale, base = precise(self.scale), precise(self.base)
            pre, post, comb = F.linear(flat, precise(self.fn)).split([n, n, n * n], dim=-1)
            return Mix(
                torch.sigmoid(pre * scale[0] + base[:n]) + self.eps,
                2.0 * torch.sigmoid(post * scale[1] + base[n : 2 * n]),
                sinkhorn((comb * scale[2] + base[2 * n :]).unflatten(-1, (n, n)), self.steps, self.eps),
            )


def spread(x_BTd: Tensor, streams: int) -> tuple[Tensor, Tensor | None]:
    """Embeddings as the first streams, and how the first site collapses them; as they are for one stream."""
    if streams == 1:
        return x_BTd, None
    first = torch.zeros(*x_BTd.shape[:-1], streams, dtype=precise(x_BTd).dtype, device=x_BTd.device)
    first[..., 0] = 1.0
    return x_BTd.unsqueeze(-2).expand(*first.shape, -1), first


def collapse(x: Tensor, pre_BTn: Tensor | None) -> Tensor:
    """The input [B, T, d] of a site or of the final norm; a single stream is its own."""
    if pre_BTn is None:
        return x
    return (precise(x) * pre_BTn.unsqueeze(-1)).sum(-2).to(x.dtype)


def update(site: StreamSite | None, x: Tensor, y_BTd: Tensor) -> tuple[Tensor, Tensor | None]:
    """Streams after a site whose output is y, and its pre. Without a site: the plain residual."""
    if site is None:
        return x + y_BTd, None
    mix = site(x)
    kept = mix.comb_BTnn.mT @ precise(x)
    taken = mix.post_BTn.unsqueeze(-1) * precise(y_BTd).unsqueeze(-2)
    return (kept + taken).to(x.dtype), mix.pre_BTn
