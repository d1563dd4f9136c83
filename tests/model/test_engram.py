"""Engram: the release's golden numbers, hashes and gate written out, and the sampling view."""

from __future__ import annotations

import math

import pytest
import torch

from model.batch import Sequence, batch_of
from model.config import EngramConfig, NetworkConfig
from model.engram import DEAD, Engram, NgramHash, compress_tokens, multipliers, table_sizes
from model.flash import FlashPolicy
from model.forks import pack_forks
from model.network import Network
from model.presets import preset
from model.tokenizer import Tokenizer

RELEASE = EngramConfig(layers=(1, 14), table_rows=16_000_000, compressed_vocab=99_092, pad_token=2)
SMALL = EngramConfig(
    layers=(1,), table_rows=50, max_ngram=3, heads=2, head_dim=16, compressed_vocab=90, pad_token=2
)


def config(**changes: object) -> NetworkConfig:
    tiny = preset("flash-tiny").model_dump()
    return NetworkConfig.model_validate(tiny | {"name": "engram", "engram": SMALL} | changes)


def test_golden_tables_of_the_release():
    first, second = table_sizes(RELEASE)
    assert first[:3] == (16_000_057, 16_000_079, 16_000_081)
    assert second[-1] == 16_000_889
    assert (sum(first), sum(second)) == (384_006_168, 384_016_682)
    assert len({*first, *second}) == 48


def test_golden_multipliers_of_the_release():
    assert multipliers(1, 99_092, 4) == [
        76_632_096_046_245,
        4_839_876_093_313,
        35_959_672_319_349,
        73_987_337_458_391,
    ]
    assert multipliers(14, 99_092, 4) == [
        67_716_810_739_261,
        51_510_806_800_915,
        30_921_347_202_721,
        82_619_226_485_591,
    ]
    assert max(multipliers(14, 99_092, 4)) * (99_092 - 1) < 2**63


