"""How likely an operator is to hold the repair."""

from __future__ import annotations

from collections.abc import Mapping

from verifiers.operators.generate import OPERATORS


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
