"""Off by one: constants, indices, slices, counts."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from verifiers.operators.base import Operator, Proposal, operator
from verifiers.operators.tree import PLACES, Site, Tree, is_bare

_SUMS = (cst.Add, cst.Subtract, cst.Multiply, cst.FloorDivide)
_ORDER = (cst.LessThan, cst.LessThanEqual, cst.GreaterThan, cst.GreaterThanEqual)


def _integers(tree: Tree) -> Iterator[tuple[Site, cst.CSTNode, int]]:
    """Decimal literals with their sign, in the spelling that `str(value)` gives back."""
    for site, node in tree.all(cst.Integer):
        above = site.above
        negative = isinstance(above, cst.UnaryOperation) and isinstance(above.operator, cst.Minus)
        if negative and site.parent is not None and isinstance(above, cst.UnaryOperation):
            site, whole = site.parent, above
        else:
            whole = node
        text = tree.source(whole)
        if is_bare(node) and text.lstrip("-").isdecimal() and str(int(text)) == text:
            yield site, whole, int(text)


def _shift(tree: Tree, by: int) -> Iterator[Proposal]:
    for site, node, value in _integers(tree):
        tight = isinstance(site.above, cst.Attribute) or (
            isinstance(site.above, cst.BinaryOperation) and isinstance(site.above.operator, cst.Power)
        )
        ends = isinstance(site.above, cst.Index) and {value, value + by} == {0, -1}
        # below zero the literal becomes a unary minus, which `**` and `.` bind differently
        if not site.default and not ends and not (tight and min(value, value + by) < 0):
            yield tree.replace(site, (node, str(value + by)))


@operator("constant_decrement")
def constant_increment(tree: Tree) -> Iterator[Proposal]:
    """Make an integer constant one larger."""
    yield from _shift(tree, 1)


@operator("constant_increment")
def constant_decrement(tree: Tree) -> Iterator[Proposal]:
    """Make an integer constant one smaller."""
    yield from _shift(tree, -1)


@operator("index_end_swap")
def index_end_swap(tree: Tree) -> Iterator[Proposal]:
    """Take the other end of a sequence: index `0` and index `-1`."""
    for site, node, value in _integers(tree):
        if isinstance(site.above, cst.Index) and value in (0, -1):
            yield tree.replace(site, (node, str(-1 - value)))


def _counts(tree: Tree) -> Iterator[tuple[Site, cst.BaseExpression]]:
    """Where an expression counts something: an index, a slice bound, `range`, one side of an order."""
    for site in tree.sites:
        node, parent = site.node, site.above
        if not isinstance(node, cst.BaseExpression) or site.parent is None:
            continue
        if isinstance(parent, cst.Arg):
            call = site.parent.above
            counts = (
                isinstance(call, cst.Call) and isinstance(call.func, cst.Name) and call.func.value == "range"
            )
        elif isinstance(parent, cst.Comparison):
            counts = isinstance(parent.comparisons[0].operator, _ORDER)
        elif isinstance(parent, cst.ComparisonTarget):
            counts = isinstance(parent.operator, _ORDER)
        else:
            counts = isinstance(parent, cst.Index | cst.Slice)
        if counts:
            yield site, node


def _is_countable(node: cst.CSTNode) -> bool:
    """Text to which ` + 1` can be added and binds as meant."""
    sums = isinstance(node, cst.BinaryOperation) and isinstance(node.operator, _SUMS)
    return is_bare(node) and (sums or isinstance(node, PLACES))


@operator("offset_remove")
def offset_insert(tree: Tree) -> Iterator[Proposal]:
    """Count one more or one less: `n` becomes `n - 1` or `n + 1` in indices, slices, ranges and orders."""
    for site, node in _counts(tree):
        if _is_countable(node):
            for offset in (" - 1", " + 1"):
                yield tree.replace(site, (node, tree.source(node) + offset))


@operator("offset_insert")
def offset_remove(tree: Tree) -> Iterator[Proposal]:
    """Forget an offset of one: `n - 1` or `n + 1` becomes `n` in indices, slices, ranges and orders."""
    for site, node in _counts(tree):
        if isinstance(node, cst.BinaryOperation) and is_bare(node) and _is_countable(node.left):
            left = tree.source(node.left)
            if tree.source(node) in (f"{left} - 1", f"{left} + 1"):
                yield tree.replace(site, (node, left))


@operator("slice_widen")
def slice_narrow(tree: Tree) -> Iterator[Proposal]:
    """Leave out one element: `x[:n]` becomes `x[1:n]`, `x[n:]` becomes `x[n:-1]`."""
    for site, node in tree.all(cst.Slice):
        start, end = tree.span(node)
        if node.lower is None:
            yield tree.edit(site, start, start, "1")
        if node.upper is None and node.step is None and tree.text[start:end].endswith(b":"):
            yield tree.edit(site, end, end, "-1")


@operator("slice_narrow")
def slice_widen(tree: Tree) -> Iterator[Proposal]:
    """Take in one element: `x[1:n]` becomes `x[:n]`, `x[n:-1]` becomes `x[n:]`."""
    for site, node in tree.all(cst.Slice):
        start, end = tree.span(node)
        if node.lower is not None and tree.text[start:end].startswith(b"1:"):
            yield tree.edit(site, start, start + 1, "")
        if node.upper is not None and node.step is None and tree.text[start:end].endswith(b":-1"):
            yield tree.edit(site, end - 2, end, "")


@operator("enumerate_shift")
def enumerate_shift(tree: Tree) -> Iterator[Proposal]:
    """Count from the other start: `enumerate(x)` and `enumerate(x, 1)`."""
    for site, node in tree.all(cst.Call):
        if not isinstance(node.func, cst.Name) or node.func.value != "enumerate" or not node.args:
            continue
        if any(arg.keyword or arg.star for arg in node.args):
            continue
        end = tree.span(node.args[0].value)[1]
        close = tree.span(node)[1] - len(node.rpar)
        rest = tree.text[end:close].decode()
        if rest == ")":
            yield tree.edit(site, end, end, ", 1")
        elif rest == ", 1)":
            yield tree.edit(site, end, close - 1, "")


OPERATORS: tuple[Operator, ...] = (
    constant_increment,
    constant_decrement,
    index_end_swap,
    offset_insert,
    offset_remove,
    slice_narrow,
    slice_widen,
    enumerate_shift,
)
