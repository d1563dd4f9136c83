"""Advantages: what enters a baseline, what is dropped, and exactness."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.advantages import Scored, advantages, leave_one_out


def scored(rewards, group="p", effort=50, lengths=None):
    lengths = lengths or [0.0] * len(rewards)
    return [
        Scored(f"{group}-{effort}-{i}", group, effort, reward, length)
        for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]


def test_baseline_is_the_mean_of_the_others():
    found = advantages(scored([1.0, 0.0, 0.0, 1.0]))
    assert list(found.values.values()) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert found.dropped == {}
    assert found.kept_subgroups == found.subgroups == 1


def test_efforts_and_prompts_are_never_compared():
    samples = scored([1.0, 1.0], effort=50) + scored([0.0, 0.0], effort=100) + scored([1.0, 0.0], group="q")
    found = advantages(samples)
    assert set(found.values) == {"q-50-0", "q-50-1"}
    assert found.counts() == {"infrastructure": 0, "alone": 0, "constant": 4, "all_failed": 0}


def test_infrastructure_failure_is_in_neither_loss_nor_baseline():
    with_failure = advantages(scored([1.0, None, 0.0]))
    without = advantages(scored([1.0, 0.0]))
    assert list(with_failure.values.values()) == list(without.values.values()) == [1.0, -1.0]
    assert with_failure.counts()["infrastructure"] == 1


def test_a_lone_valid_sample_has_no_baseline():
    assert advantages(scored([1.0, None])).dropped == {"p-50-1": "infrastructure", "p-50-0": "alone"}


def test_all_succeeded_at_different_lengths_carries_the_length_signal():
    found = advantages(scored([1.0, 1.0, 1.0], lengths=[-0.3, -0.1, -0.1]))
    assert found.values["p-50-0"] < 0 < found.values["p-50-1"] == found.values["p-50-2"]


def test_all_failed_is_dropped_even_when_lengths_differ():
    found = advantages(scored([0.0, 0.0, 0.0], lengths=[-0.3, -0.1, -0.1]))
    assert set(found.dropped.values()) == {"all_failed"}
    assert not found.values


def test_almost_equal_rewards_are_not_equal():
    found = advantages(scored([1.0, 1.0], lengths=[-0.1, -0.1 - 1e-16]))
    assert found.kept_subgroups == (0 if -0.1 - 1e-16 == -0.1 else 1)
    tiny = advantages(scored([1.0, 1.0 + 2**-52]))
    assert tiny.kept_subgroups == 1


def test_a_repeated_sample_id_is_an_error():
    with pytest.raises(ValueError, match="unique"):
        advantages(scored([1.0]) + scored([0.0]))


@given(st.lists(st.floats(-2, 2), min_size=2, max_size=12), st.randoms(use_true_random=False))
def test_advantages_sum_to_zero_and_do_not_depend_on_order(rewards: list[float], rng: random.Random):
    values = leave_one_out(rewards)
    n = len(rewards)
    mean = math.fsum(rewards) / n
    assert values == pytest.approx([n / (n - 1) * (r - mean) for r in rewards], abs=1e-12)
    order = list(range(n))
    rng.shuffle(order)
    shuffled = leave_one_out([rewards[i] for i in order])
    assert shuffled == [values[i] for i in order]
