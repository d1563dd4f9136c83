"""The length penalty, and the law that the report derives from it."""

import math

import numpy as np
import pytest
from pydantic import ValidationError

from rl.config import EffortConfig
from rl.effort import coefficient, length_reward, preferred_length


def test_price_falls_by_e_each_tau():
    config = EffortConfig(efforts=(20, 60, 100), k0=0.2, spread=1.5)
    assert config.tau == 60.0
    assert coefficient(config, 20) == 0.2
    assert coefficient(config, 80) == pytest.approx(0.2 / math.e)


def test_penalty_grows_with_length_until_the_cap():
    config = EffortConfig(efforts=(50,), k0=0.5, length_norm=100, cap=0.75)
    assert length_reward(config, 50, 0) == 0.0
    assert length_reward(config, 50, 100) == -0.5
    assert length_reward(config, 50, 10_000) == -0.75


def test_failures_can_be_spared():
    config = EffortConfig(efforts=(50,), k0=0.5, length_norm=100, only_success=True)
    assert length_reward(config, 50, 100, success=False) == 0.0
    assert length_reward(config, 50, 100, success=True) == -0.5
    assert length_reward(config, None, 100) == 0.0


def test_best_length_is_affine_in_the_effort():
    config = EffortConfig(efforts=(25, 50, 75, 100), k0=0.05, spread=2.0, cap=1e9, length_norm=1000)
    gain, scale = 0.002, 300.0
    lengths = np.arange(0, 20_000, 1.0)
    success = gain * scale * (1 - np.exp(-lengths / scale))
    best = []
    for effort in config.efforts:
        total = success + np.array([length_reward(config, effort, x) for x in lengths])
        best.append(float(lengths[total.argmax()]))
        assert best[-1] == pytest.approx(preferred_length(config, effort, gain=gain, scale=scale), abs=1.0)
    slopes = np.diff(best) / np.diff(config.efforts)
    assert slopes == pytest.approx([scale / config.tau] * 3, abs=0.1)


@pytest.mark.parametrize("efforts", [(), (50, 50), (0,), (101,)])
def test_unusable_efforts_are_refused(efforts):
    with pytest.raises(ValidationError):
        EffortConfig(efforts=efforts)
