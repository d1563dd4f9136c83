"""Packing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.batch import Sequence, pack
from model.packing import ALIGN


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 300), st.data())
def test_every_token_lies_once_at_an_even_start(lengths, max_tokens, data):
    row_tokens = data.draw(st.none() | st.integers(max(lengths), 120))
    texts = [[100 * i + j for j in range(n)] for i, n in enumerate(lengths)]
    starts = [n // 3 for n in lengths]
    batches = pack(
        [Sequence(t, s) for t, s in zip(texts, starts, strict=True)], max_tokens, row_tokens=row_tokens
    )
    seen = []
    for batch in batches:
        rows, columns = batch.tokens_BT.shape
        assert rows == 1 or rows * columns <= max_tokens
        for index, tokens in batch.gather(batch.tokens_BT).items():
            assert tokens.tolist() == texts[index]
            seen.append(index)
        for index, positions in batch.gather(batch.positions_BT).items():
            assert positions.tolist() == list(range(lengths[index]))
        for index, found in batch.gather(batch.starts_BT).items():
            assert set(found.tolist()) == {starts[index]}
        assert all(place.column % ALIGN == 0 for place in batch.places)
        assert int((batch.segments_BT > 0).sum()) == sum(place.length for place in batch.places)
        runs = (batch.segments_BT > 0) & (batch.positions_BT >= batch.starts_BT)
        if batch.decoder_columns_BU is not None:
            for row, columns in zip(runs, batch.decoder_columns_BU, strict=True):
                assert columns[columns >= 0].tolist() == row.nonzero()[:, 0].tolist()
    assert sorted(seen) == list(range(len(texts)))


def test_best_fit_fills_rows():
    lengths = [400, 300, 212, 100, 12]
    (batch,) = pack([Sequence([1] * n) for n in lengths], 10**6, row_tokens=512)
    assert batch.tokens_BT.shape == (2, 512)
    assert int((batch.segments_BT > 0).sum()) == sum(lengths)


def test_scatter_lays_values_out_as_tokens():
    (batch,) = pack([Sequence([5, 6, 7]), Sequence([8])], 100, row_tokens=8)
    values = batch.scatter([[0.5, 0.6, 0.7], [0.8]], fill=-1)
    assert values.shape == batch.tokens_BT.shape
    torch.testing.assert_close(
        values[batch.segments_BT > 0] * 10, batch.tokens_BT[batch.segments_BT > 0].float()
    )
    assert (values[batch.segments_BT == 0] == -1).all()
    with pytest.raises(ValueError, match="sequence 1 has 1 tokens"):
        batch.scatter([[1, 2, 3], [1, 2]])


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="sequence 0 has 0 tokens"):
        pack([Sequence([]), Sequence([1])], 10)
    with pytest.raises(ValueError, match="a row holds 1 to 4"):
        pack([Sequence([1] * 5)], 10, row_tokens=4)
    assert pack([], 10) == []
