"""On-policy distillation on tiny networks: two teachers of different width, order, cache, exact resume."""

import pytest
import torch

from catalog.jsonl import read_lines
from model.batch import Sequence, batch_of
from model.config import NetworkConfig
from model.flash import FlashPolicy
from model.network import Network
from model.presets import preset
from model.train_config import OptimizerConfig
from model.training import TrainEngine
from opd.cache import HiddenCache
from opd.config import OpdConfig, TeacherConfig
from opd.data import Piece, assign
from opd.order import Heads
from opd.step import learn
from opd.teachers import TeacherPool
from opd.train import train
from tests.training import tiny

ADAM = OptimizerConfig(kind="adamw", lr=5e-3, weight_decay=0.0, eps=1e-8)


def wide_policy(seed: int) -> FlashPolicy:
    """A teacher of another width over the same vocabulary."""
    shape = preset("flash-tiny").model_dump() | {"name": "flash-tiny-wide", "width": 48, "query_rank": 24}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = NetworkConfig.model_validate(shape)
        return FlashPolicy(config, Network(config))


def sharpened(net: FlashPolicy) -> FlashPolicy:
    """Logits of fresh networks are nearly uniform; teachers should have an opinion."""
    with torch.no_grad():
        net.module.norm.weight.mul_(10.0)
    return net


@pytest.fixture
def config(tmp_path):
    sharpened(tiny.policy(seed=1)).save(tmp_path / "same")
    sharpened(wide_policy(seed=2)).save(tmp_path / "wide")
    teachers = (
        TeacherConfig(name="same", policy=str(tmp_path / "same"), domains=("even",)),
        TeacherConfig(name="wide", policy=str(tmp_path / "wide"), domains=("odd",)),
    )
    return OpdConfig(teachers=teachers, steps=6, micro_tokens=128, chunk_tokens=16, optimizer=ADAM)


def domain_of(trajectory) -> str:
    return "odd" if trajectory.group.endswith("1") else "even"


def opened(config, net, tmp_path):
    pool = TeacherPool(config.teachers, net, HiddenCache(tmp_path / "hidden"), tmp_path / "heads")
    return pool, Heads(pool.head)


def gradients(config, net, pool, heads, batch):
    seen = {}

    class Watched(TrainEngine):
        def _clip(self):
            seen.update({n: p.grad.clone() for n, p in self.module.named_parameters() if p.grad is not None})
            return super()._clip()

    engine = Watched(net.module, ADAM.model_copy(update={"lr": 0.0}), bias_speed=0.0)
    return seen, learn(config, engine, net, pool, heads, batch, domain_of)


def test_gradient_is_the_one_of_naive_autograd(config, tmp_path):
    net = tiny.policy()
    batch = tiny.batch_of(tiny.trajectories(net, 1, version=0, prompts=2))
    got, metrics = gradients(config, net, *opened(config, net, tmp_path), batch)
    teachers = {
        "even": FlashPolicy.open(config.teachers[0].policy),
        "odd": FlashPolicy.open(config.teachers[1].policy),
    }
    count = sum(t.sampled_tokens for t in batch.trajectories)
    net.module.zero_grad()
    total = 0.0
    for t in batch.trajectories:
        row = batch_of([Sequence(t.token_ids, max(0, t.segments[0].end - 8))])
        at = [i - 1 for i, sampled in enumerate(t.sampled) if sampled]
        teacher = teachers[domain_of(t)]
        log_s = torch.log_softmax(net.hidden(row)[0, at] @ net.head().T, -1)
        with torch.no_grad():
            log_t = torch.log_softmax(teacher.hidden(row)[0, at] @ teacher.head().T, -1)
        loss = (log_s.exp() * (log_s - log_t)).sum() / count
        loss.backward()
        total += float(loss.detach())
    want = {n: p.grad for n, p in net.module.named_parameters() if p.grad is not None}
    assert got.keys() == want.keys()
    for name in want:
        assert torch.allclose(got[name], want[name], atol=1e-5), name
    assert metrics["loss"] == pytest.approx(total, rel=1e-4)


