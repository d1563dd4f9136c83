"""Fast attention paths against a loop over queries in float64, and the windows' masks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from model.attention import Band, attend, attend_blocks, attend_one, band
from model.batch import Sequence, pack
from model.indexer import Selection, top_groups

W, H, D, M = 8, 3, 16, 10


def case(columns: int, block_rows: int = 5) -> tuple[Band, Tensor, Tensor, Selection, Tensor]:
    """Packed rows with starts, padding, a random selection, and a sink."""
    draw = torch.Generator().manual_seed(columns)
    lengths = [columns, columns // 2, columns // 3, 1, columns - 2]
    sequences = [Sequence([1] * n, start=max(0, n - 5)) for n in lengths]
    (batch,) = pack(sequences, 10**6, row_tokens=columns)
    shape = batch.tokens_BT.shape
    windows = band(batch.segments_BT, batch.positions_BT, batch.starts_BT, W)
    q = torch.randn(*shape, H, D, generator=draw)
    keys = torch.cat((torch.zeros(shape[0], W, D), torch.randn(*shape, D, generator=draw)), 1)
    seen = torch.rand(*shape, M, generator=draw) < 0.3
    seen[:, 1] = False
    selection = Selection(torch.randn(shape[0], M, D, generator=draw), seen)
    return windows, q, keys, selection, torch.randn(H, generator=draw)


def visible(windows: Band, row: int, t: int) -> list[int]:
    """Columns of `keys` that query t sees, from the band's mask."""
    block, offset = divmod(t, windows.block)
    return [block * windows.block + int(j) for j in windows.mask_BNQS[row, block, offset].nonzero()]


def slow(windows: Band, q: Tensor, keys: Tensor, selection: Selection | None, sink: Tensor) -> Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row in range(q.shape[0]):
        for t in range(q.shape[1]):
            own = [keys[row, j] for j in visible(windows, row, t)]
            if selection is not None:
                own += [selection.latents_BMD[row, int(m)] for m in selection.mask_BTM[row, t].nonzero()]
            for head in range(q.shape[2]):
                scores = [float(q[row, t, head].double() @ k.double()) / math.sqrt(D) for k in own]
                total = math.exp(sink[head]) + sum(map(math.exp, scores))
                for score, k in zip(scores, own, strict=True):
                    out[row, t, head] += math.exp(score) / total * k.double()
    return out


@pytest.mark.parametrize("columns", [7, 64, 150])
@pytest.mark.parametrize("with_memory", [True, False])
def test_blocks_equal_a_loop_over_queries(columns, with_memory):
    windows, q, keys, selection, sink = case(columns)
    read = selection if with_memory else None
    got = attend_blocks(q, keys, windows, read, sink)
    torch.testing.assert_close(got.double(), slow(windows, q, keys, read, sink), atol=1e-5, rtol=1e-5)


def test_one_query_equals_a_loop():
    windows, q, keys, selection, sink = case(7)
    one = Selection(selection.latents_BMD, selection.mask_BTM[:, 6:7])
    mask = torch.zeros(q.shape[0], 1, keys.shape[1], dtype=torch.bool)
    for row in range(q.shape[0]):
        mask[row, 0, visible(windows, row, 6)] = True
    got = attend_one(q[:, 6:7], keys, mask, one, sink)
    want = slow(windows, q, keys, selection, sink)[:, 6:7]
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_written_gradients_equal_those_of_the_fused_path():
    windows, q, keys, selection, sink = case(150)
    leaves = [x.clone().requires_grad_() for x in (q, keys, selection.latents_BMD, sink)]
    weight = torch.randn(q.shape, generator=torch.Generator().manual_seed(9))

    def banded() -> Tensor:
        q, keys, latents, sink = leaves
        return attend_blocks(q, keys, windows, Selection(latents, selection.mask_BTM), sink)

    def fused() -> Tensor:
        q, keys, latents, sink = leaves
        spans = torch.cat((windows.keys(keys), latents.unsqueeze(1).expand(-1, windows.blocks, -1, -1)), 2)
        mask = torch.cat((windows.mask_BNQS, windows.queries(selection.mask_BTM, False)), 3)
        out = attend(windows.queries(q).flatten(0, 1), spans.flatten(0, 1), mask.flatten(0, 1), sink)
        return out.unflatten(0, (len(q), -1)).flatten(1, 2)[:, : q.shape[1]]

    for fast, want in zip(
        torch.autograd.grad((banded() * weight).sum(), leaves),
        torch.autograd.grad((fused() * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(fast, want, atol=1e-4, rtol=1e-4)


def test_a_query_that_sees_nothing_gives_nothing():
    windows = Band(1, 2, torch.zeros(1, 1, 1, 3, dtype=torch.bool))
    q, keys, sink = torch.ones(1, 1, 1, 16), torch.ones(1, 3, 16), torch.zeros(1)
    assert float(attend_blocks(q, keys, windows, None, sink).abs().max()) < 1e-30
    assert float(attend(q, keys, windows.mask_BNQS[0], sink).abs().max()) < 1e-30
    assert not attend_one(q, keys, windows.mask_BNQS[0], None, sink).any()


@pytest.mark.parametrize("columns", [20, 150])
def test_windows_are_the_last_positions_of_the_same_sequence_after_its_start(columns):
    sequences = [Sequence([1] * n, start=s) for n, s in [(columns - 9, 3), (5, 0), (columns, columns - 4)]]
    (batch,) = pack(sequences, 10**6, row_tokens=columns)
    windows = band(batch.segments_BT, batch.positions_BT, batch.starts_BT, W)
    for row in range(batch.tokens_BT.shape[0]):
        for t in range(columns):
            segment, position = int(batch.segments_BT[row, t]), int(batch.positions_BT[row, t])
            low = max(int(batch.starts_BT[row, t]), position - W + 1)
            want = [W + t - position + p for p in range(low, position + 1)] if segment else []
            assert visible(windows, row, t) == want


def test_history_counts_as_positions_before_the_new_ones():
    positions = torch.tensor([[10, 11]])
    history = torch.tensor([[8, 9, 2, 3, 4, 5, 6, 7]])  # a ring of 8
    windows = band(torch.ones(1, 2).long(), positions, torch.tensor([[5, 5]]), W, history)
    seen = [sorted([*history[0].tolist(), 10, 11][j] for j in visible(windows, 0, t)) for t in (0, 1)]
    assert seen == [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10, 11]]


def test_top_groups_breaks_ties_to_the_newer_and_never_prefers_the_invisible():
    scores = torch.tensor([[[1.0, -2.0, 1.0, 0.0, -0.0, 9.0]]])
    seen = torch.tensor([[[True, True, True, True, True, False]]])
    assert sorted(top_groups(scores, seen, 1)[0, 0].tolist()) == [2]
    assert sorted(top_groups(scores, seen, 3)[0, 0].tolist()) == [0, 2, 4]
    assert sorted(top_groups(scores, seen, 5)[0, 0].tolist()) == [0, 1, 2, 3, 4]
