"""Return statements and parameter defaults."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from verifiers.operators.base import Operator, Proposal, operator
from verifiers.operators.tree import Tree


@operator("return_add")
def return_drop(tree: Tree) -> Iterator[Proposal]:
    """Compute a value and forget to return it: `return e` becomes `e`."""
    for site, node in tree.all(cst.Return):
        if node.value is None or isinstance(node.value, cst.SimpleString | cst.ConcatenatedString):
            continue
        start, value = tree.span(node)[0], tree.span(node.value)[0]
        if tree.text[start:value] == b"return ":
            yield tree.edit(site, start, value, "", whole=True)


@operator("return_drop")
def return_add(tree: Tree) -> Iterator[Proposal]:
    """Return what an expression statement computes: `e` becomes `return e`."""
    for site, node in tree.all(cst.Expr):
        if not isinstance(node.value, cst.Yield | cst.Await | cst.Ellipsis):
            start = tree.span(node.value)[0]
            yield tree.edit(site, start, start, "return ", whole=True)


@operator()
def return_none(tree: Tree) -> Iterator[Proposal]:
    """Return None instead of a value."""
    for site, node in tree.all(cst.Return):
        if node.value is not None and tree.source(node.value) != "None":
            yield tree.replace(site, (node.value, "None"))


@operator("default_change")
def default_change(tree: Tree) -> Iterator[Proposal]:
    """Change the default of a parameter: `True` and `False`, an integer by one."""
    for site, node in tree.all(cst.Param):
        if node.default is None:
            continue
        text = tree.source(node.default)
        values: list[str] = []
        if text in ("True", "False"):
            values = ["False" if text == "True" else "True"]
        elif text.lstrip("-").isdecimal() and str(int(text)) == text:
            values = [str(int(text) - 1), str(int(text) + 1)]
        for value in values:
            yield tree.replace(site, (node.default, value))


OPERATORS: tuple[Operator, ...] = (return_drop, return_add, return_none, default_change)
