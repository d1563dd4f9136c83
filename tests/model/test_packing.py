"""Best fit, the stream packer, cuts; what the rows are worth at 64K."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.batch import Sequence, pack
from model.flash import FlashPolicy
from model.packing import ALIGN, Packer, aligned, best_fit, cuts, waste

ROW = 65_536


def slow_best_fit(lengths: list[int], columns: int) -> list[list[int]]:
    """Every row is looked at for every sample."""
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = [row for row, room in enumerate(free) if room >= lengths[index]]
        row = min(fits, key=lambda r: (free[r], r)) if fits else len(rows)
        if not fits:
            rows.append([])
            free.append(columns)
        rows[row].append(index)
        free[row] -= aligned(lengths[index])
    return sorted(rows, key=min)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 90))
def test_best_fit_equals_a_search_of_all_rows(lengths, columns):
    assert best_fit(lengths, columns) == slow_best_fit(lengths, columns)


def documents(count: int, seed: int) -> list[int]:
    """The stated distribution: lognormal, median 4,096 tokens, sigma 1.2 (mean 8,400), at least 16."""
    draw = random.Random(seed)
    return [max(16, int(draw.lognormvariate(math.log(4096), 1.2))) for _ in range(count)]


@pytest.mark.parametrize("seed", [0, 1])
def test_waste_at_64k_is_below_one_in_ten_thousand(seed):
    """Rows given out, alignment included. Rows that wait for more have less than one row of room in all."""
    packer, lengths, rows = Packer(ROW), [], []
    for at in range(0, 16_384, 4096):
        window = [len(part) for n in documents(4096, seed + at) for part in cuts(n, ROW, 64)]
        lengths += window
        rows += packer.add(window)
    filled = [[lengths[i] for i in row] for row in rows]
    assert waste(filled, ROW) <= 1e-4
    alone = sum(aligned(n) - n for row in filled for n in row) / (len(rows) * ROW)
    assert waste(filled, ROW) - alone <= 2e-5
    rest = packer.finish()
    assert len(rows) > 4 * len(rest)
    assert sum(ROW - sum(aligned(lengths[i]) for i in row) for row in rest) < ROW
    assert sorted(i for row in rows + rest for i in row) == list(range(len(lengths)))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1, 40), max_size=12), max_size=6), st.sampled_from([0.0, 0.05, 1.0]))
def test_a_stream_is_packed_once_and_goes_on_from_its_state(windows, room):
    def rows_of(resumed: bool) -> list[list[int]]:
        packer, rows = Packer(41, room=room), []
        for window in windows:
            if resumed:
                packer = Packer(41, room=room, state=json.loads(json.dumps(packer.state)))
            rows += packer.add(window)
        spent = sum(max(0, 41 - sum(aligned(flat[i]) for i in row)) for row in rows)
        assert spent <= room * 41 * len(rows)
        return rows + packer.finish()

    flat = [n for window in windows for n in window]
    rows = rows_of(resumed=False)
    assert rows == rows_of(resumed=True)
    assert sorted(i for row in rows for i in row) == list(range(len(flat)))
    assert all(sum(aligned(flat[i]) for i in row) - flat[row[-1]] % ALIGN <= 41 for row in rows)


def test_a_refused_window_is_not_taken():
    packer = Packer(8, room=0)
    with pytest.raises(ValueError, match="sequence 1 has 9 tokens; a row holds 1 to 8"):
        packer.add([3, 9])
    assert packer.add([8]) == [[0]]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 500), st.integers(4, 40), st.integers(1, 20))
def test_cuts_cover_a_sample_in_even_pieces(length, half, shortest):
    longest = 2 * half
    shortest = min(shortest, half)
    pieces = cuts(length, longest, shortest)
    assert [i for piece in pieces for i in piece] == list(range(length))
    assert all(piece.start % ALIGN == 0 and len(piece) <= longest for piece in pieces)
    assert all(len(piece) == longest for piece in pieces[:-2])
    assert len(pieces) == 1 or min(map(len, pieces)) >= shortest
    assert all(a.stop == b.start for a, b in pairwise(pieces))
    with pytest.raises(ValueError, match="take an even number"):
        cuts(length, longest + 1)


def test_gradients_of_one_sample_reach_no_other_in_its_row():
    policy = FlashPolicy.fresh("flash-tiny", seed=0)
    texts = [[8 + 30 * i + j % 25 for j in range(n)] for i, n in enumerate((37, 12, 21))]
    (batch,) = pack([Sequence(t) for t in texts], 1000, row_tokens=74)
    assert len(batch.tokens_BT) == 1
    embedding = policy.module.embedding.weight
    hidden = policy.hidden(batch)
    for index, states in batch.gather(hidden).items():
        (grad,) = torch.autograd.grad(states.square().sum() + states.sum(), embedding, retain_graph=True)
        reached = grad.abs().amax(1)
        own = torch.tensor(sorted(set(texts[index])))
        assert float(reached[own].min()) > 0
        others = reached.index_fill(0, own, 0)
        # Not 0: on CPUs a hidden key weighs exp(-85), see model.banded.
        assert float(others.max()) < 1e-30 * float(reached.max())


def test_packing_needs_no_torch():
    code = "import sys, model.packing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
