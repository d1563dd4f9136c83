"""The sampling view equals the training view: `extend` against `hidden`, quantized caches on."""

from __future__ import annotations

import random

import pytest
import torch

from model.batch import Sequence, batch_of
from model.flash import FlashPolicy
from model.policy import Policy


def make(name: str, seed: int = 0) -> FlashPolicy:
    """Untrained weights, with norms, sinks and router biases moved off their initial values."""
    policy = FlashPolicy.fresh(name, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*policy.module.parameters(), *policy.module.buffers()]:
            if tensor.dim() == 1:
                tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    policy.module.eval()
    return policy


def ids(n: int, vocab: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(8, vocab), k=n)


def reference(policy: Policy, tokens: list[int], start: int) -> torch.Tensor:
    """Logits [T, V] of one sequence by `hidden`."""
    with torch.no_grad():
        return policy.hidden(batch_of([Sequence(tokens, start)]))[0] @ policy.head().T


@pytest.mark.parametrize("name", ["flash-tiny", "flash-nano"])
def test_one_shot_decode_and_chunks_agree(name):
    policy = make(name)
    window = policy.config.window
    length = 5 * window + 3
    tokens = ids(length, policy.vocab)
    prompt = 3 * window + 1  # odd: the first chunk ends inside a pair
    cache = policy.open_cache(2, length)
    first = cache.extend([1], [tokens[:prompt]])
    start = cache.starts(1)
    assert start == prompt - window
    want = reference(policy, tokens, start)
    torch.testing.assert_close(first[0], want[prompt - 1], atol=1e-4, rtol=0)
    at = prompt
    for step in [1, 1, 1, 2, 5, 1, window + 4, 3, 1]:
        step = min(step, length - at)
        if step:
            got = cache.extend([1], [tokens[at : at + step]])
            at += step
            torch.testing.assert_close(got[0], want[at - 1], atol=1e-4, rtol=0)
    assert at == cache.length(1)
