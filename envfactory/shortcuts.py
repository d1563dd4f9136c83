"""How far rules get that choose a candidate without reading the code.

If one of them beats chance by much, an agent may learn it instead of repairing: the measurement stands
in the synthesis report beside chance. Rules that use what was right elsewhere are scored on tasks left out
(by file, so that a file's own habits do not help).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from catalog.models import CandidateSet

Score = Callable[[CandidateSet, int], float]


class Shortcut(NamedTuple):
    """How one rule does at a single pick."""

    rule: str
    rate: float
    """Share of sets in which the pick passes, ties shared out."""
    chance: float
    low: float
    """95 % interval of `rate - chance`, bootstrap over files."""
    high: float
    n: int


def frequent_operators(sets: Sequence[CandidateSet]) -> Counter[str]:
    """How often each operator passes."""
    return Counter(
        candidate.operator
        for one in sets
        for candidate, passes in zip(one.candidates, one.passes, strict=True)
        if passes
    )


def _odds(sets: Sequence[CandidateSet]) -> dict[str, float]:
    right = frequent_operators(sets)
    shown = Counter(candidate.operator for one in sets for candidate in one.candidates)
    return {name: (right[name] + 1) / (shown[name] + 8) for name in shown}


def _lines(one: CandidateSet) -> list[int]:
    return sorted(candidate.line for candidate in one.candidates)


def _middle(one: CandidateSet, i: int) -> float:
    lines = _lines(one)
    return -abs(one.candidates[i].line - (lines[len(lines) // 2 - 1] + lines[len(lines) // 2]) / 2)


def _crowd(one: CandidateSet, i: int) -> float:
    lines = _lines(one)
    return lines.count(one.candidates[i].line)


def _common(one: CandidateSet, i: int) -> float:
    return sum(candidate.operator == one.candidates[i].operator for candidate in one.candidates)


RULES: dict[str, Score] = {
    "first shown": lambda one, i: -i,
    "first line": lambda one, i: -one.candidates[i].line,
    "last line": lambda one, i: one.candidates[i].line,
    "middle line": _middle,
    "most crowded line": _crowd,
    "loneliest line": lambda one, i: -_crowd(one, i),
    "commonest operator in the set": _common,
    "rarest operator in the set": lambda one, i: -_common(one, i),
    "shortest after": lambda one, i: -len(one.candidates[i].after),
    "longest after": lambda one, i: len(one.candidates[i].after),
    "adds most": lambda one, i: len(one.candidates[i].after) - len(one.candidates[i].before),
    "removes most": lambda one, i: len(one.candidates[i].before) - len(one.candidates[i].after),
}


def pick_rate(one: CandidateSet, scores: Sequence[float]) -> float:
    """Probability that a pick with the best score passes, ties broken evenly."""
    best = max(scores)
    tied = [i for i, score in enumerate(scores) if score == best]
    return sum(one.passes[i] for i in tied) / len(tied)


def measure(sets: Sequence[CandidateSet], *, seed: int = 0, draws: int = 1000) -> list[Shortcut]:
    """Every rule on these sets, the best first."""
    if not sets:
        return []
    rates: dict[str, list[float]] = {
        rule: [pick_rate(one, [score(one, i) for i in range(len(one.candidates))]) for one in sets]
        for rule, score in RULES.items()
    }
    files = [one.candidates[0].path for one in sets]
    for rule, learn in (
        ("operator most often right", frequent_operators),
        ("operator with best odds", _odds),
    ):
        rates[rule] = []
        for one, path in zip(sets, files, strict=True):
            elsewhere = [s for s, p in zip(sets, files, strict=True) if p != path]
            table: Mapping[str, float] = learn(elsewhere)
            scores = [float(table.get(candidate.operator, 0.0)) for candidate in one.candidates]
            rates[rule].append(pick_rate(one, scores))
    chance = [one.chance for one in sets]
    found = [_shortcut(rule, values, chance, files, seed, draws) for rule, values in rates.items()]
    return sorted(found, key=lambda s: -(s.rate - s.chance))


def _shortcut(
    rule: str, rates: Sequence[float], chance: Sequence[float], files: Sequence[str], seed: int, draws: int
) -> Shortcut:
    rng = random.Random(seed)
    clusters: dict[str, list[float]] = {}
    for path, rate, base in zip(files, rates, chance, strict=True):
        clusters.setdefault(path, []).append(rate - base)
    groups = list(clusters.values())
    means: list[float] = []
    for _ in range(draws):
        sample = [value for _ in groups for value in groups[rng.randrange(len(groups))]]
        means.append(sum(sample) / len(sample))
    means.sort()
    n = len(rates)
    return Shortcut(
        rule, sum(rates) / n, sum(chance) / n, means[int(0.025 * draws)], means[int(0.975 * draws)], n
    )