def test_hashes_are_the_formula_and_stop_at_starts_and_dead_tokens():
    hashing = NgramHash(RELEASE, 14)
    sizes, factors, pad = table_sizes(RELEASE)[1], multipliers(14, 99_092, 4), 7
    ids = [99_091, 3, DEAD, 5, 6, 8, 99_000, 11]
    positions = [0, 1, 2, 3, 4, 5, 0, 1]  # a second sequence begins at column 6
    got = hashing(torch.tensor([[0, 0, 0, *ids]]), torch.tensor([positions]), torch.tensor(pad))
    assert got.shape == (1, 8, 24)
    for t in range(8):
        context, open_ = [], True
        for back in range(4):
            open_ = open_ and positions[t] >= back and ids[t - back] != DEAD
            context.append(ids[t - back] if open_ else pad)
        offset, want = 0, []
        for table, size in enumerate(sizes):
            mixed = 0
            for value, factor in zip(context[: table // 8 + 2], factors, strict=False):
                mixed ^= value * factor
            want.append(mixed % size + offset)
            offset += size
        assert got[0, t].tolist() == want
    assert int(got.max()) < hashing.rows == 384_016_682


def test_a_dead_token_reaches_the_n_minus_one_positions_behind_it():
    hashing = NgramHash(RELEASE, 1)
    ids, positions = torch.arange(10, 23).unsqueeze(0), torch.arange(10).unsqueeze(0)
    broken = ids.clone()
    broken[0, 3 + 4] = DEAD
    pad = torch.tensor(1)
    changed = (hashing(ids, positions, pad) != hashing(broken, positions, pad)).any(-1)[0]
    assert changed.nonzero().flatten().tolist() == [4, 5, 6, 7]


def test_the_gate_is_the_formula():
    part = Engram(config(streams=2), 1).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for gain in (part.query_gain, part.key_gain):
            gain += 0.3 * torch.randn(gain.shape, generator=generator, dtype=torch.float64)
    x, keys = torch.randn(2, 1, 3, 2, 32, generator=generator, dtype=torch.float64)
    keys[0, 0] = 0  # no agreement at all
    got = part.gate(x, keys).tolist()[0]
    gains = (part.query_gain * part.key_gain).view(2, 32).tolist()
    for t in range(3):
        for s in range(2):
            h, k = x[0, t, s].tolist(), keys[0, t, s].tolist()
            rms_h, rms_k = (math.sqrt(sum(v * v for v in u) / 32 + part.eps) for u in (h, k))
            dot = sum(a * g * b for a, g, b in zip(h, gains[s], k, strict=True)) / (rms_h * rms_k * 32**0.5)
            signed = math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot) if dot else 0.0
            assert got[t][s] == pytest.approx(1 / (1 + math.exp(-signed)), abs=1e-12)


def test_tokens_compress_by_what_they_say():
    texts = ["The", " the", "THE ", "thé", " ", "\n", "\t ", "", "\ufffd", "\ufffd", "ﬁ", "fi", "a  b", "a b"]
    ids = compress_tokens(texts, lambda token: f"<{token}>")
    assert ids == [0, 0, 0, 0, 1, 1, 1, 2, 3, 4, 5, 5, 6, 6]


def test_our_tokenizer_compresses():
    tokenizer = Tokenizer()
    texts = [tokenizer.decode([token]) for token in range(4096)]
    ids = compress_tokens(texts, str)
    assert ids[0] == 0
    assert set(ids) == set(range(max(ids) + 1))
    assert 1000 < len(set(ids)) < 4096
    pairs = [(a, b) for a in (" the", " self") for b in (a.strip(),) if len(tokenizer.encode(b)) == 1]
    assert pairs
    assert all(ids[tokenizer.encode(a)[0]] == ids[tokenizer.encode(b)[0]] for a, b in pairs)


@pytest.mark.parametrize("streams", [1, 4])
def test_sampling_equals_training_and_rows_learn(streams: int):
    c = config(streams=streams)
    torch.manual_seed(0)
    policy = FlashPolicy(c, Network(c).double())
    policy.module.compressed_V[43] = DEAD
    tokens = [8 + i * 7 % 113 for i in range(40)]
    assert 43 in tokens[:20]
    cache = policy.open_cache(2, 40)
    cache.extend([1], [tokens[:25]])
    cache.fork(1, 0)
    got = [cache.extend([0], [tokens[25:31]])[0], *(cache.extend([0], [[t]])[0] for t in tokens[31:])]
    hidden = policy.hidden(batch_of([Sequence(tokens, cache.starts(0))]))[0, :40]
    want = hidden @ policy.head().T
    torch.testing.assert_close(torch.stack(got).double(), want[30:].detach(), atol=1e-5, rtol=0)
    want[:-1].log_softmax(-1)[range(39), tokens[1:]].sum().backward()
    part = policy.module.layers[1].engram
    assert isinstance(part, Engram)
    for parameter in part.parameters():
        assert parameter.grad is not None
        assert float(parameter.grad.abs().sum()) > 0
    grad = part.table.weight.grad
    assert grad is not None
    assert 0 < int((grad == 0).all(-1).sum()) < len(grad)  # rows nobody asked for


def test_shared_prefixes_reach_back_into_the_prompt():
    c = config()
    torch.manual_seed(1)
    policy = FlashPolicy(c, Network(c).double())
    prompt = [8 + i * 5 % 113 for i in range(40)]
    sequences = [Sequence([*prompt, *tail], 0) for tail in ([9, 10, 11], [50, 51, 52, 53])]
    (batch,) = pack_forks(sequences, ["g", "g"], [40, 40], 4096)
    assert batch.prefix is not None
    with torch.no_grad():
        forked = policy.hidden(batch)
        for place in batch.places:
            alone = policy.hidden(batch_of([sequences[place.index]]))[0]
            n = len(sequences[place.index].tokens)
            got = forked[place.row, : n - 40]
            torch.testing.assert_close(got, alone[40:n], atol=1e-7, rtol=0)


def test_engram_belongs_to_the_encoder():
    with pytest.raises(ValueError, match="must be encoder layers"):
        config(engram=SMALL.model_copy(update={"layers": (3,)}))


def test_networks_without_engram_have_none_of_it():
    names = set(Network(preset("flash-tiny")).state_dict())
    assert not any("engram" in name or "compressed" in name for name in names)
