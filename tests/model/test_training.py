"""Optimizer roles and the training engine."""

from __future__ import annotations

import math
import random

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from model.auxiliary import collect
from model.batch import Sequence, batch_of, pack
from model.config import NetworkConfig
from model.flash import FlashPolicy
from model.optimizers import RoleOptimizer, build_optimizer, newton_schulz, roles, table
from model.policy import load_policy, replay_start
from model.presets import PRESETS
from model.train_config import OptimizerConfig, ScheduleConfig
from model.training import LossSum, NonFiniteError, TrainEngine


def next_token_sum(policy, batch) -> LossSum:
    follows = (batch.segments_BT[:, 1:] == batch.segments_BT[:, :-1]) & (batch.segments_BT[:, 1:] > 0)
    logits = (policy.hidden(batch)[:, :-1] @ policy.head().T)[follows].float()
    targets = batch.tokens_BT[:, 1:][follows]
    return LossSum(nn.functional.cross_entropy(logits, targets, reduction="sum"), {"tokens": follows.sum()})


def data(count: int, seed: int = 0) -> list[Sequence]:
    draw = random.Random(seed)
    return [Sequence(draw.choices(range(8, 40), k=draw.randint(5, 40))) for _ in range(count)]


def test_newton_schulz_gives_singular_values_of_one():
    x = torch.randn(3, 24, 60, generator=torch.Generator().manual_seed(0))
    for matrices in (x, x.mT):
        singular = torch.linalg.svdvals(newton_schulz(matrices))
        assert 0.999 < float(singular.min()) <= float(singular.max()) < 1.001


def test_muon_update_is_the_formula_head_by_head():
    policy = FlashPolicy.fresh("flash-tiny", seed=0)
    config = OptimizerConfig(lr=0.01, weight_decay=0.1)
    optimizer = build_optimizer(policy.module, config)
    role = next(r for r in optimizer_roles(policy, config) if r.name == "layers.0.attention.query_up.weight")
    assert (role.method, role.blocks) == ("muon", 2)
    before, draw = role.parameter.detach().clone(), torch.Generator().manual_seed(1)
    momentum = torch.zeros_like(before)
    for _ in range(2):
        role.parameter.grad = torch.randn(before.shape, generator=draw)
        momentum = 0.95 * momentum + role.parameter.grad
        ahead = 0.95 * momentum + role.parameter.grad
        heads = [newton_schulz(part) * 0.18 * max(part.shape) ** 0.5 for part in ahead.chunk(2)]
        before = before * (1 - 0.01 * 0.1) - 0.01 * torch.cat(heads)
        optimizer.step()
    torch.testing.assert_close(role.parameter.detach(), before, atol=1e-6, rtol=1e-5)
    assert heads[0].shape == (16, 16)
    assert float(heads[0].square().mean().sqrt()) == pytest.approx(0.18, rel=1e-3)


def optimizer_roles(policy: FlashPolicy, config: OptimizerConfig):
    return roles(policy.module, config)


def test_adamw_equals_torch():
    def net() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Linear(5, 3, bias=True)

    config = OptimizerConfig(kind="adamw", lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)
    ours, theirs = net(), net()
    mine = build_optimizer(ours, config)
    other = torch.optim.AdamW(
        [
            {"params": [theirs.weight], "weight_decay": 0.1},
            {"params": [theirs.bias], "weight_decay": 0.0},
        ],
        lr=0.02,
        betas=(0.9, 0.95),
        eps=1e-20,
    )
    draw = torch.Generator().manual_seed(3)
    for _ in range(5):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=draw)
            b.grad = a.grad.clone()
        mine.step()
        other.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_every_parameter_has_one_role_and_the_table_shows_it():
    policy = FlashPolicy.fresh("flash-nano", seed=0)
    assigned = roles(policy.module, OptimizerConfig())
    assert {r.name for r in assigned} == {n for n, _ in policy.module.named_parameters()}
    by_name = {r.name: r for r in assigned}
    assert by_name["embedding.weight"].method == "adamw"
    assert by_name["layers.3.moe.gate"].blocks == 8
    assert by_name["layers.3.attention.sink"].weight_decay == 0
    assert by_name["norm.weight"].weight_decay == 0.1
    shown = table(assigned)
    assert "layers.*.moe.gate" in shown
    assert sum(int(line.split()[-1]) for line in shown.splitlines()[1:]) == sum(
        p.numel() for p in policy.module.parameters()
    )


