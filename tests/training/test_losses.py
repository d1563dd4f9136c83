"""The policy-gradient losses against plain float64 references written token by token."""

import math
from dataclasses import replace

import pytest
import torch

from rl.config import LossConfig
from rl.losses import TokenData, TokenStats, denominator, policy_loss

KINDS = [
    LossConfig(kind=kind, anchor=anchor) for kind in ("pg", "ppo", "cispo") for anchor in ("start", "rollout")
]


def tokens(n=64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(n, generator=rng, dtype=torch.float64) * 3
    old = rollout + 0.4 * torch.randn(n, generator=rng, dtype=torch.float64)
    now = (old + 0.3 * torch.randn(n, generator=rng, dtype=torch.float64)).requires_grad_()
    advantage = torch.randn(n, generator=rng, dtype=torch.float64)
    staleness = torch.randint(0, 4, (n,), generator=rng)
    return now, old, TokenData(rollout, advantage, staleness, staleness <= 2, staleness == 0)


def fresh(data, **changes):
    return replace(
        data, staleness_N=torch.zeros_like(data.staleness_N), bears_N=torch.ones(64).bool(), **changes
    )


def part_of(data, part):
    return TokenData(
        data.rollout_N[part],
        data.advantage_N[part],
        data.staleness_N[part],
        data.bears_N[part],
        data.same_N[part],
    )


def reference(config, now, old, rollout, advantage, stale):
    """Gradient with respect to `now` of one token, by hand."""
    if stale:
        return 0.0
    if config.anchor == "rollout":
        r, w = math.exp(now - rollout), 1.0
    else:
        r, w = math.exp(now - old), min(math.exp(old - rollout), config.tis_cap)
    if config.kind == "pg":
        return -min(w * r, config.tis_cap) * advantage
    if config.kind == "cispo":
        return -w * min(r, config.cispo_cap) * advantage
    held = r > 1 + config.clip_high if advantage > 0 else r < 1 - config.clip_low
    return 0.0 if held else -w * r * advantage


@pytest.mark.parametrize("config", KINDS, ids=lambda c: f"{c.kind}-{c.anchor}")
def test_gradient_equals_the_hand_written_one(config):
    now, old, data = tokens()
    policy_loss(config, now, old, data).backward()
    columns = (now, old, data.rollout_N, data.advantage_N, ~data.bears_N)
    expected = [reference(config, *values) for values in zip(*(c.tolist() for c in columns), strict=True)]
    assert now.grad.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("config", KINDS, ids=lambda c: f"{c.kind}-{c.anchor}")
def test_on_policy_all_kinds_are_the_plain_policy_gradient(config):
    now, _, data = tokens()
    data = fresh(data, rollout_N=now.detach())
    policy_loss(config, now, now.detach(), data).backward()
    assert torch.allclose(now.grad, -data.advantage_N, atol=1e-15)


@pytest.mark.parametrize("config", KINDS, ids=lambda c: f"{c.kind}-{c.anchor}")
def test_micro_batches_add_up(config):
    now, old, data = tokens()
    whole = policy_loss(config, now, old, data).detach()
    parts = [
        policy_loss(config, now[part], old[part], part_of(data, part)).detach()
        for part in (slice(0, 7), slice(7, 30), slice(30, 64))
    ]
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-12)


def test_masked_tokens_contribute_nothing_and_do_not_make_the_others_louder():
    now, old, data = tokens()
    policy_loss(LossConfig(), now, old, replace(data, bears_N=torch.ones(64).bool())).backward()
    everything = now.grad.clone()
    now.grad = None
    policy_loss(LossConfig(), now, old, data).backward()
    assert torch.equal(now.grad[data.bears_N], everything[data.bears_N])
    assert float(now.grad[~data.bears_N].abs().max()) == 0.0


def test_a_broken_token_of_zero_advantage_gives_no_nan():
    now = torch.tensor([-1.0, -1.0], requires_grad=True)
    data = TokenData(
        torch.tensor([-1.0, -1e30]),
        torch.tensor([1.0, 0.0]),
        torch.tensor([0, 0]),
        torch.tensor([True, True]),
        torch.tensor([True, True]),
    )
    loss = policy_loss(LossConfig(), now, now.detach(), data)
    loss.backward()
    assert math.isfinite(float(loss.detach()))
    assert now.grad.tolist() == [-1.0, 0.0]


def test_denominators():
    assert denominator(LossConfig(), 120, 4) == 120.0
    assert denominator(LossConfig(denominator="constant", tokens_per_sample=50), 120, 4) == 200.0


def test_stats_of_an_on_policy_batch():
    now, _, data = tokens()
    stats = TokenStats()
    stats.update(LossConfig(), now.detach(), torch.ones(64), fresh(data, rollout_N=now.detach()))
    found = stats.metrics()
    assert (found["ess"], found["ratio_mean"], found["entropy"]) == pytest.approx((1.0, 1.0, 1.0))
    assert (found["kl"], found["mismatch_max"], found["off_policy_ratio"]) == (0.0, 0.0, 0.0)


def test_stats_do_not_depend_on_the_split_and_see_a_mismatch():
    now, _, data = tokens()
    now = now.detach()
    whole, split = TokenStats(), TokenStats()
    whole.update(LossConfig(), now, torch.ones(64), data)
    for part in (slice(0, 11), slice(11, 64)):
        split.update(LossConfig(), now[part], torch.ones(64)[part], part_of(data, part))
    assert whole.metrics() == pytest.approx(split.metrics())
    on_policy = data.same_N
    gap = (now - data.rollout_N)[on_policy].abs()
    assert whole.metrics()["mismatch_max"] == pytest.approx(float(gap.max()))
    weights = (now - data.rollout_N).exp()
    assert whole.metrics()["ess"] == pytest.approx(float(weights.sum() ** 2 / (64 * weights.square().sum())))
    assert whole.metrics()["masked_ratio"] == pytest.approx(float((~data.bears_N).float().mean()))
