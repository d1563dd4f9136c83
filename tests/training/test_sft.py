"""Supervised fine-tuning on a tiny network: data rules, invariances, resume."""

import math

import pytest
import torch

from catalog.errors import UserError
from catalog.jsonl import read_lines
from catalog.runs import read_run
from model.batch import Sequence, batch_of
from model.chat import FlashChat, Message
from model.flash import FlashPolicy
from model.tokenizer import Tokenizer
from model.train_config import CheckpointConfig, OptimizerConfig, ScheduleConfig
from model.training import NonFiniteError, TrainEngine, TrainState
from sft.config import SftConfig
from sft.data import Example, example, minibatch, select
from sft.train import evaluate, likelihoods, one_step, packed, train
from tests.training import tiny

ADAM = OptimizerConfig(
    kind="adamw",
    lr=1e-2,
    weight_decay=0.0,
    eps=1e-8,
    schedule=ScheduleConfig(warmup=2, decay_from=2, decay_to=40),
)
CONFIG = SftConfig(
    steps=8,
    batch_samples=6,
    micro_tokens=64,
    eval_every=4,
    optimizer=ADAM,
    checkpoint=CheckpointConfig(every=2),
)


def loss_and_gradient(net, chosen, micro_tokens):
    """Mean loss of a minibatch and its gradient, micro-batch by micro-batch as in training."""
    count = sum(len(sample.targets) for sample in chosen)
    total = 0.0
    net.module.zero_grad()
    for batch in packed(chosen, micro_tokens):
        loss = likelihoods(net, chosen, batch)[0].sum() / count
        loss.backward()
        total += float(loss.detach())
    return total, {n: p.grad.clone() for n, p in net.module.named_parameters() if p.grad is not None}


def assert_close(left, right, tolerance=1e-6):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.allclose(left[name], right[name], rtol=1e-4, atol=tolerance), name


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
    net, chosen = tiny.policy(), tiny.examples(12)
    losses, gradients = zip(
        loss_and_gradient(net, chosen, 10_000),
        loss_and_gradient(net, chosen, 1),
        loss_and_gradient(net, chosen[::-1], 70),
        strict=True,
    )
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert_close(gradients[0], gradients[1])
    assert_close(gradients[0], gradients[2])


def test_loss_is_the_mean_over_targets_of_a_float64_reference():
    net, chosen = tiny.policy(), tiny.examples(5)
    total, count = 0.0, 0
    for one in chosen:
        hidden = net.hidden(batch_of([Sequence(one.tokens, one.start)]))[0].double()
        logp = torch.log_softmax(hidden @ net.head().double().T, -1).detach()
        total -= sum(float(logp[at - 1, one.tokens[at]]) for at in one.targets)
        count += len(one.targets)
    assert loss_and_gradient(net, chosen, 64)[0] == pytest.approx(total / count, rel=1e-5)


def test_tokens_after_the_last_target_change_nothing():
    net, one = tiny.policy(), tiny.examples(1)[0]
    longer = Example(one.id, (*one.tokens, 9, 9, 9), one.targets, one.start)
    assert_close(loss_and_gradient(net, [one], 256)[1], loss_and_gradient(net, [longer], 256)[1])


def test_learns_and_says_so(tmp_path):
    data = tiny.examples(24)
    config = CONFIG.model_copy(update={"steps": 40, "micro_tokens": 512})
    before = evaluate(tiny.policy(), data, 512)
    result = train(config, tiny.policy(), data, run=tmp_path, dev=data[:4])
    assert result.last["loss"] < 0.7 * before
    assert result.last["dev_loss"] < 0.7 * before
    assert read_run(tmp_path).state == "finished"
    assert evaluate(FlashPolicy.open(result.policy), data, 512) < 0.7 * before


def test_learning_rate_zero_changes_no_weight(tmp_path):
    still = OptimizerConfig(kind="adamw", lr=0.0)
    config = CONFIG.model_copy(update={"steps": 2, "optimizer": still})
    result = train(config, tiny.policy(), tiny.examples(), run=tmp_path)
    before = dict(tiny.policy().module.named_parameters())
    after = FlashPolicy.open(result.policy).module.named_parameters()
    assert all(torch.equal(before[name], value) for name, value in after)


def test_a_gradient_that_is_not_finite_stops_the_run_and_leaves_its_checkpoint(tmp_path):
    net = tiny.policy()
    train(CONFIG.model_copy(update={"steps": 4}), net, tiny.examples(), run=tmp_path)
    with torch.no_grad():
        net.module.norm.weight[0] = math.nan
    engine = TrainEngine(net.module, ADAM)
    before = {name: value.clone() for name, value in net.module.state_dict().items()}
    with pytest.raises(NonFiniteError):
        one_step(CONFIG, engine, net, tiny.examples(), (), TrainState())
    for name, value in net.module.state_dict().items():
        assert torch.equal(value.nan_to_num(7), before[name].nan_to_num(7))


def test_other_settings_do_not_go_on_in_the_same_folder(tmp_path):
    config = CONFIG.model_copy(update={"steps": 1})
    train(config, tiny.policy(), tiny.examples(), run=tmp_path)
    with pytest.raises(UserError, match="batch_samples"):
        train(config.model_copy(update={"batch_samples": 2}), tiny.policy(), tiny.examples(), run=tmp_path)


def test_max_seconds_ends_a_run_and_a_finished_run_stays_finished(tmp_path):
    config = CONFIG.model_copy(update={"steps": 1000, "max_seconds": 0.2})
    first = train(config, tiny.policy(), tiny.examples(), run=tmp_path)
    assert 1 <= first.steps < 1000
    trained = FlashPolicy.open(first.policy)
    assert train(config, tiny.policy(seed=9), tiny.examples(), run=tmp_path) == first
    assert tiny.weights_equal(trained, FlashPolicy.open(first.policy))


def test_k_and_k_equal_2k_bit_for_bit(tmp_path):
    data = tiny.examples()
    whole = train(CONFIG, tiny.policy(), data, run=tmp_path / "whole")
    first, other = tiny.policy(), tiny.policy(seed=5)
    engine = TrainEngine(first.module, ADAM, folder=tmp_path / "half")
    state = TrainState()
    for _ in range(4):
        state = one_step(CONFIG, engine, first, data, (), state)
    engine.save(vars(state))
    engine = TrainEngine(other.module, ADAM, folder=tmp_path / "half")
    state = TrainState(**engine.resume())
    for _ in range(4):
        state = one_step(CONFIG, engine, other, data, (), state)
    assert tiny.weights_equal(FlashPolicy.open(whole.policy), other)


KILLED = """
import sys
from pathlib import Path
from sft.train import train
from tests.training import tiny
from tests.training.test_sft import CONFIG
train(CONFIG.model_copy(update={"steps": 16}), tiny.policy(), tiny.examples(), run=Path(sys.argv[1]))
"""


def test_killed_at_random_moments_ends_in_the_same_bits(tmp_path):
    config = CONFIG.model_copy(update={"steps": 16})
    whole = train(config, tiny.policy(), tiny.examples(), run=tmp_path / "whole")
    kills = tiny.run_and_kill(KILLED, tmp_path / "killed", tmp_path / "killed" / "metrics.jsonl", kills=2)
    assert kills == 2
    assert tiny.weights_equal(
        FlashPolicy.open(whole.policy), FlashPolicy.open(tmp_path / "killed" / "policy")
    )
    steps = [line["step"] for line in read_lines(tmp_path / "killed" / "metrics.jsonl")]
    assert steps == list(range(1, 17)), "no step is missing or counted twice"
