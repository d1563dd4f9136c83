"""Rotary position embedding on interleaved pairs (even, odd) of the last channels of a head.

Axes: R rotating channels. Angles are float32 whatever the network's type.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model.config import YarnConfig
from model.layers import precise


def rotation(positions: Tensor, channels: int, theta: float, yarn: YarnConfig | None = None) -> Tensor:
    """Unit complex numbers [..., R/2] at angles `position * theta^(-2i/R)`, i in 0..R/2-1, slowed by YaRN."""
    exponents = torch.arange(0, channels, 2, device=positions.device, dtype=torch.float32) / channels
    speeds = theta**-exponents
    if yarn is not None:
        speeds = speeds * _slowing(channels, theta, yarn).to(positions.device)
    angles = positions.unsqueeze(-1).float() * speeds
    return torch.polar(torch.ones_like(angles), angles)


def _slowing(channels: int, theta: float, yarn: YarnConfig) -> Tensor:
    """Factor [R/2] of each pair's speed: 1 for fast pairs, 1/factor for slow ones, linear between."""

    def pair_that_turns(times: float) -> float:
        return channels * math.log(yarn.original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(yarn.beta_slow)), channels - 1)
    pairs = torch.arange(channels // 2, dtype=torch.float32)
    slow = ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)
    return slow / yarn.factor + (1 - slow)


def rotate_tail(x: Tensor, by: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last R channels of `x`, leave the others.

    Args:
        x: [..., C] with C >= R.
        by: from `rotation`, to broadcast over the leading axes of `x`.
        inverse: rotate back, as the attention output is (keys are values here, so they come rotated).
    """
    half = by.shape[-1]
    kept, tail = x.split([x.shape[-1] - 2 * half, 2 * half], dim=-1)
    pairs = torch.view_as_complex(precise(tail).unflatten(-1, (half, 2)).contiguous())
    turned = torch.view_as_real(pairs * (by.conj() if inverse else by)).flatten(-2)
    return torch.cat((kept, turned.to(x.dtype)), dim=-1)
