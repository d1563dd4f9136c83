"""Root mean square norm, and linear maps with the initialisation that all parts use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def precise(x: Tensor) -> Tensor:
    """Float32, or float64 if it is that already (tests run whole networks in float64)."""
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, computed in float32."""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and type as `x`."""
        return F.rms_norm(precise(x), self.weight.shape, precise(self.weight), self.eps).to(x.dtype)


def linear(inputs: int, outputs: int, *, gain: float = 1.0) -> nn.Linear:
    """A map without bias, entries N(0, gain^2 / inputs)."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=gain * inputs**-0.5)
    return layer
