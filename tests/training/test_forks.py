"""Samples of one prompt computed together equal the same samples computed apart."""

import random

import pytest
import torch

from model.batch import Sequence, pack
from model.forks import pack_forks
from model.targets import targets, token_logprobs
from tests.training import tiny


def group(seed, prompt, samples, tail=9):
    rng = random.Random(seed)
    shared = [rng.randrange(4, tiny.VOCAB) for _ in range(prompt)]
    made = []
    for _ in range(samples):
        more = [rng.randrange(4, tiny.VOCAB) for _ in range(rng.randrange(2, tail))]
        made.append((Sequence((*shared, *more), max(0, prompt - 8)), list(range(prompt, prompt + len(more)))))
    return made


def results(net, batches, wanted):
    """Log-probabilities by sequence, and the gradient of their sum of squares."""
    net.module.zero_grad()
    found = {}
    for batch in batches:
        at = targets(batch, wanted)
        logp, _ = token_logprobs(at.hidden(net.hidden(batch)), net.head(), at.ids_N)
        logp.square().sum().backward()
        parts = logp.detach().split([n for _, n in at.owners])
        found |= {index: part for (index, _), part in zip(at.owners, parts, strict=True)}
    return found, {n: p.grad.clone() for n, p in net.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("max_tokens", [10_000, 100])
def test_forked_and_packed_agree(max_tokens):
    net = tiny.policy()
    made, names = [], []
    for name, (prompt, samples) in enumerate([(41, 4), (60, 3), (33, 1), (7, 3), (50, 2)]):
        made += group(name, prompt, samples)
        names += [name] * samples
    sequences, wanted = [s for s, _ in made], [w for _, w in made]
    forked = pack_forks(sequences, names, [w[0] - 1 for w in wanted], max_tokens)
    assert sum(batch.prefix is not None for batch in forked) >= 1
    assert sorted(p.index for batch in forked for p in batch.places) == list(range(len(sequences)))
    left, left_gradient = results(net, forked, wanted)
    right, right_gradient = results(net, pack(sequences, 10_000), wanted)
    for index in right:
        assert torch.allclose(left[index], right[index], atol=1e-5), index
    assert left_gradient.keys() == right_gradient.keys()
    for name in right_gradient:
        assert torch.allclose(left_gradient[name], right_gradient[name], rtol=1e-3, atol=1e-4), name


def test_the_prompt_of_a_group_is_laid_out_once():
    made = group(0, 100, 8)
    batch = pack_forks([s for s, _ in made], [0] * 8, [w[0] - 1 for _, w in made], 10_000)[0]
    assert batch.prefix.tokens_BT.shape == (1, 98)
    assert batch.tokens_BT.shape[0] == 8
    assert batch.tokens_BT.shape[1] <= 12
