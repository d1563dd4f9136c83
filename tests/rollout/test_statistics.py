"""Exact chances against simulation, intervals against coverage, differences against hand sums."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catalog.models import Candidate, CandidateSet
from rollout.baselines import operator_prior, ranked_rates, uniform_ranker
from rollout.statistics import (
    clustered_mean,
    paired_difference,
    pass_rate,
    search_chance,
    zero_upper_bound,
)
from tests.rollout.fakes import ref


def choices(visible, passes, operators=None, task="t"):
    operators = operators or ["op"] * len(passes)
    return CandidateSet(
        task_id=task,
        candidates=tuple(
            Candidate(operator=name, path="a.py", line=1, before="a", after="b", content=ref(name))
            for name in operators
        ),
        passes_visible=tuple(visible),
        passes=tuple(passes),
        tried=9,
    )


def by_enumeration(visible, passes, scores, tries):
    """Average over every order that respects the scores."""
    n = len(passes)
    total = count = 0
    for order in itertools.permutations(range(n)):
        if any(scores[a] < scores[b] for a, b in itertools.pairwise(order)):
            continue
        count += 1
        found = next((i for i in order[:tries] if visible[i]), None)
        chosen = found if found is not None else (order[tries] if tries < n else None)
        total += chosen is not None and passes[chosen]
    return total / count


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 2)), min_size=1, max_size=5),
    st.integers(0, 5),
)
def test_search_chance_is_exact(rows, tries):
    visible = [shown or passing for shown, passing, _ in rows]
    passes = [passing for _, passing, _ in rows]
    scores = [float(score) for *_, score in rows]
    expected = by_enumeration(visible, passes, scores, tries)
    assert search_chance(choices(visible, passes), scores, tries=tries) == pytest.approx(expected)


def test_known_chances():
    one = choices([True] + [False] * 7, [True] + [False] * 7)
    assert one.chance == search_chance(one, tries=0) == 1 / 8
    assert search_chance(one, tries=3) == pytest.approx(4 / 8)  # three tries and a last blind pick
    assert search_chance(one, [1.0] + [0.0] * 7, tries=0) == 1
    with pytest.raises(ValueError, match="2 scores for 8"):
        search_chance(one, [1.0, 2.0])


def test_the_operator_prior_prefers_what_passed_in_training():
    training = [choices([True, False], [True, False], ["good", "bad"], task=str(n)) for n in range(4)]
    rank = operator_prior(training)
    held_out = choices([False, True, False], [False, True, False], ["bad", "good", "new"], task="h")
    bad, good, new = rank(held_out)
    assert good > new > bad
    assert ranked_rates([held_out], rank, tries=0) == {"h": 1.0}
    assert ranked_rates([held_out], uniform_ranker, tries=0)["h"] == pytest.approx(1 / 3)


def test_a_rule_tries_in_its_order_and_stops_at_the_first_visible_success():
    order = [8.0, 7, 6, 5, 4, 3, 2, 1]

    def rate(right, shown=()):
        visible = [i == right or i in shown for i in range(8)]
        return search_chance(choices(visible, [i == right for i in range(8)]), order, tries=3)

    assert [rate(2), rate(3), rate(4)] == [1, 1, 0]  # the fourth is submitted untried
    assert rate(2, shown=[1]) == 0  # the visible test passes there, the hidden ones do not


def test_two_passing_candidates_are_found_more_often():
    two = choices([True] * 2 + [False] * 6, [True] * 2 + [False] * 6)
    assert search_chance(two) == pytest.approx(11 / 14)
    assert ranked_rates([two], uniform_ranker, tries=0)["t"] == pytest.approx(1 / 4)


def test_a_clustered_interval_covers_and_is_wider_than_a_naive_one():
    """Tasks of one function share their luck: only clustered intervals hold as often as they say."""
    generator = random.Random(1)
    hits = naive_hits = 0
    runs = 120
    for run in range(runs):
        values, clusters = {}, {}
        for cluster in range(24):
            luck = generator.random()
            for n in range(5):
                values[f"{cluster}-{n}"] = float(generator.random() < luck)
                clusters[f"{cluster}-{n}"] = cluster
        low, high = clustered_mean(values, clusters, draws=300, seed=run)[1:3]
        hits += low <= 0.5 <= high
        low, high = pass_rate([value == 1 for value in values.values()])[1:3]
        naive_hits += low <= 0.5 <= high
    assert hits / runs > 0.88
    assert naive_hits < hits


def test_paired_differences():
    first = {"a": 1.0, "b": 0.5, "c": 1.0}
    second = {"a": 0.0, "b": 0.5, "c": 0.5}
    same = paired_difference(first, second, {}, draws=500)
    assert same.mean == pytest.approx(0.5)
    assert same.n == 3
    assert same == paired_difference(first, second, {}, draws=500)
    one = paired_difference(first, second, dict.fromkeys("abc", "f"), draws=50)
    assert one.low == one.high == pytest.approx(0.5)
    with pytest.raises(ValueError, match=r"not shared: \['c'\]"):
        paired_difference(first, {"a": 1.0, "b": 1.0}, {})
    with pytest.raises(ValueError, match="no tasks"):
        clustered_mean({}, {})


def test_a_count_of_zero_has_an_upper_bound():
    assert zero_upper_bound(100) == pytest.approx(0.0295, abs=1e-4)
    assert (1 - zero_upper_bound(40)) ** 40 == pytest.approx(0.05)
    assert zero_upper_bound(0) == 1.0
