"""What a policy must beat: rankers of candidates that no network is needed for.

A ranker gives each candidate of a set a score; `ranked_rates` says exactly how often it would pass with and
without tries (`statistics.search_chance`), so that no sampling noise hides a small gain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from catalog.models import CandidateSet
from rollout.statistics import search_chance

Ranker = Callable[[CandidateSet], list[float]]


def uniform_ranker(choices: CandidateSet) -> list[float]:
    """Knows nothing: with `tries=0` this is the baseline `random`."""
    return [0.0] * len(choices.candidates)


def operator_prior(training: Iterable[CandidateSet], smoothing: float = 1.0) -> Ranker:
    """Ranks by how often candidates of the same operator passed in the training sets.

    An operator never seen there gets the smoothed overall rate.
    """
    offered: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    for choices in training:
        for candidate, passes in zip(choices.candidates, choices.passes, strict=True):
            offered[candidate.operator] += 1
            passed[candidate.operator] += passes
    total = sum(offered.values())
    overall = sum(passed.values()) / total if total else 0.0

    def rank(choices: CandidateSet) -> list[float]:
        return [
            (passed[candidate.operator] + smoothing * overall) / (offered[candidate.operator] + smoothing)
            for candidate in choices.candidates
        ]

    return rank


def ranked_rates(sets: Iterable[CandidateSet], ranker: Ranker, *, tries: int) -> dict[str, float]:
    """Exact pass probability per task id."""
    return {choices.task_id: search_chance(choices, ranker(choices), tries=tries) for choices in sets}
