"""What an agent that reads nothing, or next to nothing, gets on candidate sets.

A ranker gives every candidate a score. With one pick, the best score is submitted; with `tries`, the
candidates are tried in order of score and the first one that passes the visible test is submitted, else
the next one in line is submitted untried. `random_scores` and `prior_scores` are the baselines of the
demo; the n-gram ranker of `benchmarks.ngram` is the control of the seeds table.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence

from catalog.models import CandidateSet
from envfactory.shortcuts import frequent_operators, pick_rate
from verifiers.operators import operator_prior

Ranker = Callable[[CandidateSet], Sequence[float]]
"""One score for each candidate, higher is tried earlier."""


def random_scores(one: CandidateSet, *, seed: int = 0) -> list[float]:
    """A seeded order that is new for each task."""
    rng = random.Random(f"random {seed} {one.task_id}")
    return [rng.random() for _ in one.candidates]


def prior_of(training: Collection[CandidateSet]) -> dict[str, float]:
    """Weights of the operators: how often each was right in training sets, smoothed."""
    return operator_prior(frequent_operators(list(training)))


def prior_scores(one: CandidateSet, prior: Mapping[str, float]) -> list[float]:
    """The candidate's operator by its prior; candidates of one operator tie."""
    return [prior[candidate.operator] for candidate in one.candidates]


def one_pick(sets: Sequence[CandidateSet], ranker: Ranker) -> list[float]:
    """Per set the probability that the best-scored candidate passes, ties broken evenly."""
    return [pick_rate(one, ranker(one)) for one in sets]


def with_tries(one: CandidateSet, scores: Sequence[float], *, tries: int = 3, draws: int = 64) -> float:
    """Probability that trying in order of score ends with a passing submission; ties are broken at random,
    by `draws` seeded orders."""
    rng = random.Random(f"ties {one.task_id}")
    passed = 0
    for _ in range(draws):
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], rng.random()))
        seen = next((i for i in order[:tries] if one.passes_visible[i]), None)
        passed += one.passes[order[tries] if seen is None else seen]
    return passed / draws