def test_order_and_split_change_no_gradient_and_states_are_read_once(config, tmp_path):
    net = tiny.policy()
    batch = tiny.batch_of(tiny.trajectories(net, 1, version=0))
    pool, heads = opened(config, net, tmp_path)
    first, _ = gradients(config, net, pool, heads, batch)
    misses, read, loads = pool.cache.misses, pool.tokens_read, heads.loads
    assert loads == 2
    small = config.model_copy(update={"micro_tokens": 1, "chunk_tokens": 3})
    second, _ = gradients(small, net, pool, heads, batch)
    assert (pool.cache.misses, pool.tokens_read) == (misses, read)
    assert heads.loads == loads + 2
    for name in first:
        assert torch.allclose(first[name], second[name], atol=1e-6), name


def test_weights_of_a_sample_sum_to_one_and_a_domain_needs_a_teacher():
    item = Piece("a", "g", "x", (1, 2), 0, (1,))
    teachers = [TeacherConfig(name="p", policy="p", weight=3.0), TeacherConfig(name="q", policy="q")]
    assert [(w.teacher, w.weight) for w in assign([item], teachers)] == [("p", 0.75), ("q", 0.25)]
    with pytest.raises(ValueError, match="no teacher for domain 'x'"):
        assign([item], [TeacherConfig(name="p", policy="p", domains=("y",))])


def test_a_retrained_teacher_under_its_old_name_is_read_anew(config, tmp_path):
    net = tiny.policy()
    batch = tiny.batch_of(tiny.trajectories(net, 1, version=0))
    gradients(config, net, *opened(config, net, tmp_path), batch)
    sharpened(tiny.policy(seed=7)).save(config.teachers[0].policy)
    pool, heads = opened(config, net, tmp_path)
    gradients(config, net, pool, heads, batch)
    assert pool.cache.misses == sum(domain_of(t) == "even" for t in batch.trajectories)


def test_another_vocabulary_is_refused(config, tmp_path):
    shape = preset("flash-tiny").model_dump() | {"vocab": 64}
    other = NetworkConfig.model_validate(shape)
    FlashPolicy(other, Network(other)).save(tmp_path / "same")
    net = tiny.policy()
    pool, _ = opened(config, net, tmp_path)
    with pytest.raises(ValueError, match="64 tokens and the student 128"):
        pool.version("same")


async def test_student_approaches_both_teachers(config, tmp_path):
    faster = ADAM.model_copy(update={"lr": 2e-2})
    config = config.model_copy(update={"steps": 16, "micro_tokens": 2048, "optimizer": faster})
    source = tiny.Recorder(prompts=2, samples=6, cycle=1)
    await train(config, tiny.policy(), source.open, run=tmp_path / "run", domain_of=domain_of)
    lines = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    for name in ("kl_same", "kl_wide"):
        series = [line[name] for line in lines if name in line]
        assert sum(series[-3:]) / 3 < 0.9 * sum(series[:2]) / 2, name


KILLED = """
import asyncio, sys
from pathlib import Path
from opd.config import OpdConfig
from opd.train import train
from tests.training import tiny
from tests.training.test_opd import domain_of
run = Path(sys.argv[1])
config = OpdConfig.model_validate_json((run.parent / "config.json").read_text())
asyncio.run(train(config, tiny.policy(), tiny.Recorder(prompts=2).open, run=run, domain_of=domain_of))
"""


async def test_killed_at_random_moments_ends_in_the_same_bits(config, tmp_path):
    config = config.model_copy(update={"steps": 4})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    source = tiny.Recorder(prompts=2)
    whole = await train(config, tiny.policy(), source.open, run=tmp_path / "whole", domain_of=domain_of)
    kills = tiny.run_and_kill(KILLED, tmp_path / "killed", tmp_path / "killed" / "metrics.jsonl", kills=1)
    assert kills == 1
    other = FlashPolicy.open(tmp_path / "killed" / "policy")
    assert tiny.weights_equal(FlashPolicy.open(whole.policy), other)
