"""Rotary position embedding on interleaved pairs (even, odd) of the last channels of a head.

Axes: R rotating channels. Angles are float32 whatever the network's type.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.layers import precise


def rotation(positions: Tensor, channels: int, theta: float) -> Tensor:
    """Unit complex numbers [..., R/2] at angles `position * theta^(-2i/R)`, i in 0..R/2-1."""
    exponents = torch.arange(0, channels, 2, device=positions.device, dtype=torch.float32) / channels
    angles = positions.unsqueeze(-1).float() * theta**-exponents
    return torch.polar(torch.ones_like(angles), angles)


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
