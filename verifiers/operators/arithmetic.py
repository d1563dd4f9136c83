"""Arithmetic and bitwise operators, their operands, and augmented assignments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import libcst as cst

from verifiers.operators.base import Operator, Proposal, operator
from verifiers.operators.tree import Tree, is_atom, is_bare

_ORDERED = (cst.Subtract, cst.Divide, cst.FloorDivide, cst.Modulo, cst.LeftShift, cst.RightShift)


def _swap(tree: Tree, table: Mapping[str, tuple[str, ...]]) -> Iterator[Proposal]:
    for site, node in tree.all(cst.BinaryOperation):
        if isinstance(node.left, cst.BaseString):  # `"%s" % x` and `"-" * n` are not arithmetic
            continue
        for text in table.get(tree.source(node.operator), ()):
            yield tree.replace(site, (node.operator, text))


@operator("additive_swap")
def additive_swap(tree: Tree) -> Iterator[Proposal]:
    """Exchange `+` and `-`."""
    yield from _swap(tree, {"+": ("-",), "-": ("+",)})


@operator("multiplicative_swap")
def multiplicative_swap(tree: Tree) -> Iterator[Proposal]:
    """Exchange `*`, `/`, `//` and `%`."""
    yield from _swap(tree, {"*": ("//",), "/": ("//",), "//": ("*", "/", "%"), "%": ("//",)})


@operator("bitwise_swap")
def bitwise_swap(tree: Tree) -> Iterator[Proposal]:
    """Exchange `&`, `|` and `^`, and the two shifts."""
    yield from _swap(tree, {"&": ("|",), "|": ("&", "^"), "^": ("|",), "<<": (">>",), ">>": ("<<",)})


@operator("operand_swap")
def operand_swap(tree: Tree) -> Iterator[Proposal]:
    """Exchange the operands of `-`, `/`, `//`, `%` and shifts: `a - b` and `b - a`."""
    for site, node in tree.all(cst.BinaryOperation):
        simple = is_atom(node.left) and is_atom(node.right) and not isinstance(node.left, cst.BaseString)
        if simple and not isinstance(node.right, cst.BaseString) and isinstance(node.operator, _ORDERED):
            yield tree.swap(site, node.left, node.right)


@operator("augmented_swap")
def augmented_swap(tree: Tree) -> Iterator[Proposal]:
    """Exchange `+=` and `-=`, `*=` and `//=`, `|=` and `&=`."""
    table = {"+=": "-=", "-=": "+=", "*=": "//=", "//=": "*=", "|=": "&=", "&=": "|="}
    for site, node in tree.all(cst.AugAssign):
        text = table.get(tree.source(node.operator))
        if text is not None:
            yield tree.replace(site, (node.operator, text))


def _rebinds(tree: Tree, function: str, name: str) -> bool:
    names = tree.names[function]
    return names.bound[name] > 1 or name in names.outer


@operator("accumulate_add")
def accumulate_drop(tree: Tree) -> Iterator[Proposal]:
    """Overwrite instead of adding up: `x += e` becomes `x = e`."""
    for site, node in tree.all(cst.AugAssign):
        start, end, text = tree.between(node.target, node.value)
        if text != " += " or not isinstance(node.target, cst.Name) or not is_bare(node.target):
            continue
        if _rebinds(tree, site.function, node.target.value):
            yield tree.edit(site, start, end, " = ")


@operator("accumulate_drop")
def accumulate_add(tree: Tree) -> Iterator[Proposal]:
    """Add up instead of overwriting, where the name is bound more than once: `x = e` becomes `x += e`."""
    for site, node in tree.all(cst.Assign):
        target = node.targets[0].target
        if len(node.targets) != 1 or not isinstance(target, cst.Name) or not is_bare(target):
            continue
        start, end, text = tree.between(target, node.value)
        if text == " = " and _rebinds(tree, site.function, target.value):
            yield tree.edit(site, start, end, " += ")


OPERATORS: tuple[Operator, ...] = (
    additive_swap,
    multiplicative_swap,
    bitwise_swap,
    operand_swap,
    augmented_swap,
    accumulate_drop,
    accumulate_add,
)