def test_schedule_warms_up_holds_and_decays():
    schedule = ScheduleConfig(warmup=4, decay_from=10, decay_to=20, floor=0.1)
    assert [schedule.factor(s) for s in (0, 3, 9, 10)] == [0.25, 1, 1, 1]
    assert schedule.factor(15) == pytest.approx(0.55)
    assert schedule.factor(20) == schedule.factor(999) == pytest.approx(0.1)
    assert ScheduleConfig().factor(0) == 1


def test_the_split_into_microbatches_changes_nothing():
    steps = []
    for max_tokens in (10**6, 80):
        policy = FlashPolicy.fresh("flash-tiny", seed=0)
        engine = TrainEngine(policy.module.double(), OptimizerConfig(lr=0.01), bias_speed=0)
        batches = pack(data(12), max_tokens, row_tokens=40)
        report = engine.step(batches, lambda b, p=policy: next_token_sum(p, b), denominator=200)
        steps.append((len(batches), report, [p.detach().clone() for p in policy.module.parameters()]))
    (one, a, left), (many, b, right) = steps
    assert one == 1
    assert many > 3
    assert a.metrics == b.metrics
    assert a.loss == pytest.approx(b.loss, rel=1e-6)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
    for x, y in zip(left, right, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


def test_training_learns_and_resumes_exactly(tmp_path):
    def run(folder, stops: list[int]) -> list[float]:
        losses: list[float] = []
        for stop in stops:
            policy = FlashPolicy.fresh("flash-tiny", seed=0)
            engine = TrainEngine(policy.module.train(), OptimizerConfig(lr=0.02), folder=folder, keep=2)
            random.seed(5)
            start = engine.resume() or {"at": 0}
            losses = losses[: start["at"]]
            for at in range(start["at"], stop):
                batch = batch_of(random.sample(data(8), 4))
                losses.append(
                    engine.step([batch], lambda b, p=policy: next_token_sum(p, b), denominator=80).loss
                )
                engine.save({"at": at + 1})
        assert engine.steps == 8
        return losses

    whole = run(tmp_path / "whole", [8])
    assert whole == run(tmp_path / "parts", [3, 5, 8])
    assert whole[-1] < 0.8 * whole[0]
    kept = sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert kept == ["step-00000007", "step-00000008"]


def test_a_crash_while_saving_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    policy = FlashPolicy.fresh("flash-tiny", seed=0)
    engine = TrainEngine(policy.module, OptimizerConfig(), folder=tmp_path)
    engine.save({"at": 0})
    engine.steps = 1

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space"):
        engine.save({"at": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000000"]
    assert engine.resume() == {"at": 0}


@pytest.mark.parametrize("keep", [0, 100, 5000])
def test_a_damaged_checkpoint_is_named(tmp_path, keep: int) -> None:
    engine = TrainEngine(FlashPolicy.fresh("flash-tiny", seed=0).module, OptimizerConfig(), folder=tmp_path)
    (state,) = engine.save({"at": 0}).glob("*.pt")
    state.write_bytes(state.read_bytes()[:keep])
    with pytest.raises(ValueError, match="step-00000000 is damaged: remove it"):
        engine.resume()


def test_a_step_that_is_not_finite_changes_nothing_and_names_the_culprit():
    policy = FlashPolicy.fresh("flash-tiny", seed=0)
    engine = TrainEngine(policy.module, OptimizerConfig(lr=1.0))
    before = [p.detach().clone() for p in policy.module.parameters()]
    batch = batch_of(data(2))

    def broken(factor: float) -> LossSum:
        total = next_token_sum(policy, batch).total
        return LossSum(total * factor)

    with pytest.raises(NonFiniteError, match="loss of microbatch 1"):
        engine.step([1.0, math.nan], broken, denominator=1)
    bad = policy.module.layers[1].attention.query_down.weight
    bad.register_hook(lambda g: g / 0)
    with pytest.raises(NonFiniteError, match=r"gradient of layers\.1\.attention\.query_down\.weight"):
        engine.step([1.0], broken, denominator=1)
    assert engine.steps == 0
    assert all(map(torch.equal, before, policy.module.parameters()))
    assert all(p.grad is None for p in policy.module.parameters())
    with pytest.raises(ValueError, match="no token bears loss"):
        engine.step([], broken, denominator=0)


def test_auxiliary_losses_train_the_indexer_alone_to_follow_attention():
    policy = FlashPolicy.fresh("flash-tiny", seed=0)
    indexers = {n: p for n, p in policy.module.named_parameters() if "index" in n}
    batch = batch_of([Sequence(s.tokens) for s in data(6, seed=4)])
    with collect(policy.module, stride=1) as found:
        policy.hidden(batch)
    (first := found.indexer()).backward()
    assert {n for n, p in policy.module.named_parameters() if p.grad is not None and p.grad.any()} == set(
        indexers
    )
    optimizer = RoleOptimizer(roles(policy.module, OptimizerConfig(lr=0.05)), OptimizerConfig(lr=0.05))
    for _ in range(12):
        optimizer.zero_grad()
        with collect(policy.module, stride=1) as found:
            policy.hidden(batch)
        (last := found.indexer()).backward()
        optimizer.step()
    assert float(last.detach()) < 0.8 * float(first.detach())
    assert policy.module.auxiliary is None


def test_saved_policies_come_back(tmp_path):
    policy = FlashPolicy.fresh("flash-tiny", seed=3)
    policy.save(tmp_path / "full")
    policy.save(tmp_path / "half", dtype=torch.bfloat16)
    batch = batch_of(data(2))
    same = load_policy(str(tmp_path / "full"))
    with torch.no_grad():
        assert torch.equal(same.hidden(batch), policy.hidden(batch))
        rounded = load_policy(str(tmp_path / "half"))
        assert (
            0
            < float((rounded.hidden(batch) - policy.hidden(batch)).norm())
            < float(policy.hidden(batch).norm())
        )
        rounded.load(tmp_path / "full")
        assert torch.equal(rounded.hidden(batch), policy.hidden(batch))
    with pytest.raises(ValueError, match="does not fit this network"):
        FlashPolicy.fresh("flash-nano", seed=0).load(tmp_path / "full")
    with pytest.raises(ValueError, match="no weights for 'nowhere'"):
        load_policy("nowhere")


def test_presets_keep_their_sizes():
    sizes = {}
    for name in ("flash-nano", "flash-slim"):
        module, config = FlashPolicy.fresh(name, seed=0).module, PRESETS[name]
        total = sum(p.numel() for p in module.parameters())
        idle = config.layers * (config.experts - config.experts_per_token) * 3
        sizes[name] = total, total - idle * config.expert_width * config.width
    assert sizes["flash-nano"][1] <= 2_000_000
    assert sizes["flash-slim"][1] <= 4_000_000
    assert 2 * sum(total for total, _ in sizes.values()) < 7_950_000  # bytes in bfloat16, both together


def test_impossible_shapes_are_refused_with_the_reason():
    for wrong, match in [
        ({"compress_ratios": (0, 2, 1)}, "even number"),
        ({"kv_source": (1,), "index_source": (1,)}, "differs from that of its memory"),
        ({"index_source": (1, 4, 0)}, "index source needs"),
        ({"experts_per_token": 9}, "experts_per_token"),
        ({"topk": 3}, "topk"),
    ]:
        with pytest.raises(ValidationError, match=match):
            NetworkConfig(name="x", **wrong)  # type: ignore[arg-type]


def test_replay_start():
    assert [replay_start(n) for n in (1, 128, 129, 400)] == [0, 0, 1, 272]
