"""Statements: dropped, exchanged, branches mixed up, loops left the wrong way."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from verifiers.operators.base import Operator, Proposal, Splice, operator
from verifiers.operators.tree import Site, Tree, is_remark

_DROPPABLE = (cst.Assign, cst.AugAssign, cst.Raise, cst.Del, cst.Assert)


@operator("loop_exit_swap")
def loop_exit_swap(tree: Tree) -> Iterator[Proposal]:
    """Exchange `break` and `continue`."""
    for site, node in tree.all(cst.Break):
        yield tree.edit(site, *tree.span(node), "continue", whole=True)
    for site, node in tree.all(cst.Continue):
        yield tree.edit(site, *tree.span(node), "break", whole=True)


@operator()
def statement_drop(tree: Tree) -> Iterator[Proposal]:
    """Replace an assignment, a call, `raise`, `del` or `assert` by `pass`."""
    for site, line in tree.all(cst.SimpleStatementLine):
        node = line.body[0]
        if len(line.body) != 1:
            continue
        if isinstance(node, _DROPPABLE) or (isinstance(node, cst.Expr) and isinstance(node.value, cst.Call)):
            yield tree.edit(site, *tree.span(node), "pass", whole=True)


def _movable(node: cst.CSTNode) -> bool:
    still = (cst.Import, cst.ImportFrom, cst.Global, cst.Nonlocal, cst.Pass)
    return (
        isinstance(node, cst.SimpleStatementLine)
        and len(node.body) == 1
        and not isinstance(node.body[0], still)
        and not is_remark(node.body[0])
    )


@operator("statement_swap")
def statement_swap(tree: Tree) -> Iterator[Proposal]:
    """Exchange two neighbouring simple statements."""
    for site, block in tree.all(cst.IndentedBlock):
        for left, right in zip(block.body, block.body[1:], strict=False):
            if _movable(left) and _movable(right) and tree.source(left) != tree.source(right):
                yield _exchange(tree, site, tree.span(left), tree.span(right))


def _exchange(tree: Tree, site: Site, left: tuple[int, int], right: tuple[int, int]) -> Proposal:
    before, after = (tree.text[slice(*span)].decode() for span in (left, right))
    return Proposal((Splice(*left, after), Splice(*right, before)), site.function, None)


@operator("branch_swap")
def branch_swap(tree: Tree) -> Iterator[Proposal]:
    """Exchange the bodies of `if` and `else`."""
    for site, node in tree.all(cst.If):
        if not isinstance(node.orelse, cst.Else):
            continue
        body, orelse = node.body, node.orelse.body
        indented = isinstance(body, cst.IndentedBlock) and isinstance(orelse, cst.IndentedBlock)
        if indented and tree.source(body) != tree.source(orelse):
            yield _exchange(tree, site, tree.span(body), tree.span(orelse))


@operator("elif_join")
def elif_split(tree: Tree) -> Iterator[Proposal]:
    """Test a second condition even where the first one held: `elif` becomes `if`."""
    for site, node in tree.all(cst.If):
        if isinstance(site.above, cst.If) and site.above.orelse is node:
            start = tree.span(node)[0]
            yield tree.edit(site, start, start + len("elif"), "if", whole=True)


@operator("elif_split")
def elif_join(tree: Tree) -> Iterator[Proposal]:
    """Test a condition only where the one before it failed: `if` after an `if` becomes `elif`."""
    for site, block in tree.all(cst.IndentedBlock):
        for left, right in zip(block.body, block.body[1:], strict=False):
            if isinstance(left, cst.If) and isinstance(right, cst.If) and _is_open(left):
                start = tree.span(right)[0]
                yield tree.edit(site, start, start + len("if"), "elif", whole=True)


def _is_open(node: cst.If) -> bool:
    """The chain ends without `else`."""
    while isinstance(node.orelse, cst.If):
        node = node.orelse
    return node.orelse is None


OPERATORS: tuple[Operator, ...] = (
    loop_exit_swap,
    statement_drop,
    statement_swap,
    branch_swap,
    elif_split,
    elif_join,
)
