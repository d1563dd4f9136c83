"""Conditions: negations, `and` and `or`, truth constants, ternaries."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from verifiers.operators.base import Operator, Proposal, operator
from verifiers.operators.tree import PLACES, Site, Tree, is_atom, is_bare


def _conditions(tree: Tree) -> Iterator[tuple[Site, cst.CSTNode, bool]]:
    """Expressions that are taken for true or false; the flag says that nothing binds around them."""
    for site in tree.sites:
        node, parent = site.node, site.above
        if isinstance(parent, cst.If | cst.While | cst.Assert | cst.CompIf) and parent.test is node:
            yield site, node, True
        elif isinstance(parent, cst.IfExp) and parent.test is node:
            yield site, node, False
        elif isinstance(parent, cst.Return) and isinstance(node, cst.BaseExpression):
            yield site, node, True
        elif isinstance(parent, cst.BooleanOperation) and node in (parent.left, parent.right):
            yield site, node, False


@operator("negation_drop")
def negation_add(tree: Tree) -> Iterator[Proposal]:
    """Negate a condition: `c` becomes `not c`."""
    for site, node, loose in _conditions(tree):
        text = tree.source(node)
        if isinstance(node, PLACES) and is_bare(node) and text not in ("True", "False", "None"):
            yield tree.replace(site, (node, f"not {text}"))
        elif isinstance(node, cst.BooleanOperation) and is_bare(node) and loose:
            yield tree.replace(site, (node, f"not ({text})"))
        elif isinstance(node, cst.BooleanOperation) and len(node.lpar) == 1 and not loose:
            yield tree.replace(site, (node, f"not {text}"))


@operator("negation_add")
def negation_drop(tree: Tree) -> Iterator[Proposal]:
    """Forget a negation: `not c` becomes `c`."""
    for site, node, loose in _conditions(tree):
        if not isinstance(node, cst.UnaryOperation) or not isinstance(node.operator, cst.Not):
            continue
        inner, text = node.expression, tree.source(node.expression)
        if not is_bare(node) or tree.source(node) != f"not {text}":
            continue
        if isinstance(inner, PLACES) and is_bare(inner):
            yield tree.replace(site, (node, text))
        elif isinstance(inner, cst.BooleanOperation) and len(inner.lpar) == 1:
            if not loose:
                yield tree.replace(site, (node, text))
            elif text[1:-1].strip() == text[1:-1] and "\n" not in text:
                yield tree.replace(site, (node, text[1:-1]))


@operator("boolean_swap")
def boolean_swap(tree: Tree) -> Iterator[Proposal]:
    """Exchange `and` and `or`."""
    for site, node in tree.all(cst.BooleanOperation):
        yield tree.replace(site, (node.operator, "or" if isinstance(node.operator, cst.And) else "and"))


@operator("boolean_constant")
def boolean_constant(tree: Tree) -> Iterator[Proposal]:
    """Exchange `True` and `False`."""
    for site, node in tree.all(cst.Name):
        if node.value in ("True", "False") and not site.default:
            yield tree.replace(site, (node, "False" if node.value == "True" else "True"))


@operator("ternary_swap")
def ternary_swap(tree: Tree) -> Iterator[Proposal]:
    """Exchange the two values of a conditional expression."""
    for site, node in tree.all(cst.IfExp):
        loose = any(isinstance(n, cst.IfExp | cst.Lambda) and is_bare(n) for n in (node.body, node.orelse))
        if not loose and tree.source(node.body) != tree.source(node.orelse):
            yield tree.swap(site, node.body, node.orelse)


@operator()
def operand_drop(tree: Tree) -> Iterator[Proposal]:
    """Keep one operand of `and` or `or`."""
    for site, node in tree.all(cst.BooleanOperation):
        for part in (node.left, node.right):
            if is_bare(node):
                yield tree.replace(site, (node, tree.source(part)))


@operator()
def condition_fix(tree: Tree) -> Iterator[Proposal]:
    """Replace the test of an `if` by `True` or `False`, of a `while` by `False`."""
    for site in tree.sites:
        node = site.node
        if isinstance(node, cst.If | cst.While | cst.IfExp) and is_atom_or_wide(node.test):
            values = ("False",) if isinstance(node, cst.While) else ("True", "False")
            test = Site(node.test, site, site.function, site.unit or node.test, site.default)
            for value in values:
                yield tree.replace(test, (node.test, value))


def is_atom_or_wide(node: cst.CSTNode) -> bool:
    """Not itself a constant."""
    return not (is_atom(node) and isinstance(node, cst.Name) and node.value in ("True", "False"))


OPERATORS: tuple[Operator, ...] = (
    negation_add,
    negation_drop,
    boolean_swap,
    boolean_constant,
    ternary_swap,
    operand_drop,
    condition_fix,
)
