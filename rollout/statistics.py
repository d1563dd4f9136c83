"""Numbers about pass rates: exact chance, intervals, paired differences. Pure functions, no I/O.

Which interval when: Wilson for one draw on each of independent tasks; a bootstrap over clusters (package,
file or function) for anything else, since tasks of one function resemble each other; and for a difference
of two policies on the same tasks, the bootstrap of per-task differences. A count of zero is reported with
its exact upper bound.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from catalog.models import CandidateSet, wilson


class Estimate(NamedTuple):
    """A mean with the bounds of its 95 % interval; `n` is what was resampled or counted."""

    mean: float
    low: float
    high: float
    n: int


def pass_rate(passed: Sequence[bool]) -> Estimate:
    """One draw on each of independent tasks: Wilson's interval."""
    low, high = wilson(sum(passed), len(passed))
    mean = sum(passed) / len(passed) if passed else math.nan
    return Estimate(mean, low, high, len(passed))


def clustered_mean(
    values: Mapping[str, float],
    clusters: Mapping[str, Hashable],
    *,
    draws: int = 10_000,
    seed: int = 0,
) -> Estimate:
    """Mean over tasks with the percentile interval of a bootstrap that resamples whole clusters.

    Args:
        values: a number per task id: its pass rate, or the difference of two policies' rates.
        clusters: what a task belongs to; a task that is missing is its own cluster.
    """
    if not values:
        raise ValueError("no tasks to average over")
    sums: dict[Hashable, tuple[float, int]] = {}
    for task, value in sorted(values.items()):
        cluster = clusters.get(task, ("task", task))
        total, n = sums.get(cluster, (0.0, 0))
        sums[cluster] = (total + value, n + 1)
    parts = list(sums.values())
    mean = sum(values.values()) / len(values)
    generator = random.Random(seed)
    means: list[float] = []
    for _ in range(draws):
        drawn = generator.choices(parts, k=len(parts))
        means.append(sum(total for total, _ in drawn) / sum(n for _, n in drawn))
    means.sort()
    return Estimate(mean, _quantile(means, 0.025), _quantile(means, 0.975), len(parts))


def paired_difference(
    first: Mapping[str, float],
    second: Mapping[str, float],
    clusters: Mapping[str, Hashable],
    *,
    draws: int = 10_000,
    seed: int = 0,
) -> Estimate:
    """first - second, task by task, clustered. Raises ValueError unless both cover the same tasks."""
    if first.keys() != second.keys():
        odd = sorted(first.keys() ^ second.keys())[:3]
        raise ValueError(f"a paired difference needs the same tasks on both sides; not shared: {odd}")
    differences = {task: first[task] - second[task] for task in first}
    return clustered_mean(differences, clusters, draws=draws, seed=seed)


def zero_upper_bound(n: int, confidence: float = 0.95) -> float:
    """Largest rate that gives no success in n independent draws with probability 1 - confidence."""
    return 1.0 if n == 0 else 1 - (1 - confidence) ** (1 / n)


def _quantile(ordered: Sequence[float], q: float) -> float:
    """Linear between order statistics (type 7)."""
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def search_chance(choices: CandidateSet, scores: Sequence[float] | None = None, *, tries: int = 3) -> float:
    """Exact pass probability of a policy that reads nothing but the results of its tries.

    It tries candidates in order of score, best first (equal scores in random order), submits the first one
    that passes the visible test, and after `tries` failures the next in order. Without scores all are
    equal: blind search, the fair rival of a policy that may try. `tries=0` submits the best unseen; with
    neither scores nor tries that is `choices.chance`.
    """
    n = len(choices.candidates)
    scores = [0.0] * n if scores is None else scores
    if len(scores) != n:
        raise ValueError(f"{len(scores)} scores for {n} candidates")
    success, undecided, left = 0.0, 1.0, tries
    for score in sorted(set(scores), reverse=True):
        members = [i for i in range(n) if scores[i] == score]
        shown = [i for i in members if choices.passes_visible[i]]
        unshown = len(members) - len(shown)
        right = sum(choices.passes[i] for i in shown)
        drawn = min(left, len(members))
        # Probability that none of the `drawn` members tried passes the visible test.
        none = math.comb(unshown, drawn) / math.comb(len(members), drawn)
        if shown:
            success += undecided * (1 - none) * right / len(shown)
        undecided *= none
        left -= drawn
        if drawn < len(members):  # the tries are spent: one of the rest of this class is submitted
            unseen = sum(choices.passes[i] for i in members if not choices.passes_visible[i])
            unseen_left = unseen * (unshown - drawn) / unshown if unshown else 0.0
            return success + undecided * (right + unseen_left) / (len(members) - drawn)
    return success
