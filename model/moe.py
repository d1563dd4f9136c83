"""Mixture of experts: square-root-softplus routing with a balancing bias, clamped SwiGLU, a shared expert.

For experts this small one dense product over all of them is faster than sorting tokens: the routing weight,
0 where an expert was not picked, multiplies the hidden channels before the down projection, as it does in the
release. Axes: n tokens, E experts, F channels of an expert, d width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.auxiliary import Auxiliary, balance_loss
from model.config import NetworkConfig
from model.layers import linear, precise


class MoE(nn.Module):
    """Feed-forward part of every layer."""

    bias_E: Tensor
    load_E: Tensor

    def __init__(self, config: NetworkConfig, *, output_gain: float) -> None:
        super().__init__()
        E, width, d = config.experts, config.expert_width, config.width
        self.picks, self.scaling, self.limit = (
            config.experts_per_token,
            config.routed_scaling,
            config.swiglu_limit,
        )
        self.router = linear(d, E)
        self.gate = nn.Parameter(torch.randn(E, width, d) * d**-0.5)
        self.up = nn.Parameter(torch.randn(E, width, d) * d**-0.5)
        self.down = nn.Parameter(torch.randn(E, width, d) * width**-0.5 * output_gain)
        self.shared_gate = linear(d, config.shared_width)
        self.shared_up = linear(d, config.shared_width)
        self.shared_down = linear(config.shared_width, d, gain=output_gain)
        self.register_buffer("bias_E", torch.zeros(E))
        self.register_buffer("load_E", torch.zeros(E), persistent=False)

    def route(self, x_nd: Tensor) -> tuple[Tensor, Tensor]:
        """Routing weights [n, E], 0 where not picked, and affinities [n, E]; float32.

        Picks are the largest affinity plus bias; weights are affinities alone, normalised to `scaling`.
        """
        affinity_nE = F.softplus(F.linear(precise(x_nd), precise(self.router.weight))).sqrt()
        picked_nk = (affinity_nE + self.bias_E).topk(self.picks, dim=-1).indices
        picked_nE = torch.zeros_like(affinity_nE).scatter_(1, picked_nk, 1.0)
        kept_nE = affinity_nE * picked_nE
        return kept_nE * (self.scaling / (kept_nE.sum(-1, keepdim=True) + 1e-20)), affinity_nE

    def forward(
        self, x_nd: Tensor, valid_n: Tensor, auxiliary: Auxiliary | None = None, rows: int = 1
    ) -> Tensor:
        """[n, d].

        Args:
            x_nd: normalised tokens.
            valid_n: 1 where a token counts for balancing, 0 at padding.
            auxiliary: where to report the balance loss.
            rows: rows that the n tokens come from, for that loss.
        """
        with torch.autocast(x_nd.device.type, enabled=False):
            weight_nE, affinity_nE = self.route(x_nd)
            if auxiliary is not None:
                auxiliary.balances.append(balance_loss(affinity_nE, weight_nE.detach(), valid_n, rows))
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.load_E += (valid_n.unsqueeze(1) * (weight_nE > 0)).sum(0)
        gate = torch.cat((self.gate.flatten(0, 1), self.shared_gate.weight))
        up = torch.cat((self.up.flatten(0, 1), self.shared_up.weight))
        hidden = F.silu(F.linear(x_nd, gate).clamp_max(self.limit))
        hidden = hidden * F.linear(x_nd, up).clamp(-self.limit, self.limit)
        E, width = self.gate.shape[:2]
        routed, shared = hidden.split([E * width, hidden.shape[1] - E * width], dim=-1)
        routed = (routed.unflatten(-1, (E, width)) * weight_nE.to(routed.dtype).unsqueeze(-1)).flatten(-2)
        return routed @ self.down.flatten(0, 1).to(routed.dtype) + self.shared_down(shared)

    @torch.no_grad()
    def update_bias(self, speed: float = 0.001) -> None:
        """After an optimizer step: raise the bias of underloaded experts, lower the others', forget loads."""
        self.bias_E += speed * torch.sign(self.load_E.mean() - self.load_E)
        self.load_E.zero_()
