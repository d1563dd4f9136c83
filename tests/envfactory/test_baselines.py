"""Baselines on candidate sets whose answer is known."""

from __future__ import annotations

import pytest

from catalog.models import Candidate, CandidateSet
from envfactory.baselines import one_pick, prior_of, prior_scores, random_scores, with_tries

REF = "sha256:" + "0" * 64
OPERATORS = ["name_swap", "tuple_swap", "name_swap", "comparison_boundary"] * 2


def made_up(number: int, right: int, visible: tuple[int, ...] = ()) -> CandidateSet:
    candidates = tuple(
        Candidate(operator=op, path="m.py", line=i, before="a", after="b", content=REF)
        for i, op in enumerate(OPERATORS)
    )
    return CandidateSet(
        task_id=f"t{number}",
        candidates=candidates,
        passes_visible=tuple(i == right or i in visible for i in range(8)),
        passes=tuple(i == right for i in range(8)),
        tried=1,
    )


def test_prior_learns_from_training_sets() -> None:
    prior = prior_of([made_up(i, 3) for i in range(10)])
    assert max(prior, key=lambda name: prior[name]) == "comparison_boundary"
    assert one_pick([made_up(0, 7), made_up(1, 1)], lambda one: prior_scores(one, prior)) == [0.5, 0.0]


def test_random_choice_is_chance() -> None:
    sets = [made_up(i, i % 8) for i in range(400)]
    rate = sum(one_pick(sets, random_scores)) / len(sets)
    assert rate == pytest.approx(1 / 8, abs=0.06)
    tried = sum(with_tries(one, [0.0] * 8) for one in sets) / len(sets)
    assert tried == pytest.approx(4 / 8, abs=0.03)


def test_tries_stop_at_the_first_visible_success() -> None:
    order = [8.0, 7, 6, 5, 4, 3, 2, 1]
    assert with_tries(made_up(0, 2), order) == 1.0
    assert with_tries(made_up(0, 3), order) == 1.0
    assert with_tries(made_up(0, 4), order) == 0.0
    assert with_tries(made_up(0, 2, visible=(1,)), order) == 0.0
