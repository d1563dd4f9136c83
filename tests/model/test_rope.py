"""YaRN against transformers, and where it must change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from model.config import YarnConfig
from model.rope import rotation

THETA, CHANNELS = 160_000.0, 64


def speeds(yarn: YarnConfig | None) -> torch.Tensor:
    """Angles of position 1."""
    return rotation(torch.tensor([1]), CHANNELS, THETA, yarn)[0].angle()


def test_speeds_are_those_of_transformers():
    pytest.importorskip("transformers")
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields: dict[str, Any] = {
        "hidden_size": CHANNELS,
        "num_attention_heads": 1,
        "head_dim": CHANNELS,
        "max_position_embeddings": 1_048_576,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": THETA,
            "factor": 16.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 65_536,
        },
    }
    config = PretrainedConfig(**fields)
    want, _ = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    torch.testing.assert_close(speeds(YarnConfig()), want, atol=1e-9, rtol=2e-6)


def test_fast_pairs_keep_their_speed_and_slow_ones_are_a_factor_slower():
    ratio = speeds(YarnConfig()) / speeds(None)
    assert torch.equal(ratio[:10], torch.ones(10))
    torch.testing.assert_close(ratio[-1], torch.tensor(1 / 16))
    assert (ratio.diff() <= 0).all()
    assert torch.equal(speeds(YarnConfig(factor=1.0)), speeds(None))
