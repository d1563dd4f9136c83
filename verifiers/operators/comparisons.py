"""Comparison operators: off-by-one boundaries, directions, negations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import libcst as cst

from verifiers.operators.base import Operator, Proposal, operator
from verifiers.operators.tree import Tree


def _swap(tree: Tree, table: Mapping[str, str]) -> Iterator[Proposal]:
    for site, target in tree.all(cst.ComparisonTarget):
        text = table.get(tree.source(target.operator))
        if text is not None:
            yield tree.replace(site, (target.operator, text))


@operator("comparison_boundary")
def comparison_boundary(tree: Tree) -> Iterator[Proposal]:
    """Include or exclude the boundary: `<` and `<=`, `>` and `>=`."""
    table = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
    yield from _swap(tree, table)


@operator("comparison_direction")
def comparison_direction(tree: Tree) -> Iterator[Proposal]:
    """Turn a comparison around: `<` and `>`, `<=` and `>=`."""
    table = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
    yield from _swap(tree, table)


@operator("comparison_negate")
def comparison_negate(tree: Tree) -> Iterator[Proposal]:
    """Negate an order: `<` and `>=`, `>` and `<=`."""
    table = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}
    yield from _swap(tree, table)


@operator("equality_negate")
def equality_negate(tree: Tree) -> Iterator[Proposal]:
    """Exchange `==` and `!=`."""
    yield from _swap(tree, {"==": "!=", "!=": "=="})


@operator("identity_negate")
def identity_negate(tree: Tree) -> Iterator[Proposal]:
    """Exchange `is` and `is not`."""
    yield from _swap(tree, {"is": "is not", "is not": "is"})


@operator("membership_negate")
def membership_negate(tree: Tree) -> Iterator[Proposal]:
    """Exchange `in` and `not in`."""
    yield from _swap(tree, {"in": "not in", "not in": "in"})


OPERATORS: tuple[Operator, ...] = (
    comparison_boundary,
    comparison_direction,
    comparison_negate,
    equality_negate,
    identity_negate,
    membership_negate,
)
