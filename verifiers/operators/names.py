"""Wrong names: variables, attributes of `self`, string keys, exception types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import libcst as cst

from verifiers.operators.base import Operator, Proposal, operator
from verifiers.operators.tree import Site, Tree, is_bare

_EXCEPTIONS = (
    ("ValueError", "TypeError"),
    ("KeyError", "IndexError"),
    ("AttributeError", "NameError"),
    ("StopIteration", "GeneratorExit"),
    ("OSError", "RuntimeError"),
    ("ImportError", "LookupError"),
)
_LOOKUPS = frozenset({"get", "pop", "setdefault"})


def neighbours(names: Sequence[str], name: str) -> list[str]:
    """The one before and the one after in a ring: a symmetric relation, so every swap has its way back."""
    at = names.index(name)
    around = [names[at - 1], names[(at + 1) % len(names)]]
    return [other for other in dict.fromkeys(around) if other != name]


def _is_read(site: Site) -> bool:
    """A name that is evaluated, not bound, declared or used as a label."""
    node, above = site.node, site.above
    if isinstance(above, cst.Attribute):
        return above.value is node
    if isinstance(above, cst.Arg):
        return above.value is node
    if isinstance(above, cst.Param):
        return above.default is node
    if isinstance(above, cst.For | cst.CompFor):
        return above.iter is node
    if isinstance(above, cst.AugAssign | cst.AnnAssign | cst.NamedExpr):
        return above.value is node
    if isinstance(above, cst.Element):
        outer = site.parent and site.parent.above
        holder = site.parent and site.parent.parent and site.parent.parent.above
        return not (isinstance(outer, cst.Tuple | cst.List) and _binds(holder, outer))
    bound = (
        cst.AssignTarget
        | cst.FunctionDef
        | cst.ClassDef
        | cst.AsName
        | cst.Del
        | cst.NameItem
        | cst.MatchPattern
    )
    return not isinstance(above, bound)


def _binds(holder: cst.CSTNode | None, node: cst.CSTNode) -> bool:
    """A tuple that is unpacked into (nested unpacking counts as well)."""
    if isinstance(holder, cst.AssignTarget | cst.AsName | cst.Del | cst.Element):
        return True
    return isinstance(holder, cst.For | cst.CompFor) and holder.target is node


@operator("name_swap")
def name_swap(tree: Tree) -> Iterator[Proposal]:
    """Read another local variable or parameter: its neighbour in order of appearance."""
    rings = {function: names.ring() for function, names in tree.names.items()}
    for site, node in tree.all(cst.Name):
        ring = rings.get(site.function, [])
        if node.value in ring and _is_read(site) and not site.default and is_bare(node):
            for other in neighbours(ring, node.value):
                yield tree.replace(site, (node, other))


def _frequent_swaps(tree: Tree, uses: list[tuple[Site, cst.CSTNode, str]]) -> Iterator[Proposal]:
    """Swap labels with their neighbours, where the label stays in use elsewhere in the function, so that
    the way back is still offered."""
    counts: dict[str, Counter[str]] = {}
    for site, _, label in uses:
        counts.setdefault(site.function, Counter())[label] += 1
    for site, node, label in uses:
        used = counts[site.function]
        if used[label] > 1:
            for other in neighbours(sorted(used), label):
                yield tree.replace(site, (node, other))


@operator("attribute_swap")
def attribute_swap(tree: Tree) -> Iterator[Proposal]:
    """Use another attribute of `self` that the function uses too."""
    uses: list[tuple[Site, cst.CSTNode, str]] = []
    for site, node in tree.all(cst.Attribute):
        called = isinstance(site.above, cst.Call) and site.above.func is node
        if isinstance(node.value, cst.Name) and node.value.value == "self" and not called:
            uses.append((site, node.attr, node.attr.value))
    yield from _frequent_swaps(tree, uses)


@operator("key_swap")
def key_swap(tree: Tree) -> Iterator[Proposal]:
    """Use another string key that the function uses too."""
    uses: list[tuple[Site, cst.CSTNode, str]] = []
    for site, node in tree.all(cst.SimpleString):
        above, further = site.above, site.parent and site.parent.above
        is_key = isinstance(above, cst.Index) or (isinstance(above, cst.DictElement) and above.key is node)
        if isinstance(above, cst.Arg) and isinstance(further, cst.Call) and further.args[0] is above:
            is_key = isinstance(further.func, cst.Attribute) and further.func.attr.value in _LOOKUPS
        if is_key:
            uses.append((site, node, tree.source(node)))
    yield from _frequent_swaps(tree, uses)


@operator("exception_swap")
def exception_swap(tree: Tree) -> Iterator[Proposal]:
    """Raise or catch a similar exception: `ValueError` and `TypeError`, `KeyError` and `IndexError`, ..."""
    table = {a: b for pair in _EXCEPTIONS for a, b in (pair, pair[::-1])}
    for site, node in tree.all(cst.Name):
        if node.value in table and _is_read(site):
            yield tree.replace(site, (node, table[node.value]))


OPERATORS: tuple[Operator, ...] = (name_swap, attribute_swap, key_swap, exception_swap)
