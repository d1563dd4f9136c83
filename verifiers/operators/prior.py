"""How likely an operator is to hold the repair, and weights under which that says nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import TypeVar

from verifiers.operators.generate import OPERATORS

Item = TypeVar("Item")


def operator_prior(
    frequency: Mapping[str, float] | None = None, *, smoothing: float = 1.0
) -> dict[str, float]:
    """Weights of all operators, which sum to 1.

    `frequency`: how often an edit of each operator was the right one in some corpus (counts of repairs,
    not of edits offered); operators that it lacks get only `smoothing`, so none has weight 0. Without a
    table all weigh the same. Raises ValueError for an unknown operator or a negative count.
    """
    table = frequency or {}
    unknown = table.keys() - OPERATORS.keys()
    if unknown:
        raise ValueError(f"unknown operators {sorted(unknown)}; known: {', '.join(OPERATORS)}")
    if smoothing <= 0 or any(count < 0 for count in table.values()):
        raise ValueError("counts must not be negative and smoothing must be positive")
    weights = {name: table.get(name, 0.0) + smoothing for name in OPERATORS}
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def window(ranked: Sequence[Item], right: Item, size: int, rng: Random) -> list[Item]:
    """At most `size` neighbours in a ranking, `right` among them at a random rank."""
    first = max(0, min(ranked.index(right) - rng.randrange(size), len(ranked) - size))
    return list(ranked[first : first + size])


def even_weights(windows: Iterable[tuple[Counter[str], str]], *, rounds: int = 30) -> dict[str, float]:
    """Weights of one edit of each operator under which right ones look like any other draw.

    Each window is (its edits by operator, the operator of the right one). The model: in a window, an edit
    is right with probability weight / sum of weights (conditional logit). Fitted with the minorisation of
    Hunter (2004); an operator that is never right gets no weight.
    """
    windows = list(windows)
    right = Counter(operator for _, operator in windows)
    weights = dict.fromkeys(right, 1.0)
    for _ in range(rounds):
        expected: dict[str, float] = dict.fromkeys(weights, 0.0)
        for window, _ in windows:
            total = sum(weights.get(name, 0.0) * count for name, count in window.items())
            for name, count in window.items():
                if name in weights:
                    expected[name] += count / total
        weights = {name: right[name] / expected[name] for name in weights}
    return weights
