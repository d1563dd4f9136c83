"""Each update rule against a slow float64 reference, its statistics, and its state across save and resume."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model.flash import FlashPolicy
from model.optimizers import balance, build_optimizer, newton_schulz, roles, table
from model.train_config import OptimizerConfig

LR, DECAY, MU, GAMMA = 0.02, 0.1, 0.95, 0.18
SINKHORN = OptimizerConfig(lr=LR, weight_decay=DECAY, embeddings="sinkhorn")


def slow_newton_schulz(matrix: Tensor) -> Tensor:
    """The polynomial on the singular values, which is what its products compute."""
    u, singular, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    singular = singular / singular.square().sum().sqrt()
    for step in range(10):
        a, b, c = (3.4445, -4.7750, 2.0315) if step < 8 else (2.0, -1.5, 0.5)
        singular = a * singular + b * singular**3 + c * singular**5
    return u @ torch.diag(singular) @ v


def slow_balance(matrix: Tensor, steps: int = 11, floor: float = 1e-3) -> Tensor:
    """Algorithm 1 as written: the whole matrix is divided row by row, then column by column."""
    x = matrix.double().clone()
    norms = [float(row.square().sum().sqrt()) for row in x]
    mean = sum(norms) / len(norms)
    for row, norm in zip(x, norms, strict=True):
        if norm <= floor * mean:
            row.zero_()
    for step in range(steps):
        for vector in x if step % 2 == 0 else x.T:
            vector /= vector.square().sum().sqrt() + 1e-20
    return x


def slow_muon(weight: Tensor, grads: list[Tensor], blocks: int) -> Tensor:
    momentum = torch.zeros_like(weight)
    for grad in grads:
        momentum = MU * momentum + grad
        parts = (MU * momentum + grad).reshape(blocks, -1, weight.shape[-1])
        updates = [slow_newton_schulz(p) * math.sqrt(max(p.shape)) * GAMMA for p in parts]
        weight = weight * (1 - LR * DECAY) - LR * torch.stack(updates).reshape(weight.shape)
    return weight


def slow_sinkhorn(weight: Tensor, grads: list[Tensor], blocks: int) -> Tensor:
    assert blocks == 1
    momentum = torch.zeros_like(weight)
    for grad in grads:
        momentum = MU * momentum + (1 - MU) * grad
        ahead = MU * momentum + (1 - MU) * grad
        weight = weight - GAMMA * LR * math.sqrt(weight.shape[1]) * slow_balance(ahead)
    return weight


def slow_adamw(weight: Tensor, grads: list[Tensor], blocks: int) -> Tensor:
    assert blocks == 1
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, grad in enumerate(grads, start=1):
        first = 0.9 * first + 0.1 * grad
        second = 0.95 * second + 0.05 * grad**2
        unbiased = (first / (1 - 0.9**step), second / (1 - 0.95**step))
        weight = weight - LR * unbiased[0] / (unbiased[1].sqrt() + 1e-20)
    return weight


class Parts(nn.Module):
    """One parameter of each role: plain, head-wise and stacked matrices, tables, a vector."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=draw))

        self.plain, self.heads, self.experts = new(6, 10), new(12, 5), new(3, 7, 4)
        self.output, self.bias = new(20, 6), new(5)
        self.ngrams = nn.Embedding(30, 4, _weight=torch.randn(30, 4, generator=draw))
        self.matrix_blocks = {"heads": 3}
        self.lookup_tables = {"ngrams.weight": 5.0}


def grads_of(module: nn.Module, steps: int) -> dict[str, list[Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return {
        n: [torch.randn(p.shape, generator=draw) * 10.0 ** (s - 2) for s in range(steps)]
        for n, p in module.named_parameters()
    }


def descend(module: nn.Module, optimizer: Any, grads: dict[str, list[Tensor]], steps: range) -> None:
    for step in steps:
        for name, parameter in module.named_parameters():
            parameter.grad = grads[name][step].to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "slow", "blocks"),
    [
        ("plain", slow_muon, 1),
        ("heads", slow_muon, 3),
        ("experts", slow_muon, 3),
        ("output", slow_sinkhorn, 1),
        ("bias", slow_adamw, 1),
    ],
)
def test_every_rule_equals_its_slow_reference(name: str, slow: Callable[..., Tensor], blocks: int):
    module = Parts()
    before = module.get_parameter(name).detach().double()
    grads = grads_of(module, 4)
    descend(module, build_optimizer(module, SINKHORN), grads, range(4))
    want = slow(before, [g.double() for g in grads[name]], blocks)
    torch.testing.assert_close(module.get_parameter(name).detach().double(), want, atol=5e-6, rtol=1e-5)


