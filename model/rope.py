"""Rotary position embedding on interleaved pairs (even, odd) of the last channels of a head.

Axes: R rotating channels. Angles are float32 whatever the network's type.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Cosine and sine of every position, each [..., R/2]."""

    cos: Tensor
    sin: Tensor

    def unsqueeze(self, dim: int) -> Rotation:
        """Room for one more axis, for example heads."""
        return Rotation(self.cos.unsqueeze(dim), self.sin.unsqueeze(dim))


def rotation(positions: Tensor, channels: int, theta: float) -> Rotation:
    """Angles `position * theta^(-2i/R)` for i in 0..R/2-1."""
    exponents = torch.arange(0, channels, 2, device=positions.device, dtype=torch.float32) / channels
    angles = positions.unsqueeze(-1).float() * theta**-exponents
    return Rotation(angles.cos(), angles.sin())


def rotate_tail(x: Tensor, by: Rotation, *, inverse: bool = False) -> Tensor:
    """Rotate the last R channels of `x`, leave the others.

    Args:
        x: [..., C] with C >= R.
        by: angles that broadcast over the leading axes of `x`.
        inverse: rotate back, as the attention output is (keys are values here, so they come rotated).
    """
    half = by.cos.shape[-1]
    kept, tail = x.split([x.shape[-1] - 2 * half, 2 * half], dim=-1)
    even, odd = tail.float().unflatten(-1, (half, 2)).unbind(-1)
    sin = -by.sin if inverse else by.sin
    turned = torch.stack((even * by.cos - odd * sin, even * sin + odd * by.cos), dim=-1).flatten(-2)
    return torch.cat((kept, turned.to(x.dtype)), dim=-1)
