"""The sampling view equals the training view: `extend` against `hidden`, quantized caches on.

Strictly, in float64, for many draws. In float32 a value may lie within rounding of a quantizer's threshold
or of the last place in a selection, and then falls on either side; docs/model.md says how often.
"""

from __future__ import annotations

import random

import pytest
import torch

from model.batch import Sequence, batch_of, pack
from model.flash import FlashPolicy
from model.policy import Policy


def make(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> FlashPolicy:
    """Untrained weights, with norms, sinks and router biases moved off their initial values."""
    policy = FlashPolicy.fresh(name, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*policy.module.parameters(), *policy.module.buffers()]:
            if tensor.dim() == 1:
                tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    policy.module.to(dtype).eval()
    return policy


def ids(n: int, vocab: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(8, vocab), k=n)


def want(policy: Policy, tokens: list[int], start: int) -> torch.Tensor:
    """Logits [T, V] of one sequence by `hidden`."""
    with torch.no_grad():
        hidden = policy.hidden(batch_of([Sequence(tokens, start)]))[0, : len(tokens)]
        return (hidden @ policy.head().T).float()


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


def walk(policy: FlashPolicy, seed: int, steps: list[int]) -> None:
    """Prefill an odd number of tokens, append the rest in these chunks, compare after each."""
    window = policy.config.window
    prompt = 3 * window + 1  # odd: the first chunk ends inside a pair
    length = prompt + sum(steps)
    tokens = ids(length, policy.vocab, seed)
    cache = policy.open_cache(2, length)
    first = cache.extend([1], [tokens[:prompt]])
    assert cache.starts(1) == prompt - window
    wanted = want(policy, tokens, cache.starts(1))
    close(first[0], wanted[prompt - 1])
    at = prompt
    for step in steps:
        got = cache.extend([1], [tokens[at : at + step]])
        at += step
        close(got[0], wanted[at - 1])
    assert at == cache.length(1)


@pytest.mark.parametrize("seed", range(6))
def test_prefill_decoding_and_chunks_agree_in_float64(seed):
    walk(make("flash-tiny", seed, torch.float64), seed, [1, 1, 1, 2, 5, 1, 12, 3, 70, 1, 1])


def test_prefill_decoding_and_chunks_agree_in_float32():
    walk(make("flash-nano"), 0, [1, 1, 1, 2, 5, 1, 67, 130, 3, 1])


def test_ragged_and_mixed_calls_forks_and_freed_slots():
    policy = make("flash-tiny", 3, torch.float64)
    texts = [ids(n, policy.vocab, n) for n in (61, 20, 5, 37, 2)]
    cut = [30, 19, 4, 1, 1]
    cache = policy.open_cache(6, 64)
    slots = [4, 0, 2, 5, 1]
    got = cache.extend(slots, [text[:n] for text, n in zip(texts, cut, strict=True)])
    wanted = [want(policy, t, cache.starts(s)) for t, s in zip(texts, slots, strict=True)]
    for i, n in enumerate(cut):
        close(got[i], wanted[i][n - 1])
    cache.fork(4, 3)
    cache.extend([4], [[9, 9, 9]])
    cache.free(4)
    # A fresh prefill, a fork that goes on in a chunk, and three kinds of appending, in one call.
    got = cache.extend([4, 3, 0, 5, 2], [texts[1], texts[0][30:], texts[1][19:], texts[3][1:], texts[2][4:]])
    close(got[0], want(policy, texts[1], cache.starts(4))[-1])
    for row, text in ((1, 0), (2, 1), (3, 3), (4, 2)):
        close(got[row], wanted[text][-1])
    assert [cache.length(s) for s in range(6)] == [20, 1, 5, 61, 20, 37]


@pytest.mark.parametrize("starts", [(0, 0, 0), (29, 0, 12)])
def test_packing_leaks_nothing_and_changes_nothing(starts):
    policy = make("flash-tiny", 1, torch.float64)
    texts = [ids(n, policy.vocab, n) for n in (37, 12, 21)]
    sequences = [Sequence(t, s) for t, s in zip(texts, starts, strict=True)]
    (batch,) = pack(sequences, 1000, row_tokens=74)
    assert len(batch.tokens_BT) == 1
    with torch.no_grad():
        logits = (policy.hidden(batch) @ policy.head().T).float()
    for index, found in batch.gather(logits).items():
        close(found, want(policy, texts[index], starts[index]))
        assert not found[: starts[index]].any()
    changed = [Sequence(t if i != 1 else ids(12, policy.vocab, 99), starts[i]) for i, t in enumerate(texts)]
    with torch.no_grad():
        other = (policy.hidden(pack(changed, 1000, row_tokens=74)[0]) @ policy.head().T).float()
    for index, found in batch.gather(other - logits).items():
        assert (float(found.abs().max()) < 1e-6) == (index != 1)


def test_later_tokens_change_no_earlier_state_and_earlier_ones_reach_beyond_the_window():
    policy = make("flash-tiny", 2, torch.float64)
    tokens = ids(60, policy.vocab)
    base = want(policy, tokens, 0)
    later = want(policy, [*tokens[:40], *ids(20, policy.vocab, 5)], 0)
    close(base[:40], later[:40])
    first = want(policy, [tokens[0] + 1, *tokens[1:]], 0)
    reach = policy.config.window * policy.config.layers  # of windows alone
    assert reach < 59
    assert float((first - base)[reach:].abs().max()) > 1e-4


def test_the_start_is_what_bounded_replay_costs():
    """Another start gives other logits: the trainer must be told it."""
    policy = make("flash-tiny", 2)
    tokens = ids(60, policy.vocab)
    assert float((want(policy, tokens, 0) - want(policy, tokens, 52))[52:].abs().max()) > 1e-3


def test_gradients_reach_every_parameter_but_the_indexers():
    policy = make("flash-tiny", 2)
    batch = batch_of([Sequence(ids(60, policy.vocab), 30)])
    (policy.hidden(batch) @ policy.head().T).logsumexp(-1).sum().backward()
    without = {n for n, p in policy.module.named_parameters() if p.grad is None or not p.grad.any()}
    assert without == {n for n, _ in policy.module.named_parameters() if "index" in n}


def test_extend_refuses_what_it_cannot_do():
    cache = make("flash-tiny").open_cache(2, 8)
    for slots, tokens in [([0, 0], [[1], [1]]), ([0], [[]]), ([0], [[1] * 9]), ([0, 1], [[1]])]:
        with pytest.raises(ValueError, match=r"slot|extend"):
            cache.extend(slots, tokens)