def test_head_wise_muon_is_not_muon_of_the_whole():
    module = Parts()
    before, grads = module.heads.detach().double(), grads_of(module, 1)
    descend(module, build_optimizer(module, SINKHORN), grads, range(1))
    whole = slow_muon(before, [grads["heads"][0].double()], 1)
    assert float((module.heads.detach().double() - whole).abs().max()) > 1e-3


def test_roles_follow_the_release_when_asked_and_stay_as_they_were_by_default():
    module = Parts()
    found = {r.name: (r.method, r.blocks, r.lr, r.weight_decay) for r in roles(module, SINKHORN)}
    assert found == {
        "plain": ("muon", 1, LR, DECAY),
        "heads": ("muon", 3, LR, DECAY),
        "experts": ("muon", 3, LR, DECAY),
        "output": ("sinkhorn", 1, LR, 0),
        "ngrams.weight": ("sinkhorn", 1, 5 * LR, 0),
        "bias": ("adamw", 1, LR, 0),
    }
    before = {r.name: r.method for r in roles(module, OptimizerConfig())}
    assert (before["output"], before["ngrams.weight"], before["heads"]) == ("adamw", "adamw", "muon")
    network = FlashPolicy.fresh("flash-tiny", seed=0).module
    lines = [line.split() for line in table(roles(network, SINKHORN)).splitlines()]
    assert ["embedding.weight", "128x32", "sinkhorn", "1", "0.02", "0", "1", "4096"] in lines


def test_newton_schulz_equals_the_polynomial_on_singular_values():
    x = torch.randn(2, 9, 5, generator=torch.Generator().manual_seed(2))
    for matrices in (x, x.mT):
        want = torch.stack([slow_newton_schulz(m) for m in matrices])
        torch.testing.assert_close(newton_schulz(matrices).double(), want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e12])
def test_balancing_equals_the_slow_one_at_any_scale_with_empty_rows_and_columns(scale: float):
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(40, 6, generator=draw) * torch.randn(40, 1, generator=draw).exp()
    x[4], x[7] = 0, x[7] * 1e-6
    x[:, 2] = 0
    got = balance(x * scale)
    torch.testing.assert_close(got.double(), slow_balance(x), atol=2e-6, rtol=1e-4)
    norms = got.norm(dim=1)
    assert norms[[4, 7]].tolist() == [0, 0]
    torch.testing.assert_close(norms[norms > 0], torch.ones(38))
    assert torch.equal(balance(torch.zeros(3, 2)), torch.zeros(3, 2))


def test_update_statistics_are_those_of_the_release():
    """Root mean square 0.18 for Muon and for tables; columns equal within 3 % under lognormal scales."""
    draw = torch.Generator().manual_seed(4)
    muon = newton_schulz(torch.randn(48, 96, generator=draw)) * GAMMA * 96**0.5
    assert float(muon.square().mean().sqrt()) == pytest.approx(GAMMA, rel=1e-3)
    scales = torch.randn(1500, 1, generator=draw).exp() * torch.randn(1, 32, generator=draw).exp()
    found = balance(torch.randn(1500, 32, generator=draw) * scales) * 32**0.5
    torch.testing.assert_close(found.square().mean(1).sqrt(), torch.ones(1500))
    columns = found.square().mean(0).sqrt()
    assert 0.97 < float(columns.min()) <= float(columns.max()) < 1.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("embeddings", ["adamw", "sinkhorn"])
def test_a_saved_state_goes_on_bit_for_bit(dtype: torch.dtype, embeddings: Any):
    config = OptimizerConfig(lr=LR, embeddings=embeddings)
    whole = Parts().to(dtype)
    parts, grads = copy.deepcopy(whole), grads_of(whole, 5)
    descend(whole, build_optimizer(whole, config), grads, range(5))
    first = build_optimizer(parts, config)
    descend(parts, first, grads, range(2))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = build_optimizer(parts, config)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert {v.dtype for state in second.state.values() for v in state.values()} == {torch.float32}
    descend(parts, second, grads, range(2, 5))
    assert all(map(torch.equal, whole.parameters(), parts.parameters()))


def test_a_state_of_other_methods_is_refused():
    saved = build_optimizer(Parts(), OptimizerConfig()).state_dict()
    with pytest.raises(ValueError, match="by other methods"):
        build_optimizer(Parts(), SINKHORN).load_state_dict(saved)
