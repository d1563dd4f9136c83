"""Quantize-dequantize of the caches, straight through in the backward pass.

Each function returns what the low-precision cache would give back, in the type of its argument. The gradient
is the identity, also where a value saturates, and no gradient reaches the scales (report, section 8).
Rounding is to nearest, ties to even mantissas. Source: spec of the release; e2m1 values 0 .5 1 1.5 2 3 4 6.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

E2M1_MAX = 6.0
E4M3_MAX = 448.0


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantized: Tensor) -> Tensor:
        return quantized

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def fp4_e4m3(x: Tensor, *, group: int = 16) -> Tensor:
    """Main cache: e2m1 with one e4m3 scale for `group` channels.

    s = e4m3(max(amax, 6 * 2^-9) / 6); q = e2m1(clamp(x / s, -6, 6)); the result is q * s.
    """
    with torch.no_grad():
        x_G = x.float().unflatten(-1, (-1, group))
        scale = (x_G.abs().amax(-1, keepdim=True) / E2M1_MAX).clamp(2.0**-9, E4M3_MAX)
        scale = scale.to(torch.float8_e4m3fn).float()
        quantized = (_e2m1(x_G / scale) * scale).flatten(-2).to(x.dtype)
    return _straight_through(x, quantized)


def mxfp4(x: Tensor, *, group: int = 32) -> Tensor:
    """Indexer: e2m1 with one power-of-two scale for `group` channels (for all of them, if fewer).

    s = 2^ceil(log2(max(amax, 6 * 2^-126) / 6)).
    """
    with torch.no_grad():
        x_G = x.float().unflatten(-1, (-1, min(group, x.shape[-1])))
        scale = _power_of_two_above((x_G.abs().amax(-1, keepdim=True) / E2M1_MAX).clamp_min(2.0**-126))
        quantized = (_e2m1(x_G / scale) * scale).flatten(-2).to(x.dtype)
    return _straight_through(x, quantized)


def fp8_ue8m0(x: Tensor, *, group: int = 32) -> Tensor:
    """Window cache: e4m3 with one power-of-two scale for `group` channels (for all of them, if fewer).

    s = 2^ceil(log2(max(amax, 1e-4) / 448)).
    """
    with torch.no_grad():
        x_G = x.float().unflatten(-1, (-1, min(group, x.shape[-1])))
        scale = _power_of_two_above(x_G.abs().amax(-1, keepdim=True).clamp_min(1e-4) / E4M3_MAX)
        quantized = ((x_G / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(x.dtype)
    return _straight_through(x, quantized)


def _straight_through(x: Tensor, quantized: Tensor) -> Tensor:
    if not (x.requires_grad and torch.is_grad_enabled()):
        return quantized
    result = _StraightThrough.apply(x, quantized)
    assert isinstance(result, Tensor)
    return result


def _e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1 value; steps are 0.5 below 2, 1 below 4, 2 up to 6."""
    magnitude = x.abs().clamp_max(E2M1_MAX)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / step) * step, x)


def _power_of_two_above(x: Tensor) -> Tensor:
    """2^ceil(log2 x) of positive normal float32 numbers, exactly: carry any mantissa into the exponent."""
    return ((x.view(torch.int32) + 0x007F_FFFF) & 0x7F80_0000).view(torch.float32)
