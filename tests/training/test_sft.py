"""Supervised fine-tuning on a tiny network: data rules, invariances, resume."""

import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from catalog.errors import UserError
from catalog.runs import read_run
from model.chat import FlashChat, Message
from model.tokenizer import Tokenizer
from model.train_config import CheckpointConfig, OptimizerConfig
from model.training import TrainEngine
from sft.config import SftConfig
from sft.data import Example, example, minibatch, select
from sft.train import accumulate, evaluate, train
from tests.training import tiny

CONFIG = SftConfig(
    steps=8, batch_samples=6, micro_tokens=64, optimizer=OptimizerConfig(lr=1e-2, schedule="linear"),
    checkpoint=CheckpointConfig(every=2), eval_every=4,
)  # fmt: skip


def gradient(engine):
    return {name: p.grad.clone() for name, p in engine.policy.module.named_parameters() if p.grad is not None}


def same(left, right, tolerance=1e-6):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.allclose(left[name], right[name], atol=tolerance), name


def weights(folder):
    return {name: value for name, value in tiny.FlashPolicy.open(folder).module.state_dict().items()}


def test_loss_falls_on_what_the_assistant_says_alone():
    tokenizer = Tokenizer()
    chat = FlashChat(tokenizer)
    messages = [
        Message("user", "fix f"), Message("assistant", "try 3"), Message("tool", "FAILED"),
        Message("assistant", "submit 5"),
    ]  # fmt: skip
    made = example("t", messages, chat, window=4)
    said = tokenizer.decode([made.tokens[at] for at in made.targets], specials=True)
    assert said == "try 3<|end|>submit 5<|end|>"
    prompt = chat.render(messages[:1], open=True)
    assert made.tokens[: made.targets[0]] == tuple(prompt)
    assert made.start == len(prompt) - 4


def test_selection_counts_what_it_leaves_out():
    found = select(
        [*tiny.examples(3), Example("long", (1,) * 99, (98,)), Example("mute", (1,), ())], max_tokens=64
    )
    assert (len(found.examples), found.too_long, found.nothing_said) == (3, 1, 1)
    with pytest.raises(ValueError, match="raise max_tokens"):
        select([Example("long", (1,) * 99, (98,))], max_tokens=64)
    with pytest.raises(ValueError, match="share an id"):
        select([tiny.examples(1)[0]] * 2, max_tokens=64)


def test_every_epoch_sees_every_sample_once():
    data = tiny.examples(10)
    seen = [e.id for step in range(15) for e in minibatch(data, step, 4, seed=3)]
    for epoch in range(6):
        assert sorted(seen[10 * epoch : 10 * epoch + 10]) == sorted(e.id for e in data)
    assert seen[:10] != seen[10:20]


def test_gradient_does_not_depend_on_split_packing_or_order():
    chosen = tiny.examples(12)
    engine = TrainEngine(tiny.policy(), CONFIG.optimizer)
    losses, gradients = [], []
    for order, micro in ((chosen, 10_000), (chosen, 1), (chosen[::-1], 70)):
        losses.append(accumulate(engine, order, micro)[0])
        gradients.append(gradient(engine))
        engine.optimizer.zero_grad()
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    same(gradients[0], gradients[1])
    same(gradients[0], gradients[2])


def test_loss_is_the_mean_over_targets_of_a_float64_reference():
    chosen = tiny.examples(5)
    net = tiny.policy()
    total, count = 0.0, 0
    for one in chosen:
        from model.batch import Sequence, batch_of

        hidden = net.hidden(batch_of([Sequence(one.tokens, one.start)]))[0].double()
        logp = torch.log_softmax(hidden @ net.head().double().T, -1)
        total -= float(sum(logp[at - 1, one.tokens[at]] for at in one.targets).detach())
        count += len(one.targets)
    found = accumulate(TrainEngine(net, CONFIG.optimizer), chosen, 64)[0]
    assert found == pytest.approx(total / count, rel=1e-5)


def test_tokens_without_loss_after_the_last_target_change_nothing():
    one = tiny.examples(1)[0]
    engine = TrainEngine(tiny.policy(), CONFIG.optimizer)
    accumulate(engine, [one], 256)
    before = gradient(engine)
    engine.optimizer.zero_grad()
    longer = Example(one.id, (*one.tokens, 9, 9, 9), one.targets, one.start)
    accumulate(engine, [longer], 256)
    same(before, gradient(engine))


