"""Quantizers against an exhaustive nearest-value search in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from model.quantize import fp4_e4m3, fp8_ue8m0, mxfp4

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [m / 8 * 2.0**-6 for m in range(8)] + [
    (1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8) if not (e == 8 and m == 7)
]


def nearest(value: float, grid: list[float]) -> float:
    """The nearest grid value, ties to the even index (the even mantissa), sign kept; saturating."""
    size = min(abs(value), grid[-1])
    best = min(range(len(grid)), key=lambda i: (abs(grid[i] - size), i % 2))
    return math.copysign(grid[best], value)


def slow(x: np.ndarray, group: int, scale_of, grid: list[float]) -> np.ndarray:
    out = np.empty_like(x)
    for at in range(0, x.size, group):
        part = x.flat[at : at + group]
        scale = scale_of(float(np.abs(part).max()))
        out.flat[at : at + group] = [nearest(float(np.float32(v / scale)), grid) * scale for v in part]
    return out


def inputs() -> torch.Tensor:
    """Gaussians over 16 binades, zeros, saturating scales, and every e2m1 tie."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 32, generator=generator) * 2.0 ** torch.randint(-14, 8, (96, 1), generator=generator)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    rows = [torch.cat((ties, -ties, ties, -ties)), torch.zeros(32), torch.full((32,), 5000.0)]
    return torch.cat((x, torch.stack(rows)))


@pytest.mark.parametrize(
    ("fast", "group", "scale_of", "grid"),
    [
        (fp4_e4m3, 16, lambda a: nearest(float(np.float32(max(a, 6 * 2.0**-9) / 6)), E4M3), E2M1),
        (mxfp4, 32, lambda a: 2.0 ** math.ceil(math.log2(np.float32(max(a, 6 * 2.0**-126) / 6))), E2M1),
        (fp8_ue8m0, 32, lambda a: 2.0 ** math.ceil(math.log2(np.float32(max(a, 1e-4) / 448))), E4M3),
    ],
)
def test_every_value_is_the_nearest(fast, group, scale_of, grid):
    x = inputs()
    want = slow(x.double().numpy(), group, scale_of, grid)
    assert torch.equal(fast(x).double(), torch.from_numpy(want))


def test_error_of_gaussians_is_that_of_the_formats():
    x = torch.randn(4096, 32, generator=torch.Generator().manual_seed(1))

    def error(q: torch.Tensor) -> float:
        return float((q - x).norm() / x.norm())

    assert error(fp4_e4m3(x)) == pytest.approx(0.0955, abs=0.002)
    assert error(mxfp4(x)) == pytest.approx(0.1154, abs=0.002)


@pytest.mark.parametrize("quantizer", [fp4_e4m3, mxfp4, fp8_ue8m0])
def test_gradient_passes_straight_through_where_values_saturate_too(quantizer):
    x = inputs().requires_grad_()
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    (quantizer(x) * weight).sum().backward()
    assert torch.equal(x.grad, weight)


@pytest.mark.parametrize("quantizer", [fp4_e4m3, fp8_ue8m0])
def test_quantizing_twice_changes_nothing(quantizer):
    # Neither mxfp4, whose scale may halve, nor FP4 where the scale is subnormal.
    x = inputs()
    once = quantizer(x[x.abs().amax(-1) > 1])
    assert torch.equal(quantizer(once), once)


def test_narrow_rows_are_one_group():
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(3))
    assert torch.equal(mxfp4(x), mxfp4(torch.cat((x, torch.zeros(5, 16)), -1))[:, :16])
