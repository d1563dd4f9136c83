"""Experts against a loop over tokens, and the balancing bias."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.auxiliary import Auxiliary
from model.config import NetworkConfig
from model.moe import MoE


@pytest.fixture
def moe() -> MoE:
    config = NetworkConfig(
        name="t", width=16, experts=5, experts_per_token=2, expert_width=8, shared_width=12, swiglu_limit=0.5
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        moe = MoE(config, output_gain=1.0)
        moe.bias_E.normal_()
    return moe


def slow(moe: MoE, x: Tensor) -> Tensor:
    def swiglu(token: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        gated = (gate @ token).clamp(max=moe.limit)
        return gated * gated.sigmoid() * (up @ token).clamp(-moe.limit, moe.limit)

    out = []
    for token in x.double():
        affinity = (1 + (moe.router.weight.double() @ token).exp()).log().sqrt()
        preferred = (affinity.detach() + moe.bias_E).tolist()
        order = sorted(range(5), key=lambda e: -preferred[e])[:2]
        total = sum(affinity[e] for e in order)
        y = moe.shared_down.weight.double() @ swiglu(
            token, moe.shared_gate.weight.double(), moe.shared_up.weight.double()
        )
        for e in order:
            hidden = swiglu(token, moe.gate[e].double(), moe.up[e].double()) * affinity[e] / total * 1.5
            y = y + moe.down[e].double().T @ hidden
        out.append(y)
    return torch.stack(out)


def test_dense_product_equals_a_loop_forward_and_backward(moe):
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    got, want = moe(x, torch.ones(40)), slow(moe, x)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    weight = torch.randn(40, 16, generator=torch.Generator().manual_seed(2))
    leaves = [x, *moe.parameters()]
    fast = torch.autograd.grad((got * weight).sum(), leaves)
    for a, b in zip(fast, torch.autograd.grad((want * weight).sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_bias_moves_towards_balance_and_only_in_training(moe):
    x = torch.randn(200, 16, generator=torch.Generator().manual_seed(3))
    valid = (torch.arange(200) < 150).float()
    moe.eval()(x, valid)
    assert not moe.load_E.any()
    moe.train()
    moe.bias_E.zero_()
    for _ in range(60):
        moe.load_E.zero_()
        moe(x, valid)
        assert int(moe.load_E.sum()) == 300
        load = moe.load_E.clone()
        moe.update_bias(0.02)
    assert float(load.max() / load.mean()) < 1.3
    assert not moe.load_E.any()


def test_balance_loss_is_one_when_even_and_more_when_not(moe):
    found = Auxiliary(1)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(4))
    moe.bias_E.zero_()
    moe(x, torch.ones(64), found, 4)
    with torch.no_grad():
        moe.router.weight[:2] *= 4
    moe.bias_E[:2] = 10
    moe(x, torch.ones(64), found, 4)
    even, uneven = (float(value.detach()) for value in found.balances)
    assert 0.9 < even < uneven