def test_learns_and_says_so(tmp_path):
    data = tiny.examples(24)
    config = CONFIG.model_copy(update={"steps": 40, "micro_tokens": 512})
    before = evaluate(tiny.policy(), data, 512)
    result = train(config, tiny.policy(), data, run=tmp_path, dev=data[:4])
    assert result.loss < 0.6 * before
    assert result.dev_loss is not None
    assert read_run(tmp_path).state == "finished"
    assert evaluate(tiny.FlashPolicy.open(result.policy), data, 512) < 0.6 * before


def test_learning_rate_zero_changes_nothing(tmp_path):
    config = CONFIG.model_copy(update={"steps": 2, "optimizer": OptimizerConfig(lr=0.0)})
    result = train(config, tiny.policy(), tiny.examples(), run=tmp_path)
    fresh = tiny.policy().module.state_dict()
    assert all(torch.equal(fresh[name], value) for name, value in weights(result.policy).items())


def test_a_gradient_that_is_not_finite_is_skipped_and_then_fatal():
    from model.training import TrainingError

    net = tiny.policy()
    before = {k: v.clone() for k, v in net.module.state_dict().items()}
    engine = TrainEngine(net, OptimizerConfig(lr=0.1, max_skipped=2))
    engine.backward(net.head().sum() * math.inf)
    assert engine.step()["skipped"] == 1.0
    assert all(torch.equal(before[k], v) for k, v in net.module.state_dict().items())
    engine.backward(net.head().sum() * math.inf)
    with pytest.raises(TrainingError, match="lower optimizer.lr"):
        engine.step()


def test_other_settings_do_not_go_on_in_the_same_folder(tmp_path):
    config = CONFIG.model_copy(update={"steps": 1})
    train(config, tiny.policy(), tiny.examples(), run=tmp_path)
    with pytest.raises(UserError, match="batch_samples"):
        train(config.model_copy(update={"batch_samples": 2}), tiny.policy(), tiny.examples(), run=tmp_path)


def test_max_seconds_ends_a_run_and_a_finished_run_stays_finished(tmp_path):
    config = CONFIG.model_copy(update={"steps": 1000, "max_seconds": 0.2})
    first = train(config, tiny.policy(), tiny.examples(), run=tmp_path)
    assert 1 <= first.steps < 1000
    again = train(config, tiny.policy(seed=9), tiny.examples(), run=tmp_path)
    assert again == first


KILLED = """
import sys
from pathlib import Path
from tests.training import tiny
from tests.training.test_sft import CONFIG
from sft.train import train
train(CONFIG.model_copy(update={"steps": 24}), tiny.policy(), tiny.examples(), run=Path(sys.argv[1]))
"""


def test_killed_at_random_moments_ends_in_the_same_bits(tmp_path):
    straight = train(
        CONFIG.model_copy(update={"steps": 24}), tiny.policy(), tiny.examples(), run=tmp_path / "a"
    )
    rng = random.Random(0)
    kills = 0
    while True:
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path / "b")], cwd=Path(__file__).parents[2]
        )
        deadline = time.monotonic() + rng.uniform(0.05, 0.6)
        newest = lambda: len(list((tmp_path / "b").glob("checkpoints/0*")))  # noqa: E731
        while kills < 3 and child.poll() is None and (not newest() or time.monotonic() < deadline):
            if not newest():
                deadline = time.monotonic() + rng.uniform(0.05, 0.6)
            time.sleep(0.005)
        if kills < 3 and child.poll() is None:
            os.kill(child.pid, signal.SIGKILL)
            kills += 1
        if child.wait() == 0:
            break
    left, right = weights(straight.policy), weights(tmp_path / "b" / "checkpoints" / "00000024" / "policy")
    assert all(torch.equal(left[name], right[name]) for name in left)
    steps = [line["step"] for line in read_steps(tmp_path / "b")]
    assert steps == list(range(1, 25)), "no step is missing or counted twice"
    assert kills >= 1


def read_steps(run):
    from catalog.jsonl import read_lines

    return list(read_lines(run / "metrics.jsonl"))


def test_k_and_k_equal_2k_bit_for_bit(tmp_path):
    data = tiny.examples()
    whole = train(CONFIG, tiny.policy(), data, run=tmp_path / "whole")
    engine = TrainEngine(tiny.policy(), CONFIG.optimizer)
    from sft.train import SftState, one_step

    state = SftState()
    for _ in range(4):
        state = one_step(CONFIG, engine, data, (), state)
    engine.checkpoint(tmp_path / "half", 4, vars(state), keep=1)
    other = TrainEngine(tiny.policy(seed=5), CONFIG.optimizer)
    state = SftState(**other.resume(tmp_path / "half"))
    for _ in range(4):
        state = one_step(CONFIG, other, data, (), state)
    for name, value in weights(whole.policy).items():
        assert torch.equal(value, other.policy.module.state_dict()[name]), name
