"""Calls: the order of arguments, look-alike callables, missing conversions; elements of tuples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import libcst as cst

from verifiers.operators.base import Operator, Proposal, operator
from verifiers.operators.tree import Tree, is_atom, is_bare

_FUNCTIONS = (
    ("min", "max"),
    ("any", "all"),
    ("sorted", "reversed"),
    ("floor", "ceil"),
    ("isinstance", "issubclass"),
    ("getattr", "hasattr"),
)
_METHODS = (
    ("append", "extend"),
    ("lstrip", "rstrip", "strip"),
    ("startswith", "endswith"),
    ("find", "rfind"),
    ("index", "rindex"),
    ("split", "rsplit"),
    ("partition", "rpartition"),
    ("lower", "upper"),
    ("keys", "values", "items"),
    ("add", "discard"),
    ("union", "intersection"),
    ("update", "setdefault"),
    ("pop", "popitem"),
    ("floor", "ceil"),
    ("min", "max"),
)
_COLLECTIONS = frozenset({"list", "tuple", "set", "frozenset", "dict", "sorted", "reversed", "iter"})
_CONVERSIONS = _COLLECTIONS | {"str", "int", "float", "bool", "abs", "len", "repr", "bytes"}
_UNORDERED = frozenset({"isinstance", "issubclass", "startswith", "endswith"})


def _partners(groups: tuple[tuple[str, ...], ...]) -> Mapping[str, tuple[str, ...]]:
    return {name: tuple(n for n in group if n != name) for group in groups for name in group}


_FUNCTION_PARTNERS = _partners(_FUNCTIONS)
_METHOD_PARTNERS = _partners(_METHODS)


@operator("argument_swap")
def argument_swap(tree: Tree) -> Iterator[Proposal]:
    """Exchange two neighbouring positional arguments."""
    for site, node in tree.all(cst.Call):
        for left, right in zip(node.args, node.args[1:], strict=False):
            plain = not (left.keyword or left.star or right.keyword or right.star)
            if plain and tree.source(left.value) != tree.source(right.value):
                yield tree.swap(site, left.value, right.value)


@operator("callee_swap")
def callee_swap(tree: Tree) -> Iterator[Proposal]:
    """Call a look-alike: `min` and `max`, `any` and `all`, `startswith` and `endswith`, ..."""
    for site, node in tree.all(cst.Call):
        if isinstance(node.func, cst.Name):
            name, partners = node.func, _FUNCTION_PARTNERS
        elif isinstance(node.func, cst.Attribute):
            name, partners = node.func.attr, _METHOD_PARTNERS
        else:
            continue
        for other in partners.get(name.value, ()):
            yield tree.replace(site, (name, other))


@operator()
def conversion_drop(tree: Tree) -> Iterator[Proposal]:
    """Forget a conversion: `list(x)` becomes `x`; likewise `sorted`, `str`, `int`, `len`, ..."""
    for site, node in tree.all(cst.Call):
        if not isinstance(node.func, cst.Name) or node.func.value not in _CONVERSIONS:
            continue
        if len(node.args) == 1 and not node.args[0].star and not node.args[0].keyword:
            value = node.args[0].value
            text = tree.source(value)
            yield tree.replace(site, (node, text if is_atom(value) else f"({text})"))


@operator("tuple_swap")
def tuple_swap(tree: Tree) -> Iterator[Proposal]:
    """Exchange two neighbouring elements of a tuple of at most four."""
    for site, node in tree.all(cst.Tuple):
        if not 2 <= len(node.elements) <= 4 or _is_unordered(site.above, site.parent and site.parent.above):
            continue
        for left, right in zip(node.elements, node.elements[1:], strict=False):
            plain = isinstance(left, cst.Element) and isinstance(right, cst.Element)
            loose = any(
                isinstance(e.value, cst.Lambda | cst.IfExp) and is_bare(e.value) for e in (left, right)
            )
            if plain and not loose and tree.source(left.value) != tree.source(right.value):
                yield tree.swap(site, left.value, right.value)


def _is_unordered(above: cst.CSTNode | None, further: cst.CSTNode | None) -> bool:
    """The tuple is a set of alternatives, whose order means nothing."""
    if isinstance(above, cst.ComparisonTarget):
        return isinstance(above.operator, cst.In | cst.NotIn)
    if isinstance(above, cst.Arg) and isinstance(further, cst.Call):
        name = further.func.attr if isinstance(further.func, cst.Attribute) else further.func
        return isinstance(name, cst.Name) and name.value in _UNORDERED
    return isinstance(above, cst.ExceptHandler)


OPERATORS: tuple[Operator, ...] = (argument_swap, callee_swap, conversion_drop, tuple_swap)
