"""One function, parsed once by libcst, with the byte span of every node that operators may edit.

Decorators, annotations, docstrings and imports are left out: no operator can reach them. An indented
function is parsed as the body of an `if`, so that no text is dedented and offsets stay true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper

from verifiers.operators.base import Proposal, Splice

N = TypeVar("N", bound=cst.CSTNode)

_SKIPPED = (
    cst.BaseParenthesizableWhitespace,
    cst.TrailingWhitespace,
    cst.EmptyLine,
    cst.Newline,
    cst.Comment,
    cst.Annotation,
    cst.Decorator,
    cst.Import,
    cst.ImportFrom,
    cst.Global,
    cst.Nonlocal,
    cst.LeftParen,
    cst.RightParen,
    cst.TypeParameters,
    cst.TypeAlias,
)
_ATOMS = (
    cst.Name,
    cst.Attribute,
    cst.Call,
    cst.Subscript,
    cst.BaseNumber,
    cst.BaseString,
    cst.BaseList,
    cst.BaseDict,
    cst.BaseSet,
)
PLACES = (cst.Name, cst.Attribute, cst.Call, cst.Subscript)
"""Expressions that stand for some value and bind tighter than any operator."""


@dataclass(frozen=True, eq=False, slots=True)
class Site:
    """A node with what surrounds it."""

    node: cst.CSTNode
    parent: Site | None
    function: str
    unit: cst.CSTNode | None
    """Innermost simple statement, or outermost expression of a compound statement's header."""
    default: bool
    """Inside a parameter's default value."""

    @property
    def above(self) -> cst.CSTNode | None:
        return self.parent.node if self.parent else None


@dataclass
class Names:
    """Names of one function."""

    bound: Counter[str] = field(default_factory=Counter[str])
    """How often each is bound: parameters, assignments, loop and `with` targets; in order of appearance."""
    outer: set[str] = field(default_factory=set[str])
    """Declared `global` or `nonlocal`."""

    def ring(self) -> list[str]:
        """Bound names in order of appearance, without `self` and `cls`."""
        return [name for name in self.bound if name not in ("self", "cls", "_")]


class Tree:
    """The parsed text of one outermost function.

    `text` is the function's lines as UTF-8; spans are byte offsets into it.
    """

    def __init__(self, text: bytes, prefix: str = "") -> None:
        self.text = text
        indented = text[:1] in (b" ", b"\t")
        header = b"if 1:\n" if indented else b""
        wrapper = MetadataWrapper(cst.parse_module(header + text), unsafe_skip_copy=True)
        self._shift = len(header)
        self._spans = wrapper.resolve(ByteSpanPositionProvider)
        collector = _Collector(prefix)
        wrapper.module.visit(collector)
        self.sites = collector.sites
        self.names = collector.names
        self._by_type: dict[type[cst.CSTNode], list[Site]] = {}
        for site in self.sites:
            self._by_type.setdefault(type(site.node), []).append(site)

    def all(self, kind: type[N]) -> Iterator[tuple[Site, N]]:
        """Sites of exactly one node type, in source order."""
        for site in self._by_type.get(kind, ()):
            assert isinstance(site.node, kind)
            yield site, site.node

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Bytes of a node, its own parentheses included."""
        span = self._spans[node]
        start, end = span.start, span.start + span.length
        for paren in getattr(node, "lpar", ())[:1]:
            start = self._spans[paren].start
        for paren in getattr(node, "rpar", ())[-1:]:
            end = self._spans[paren].start + self._spans[paren].length
        return start - self._shift, end - self._shift

    def source(self, node: cst.CSTNode) -> str:
        start, end = self.span(node)
        return self.text[start:end].decode()

    def between(self, left: cst.CSTNode, right: cst.CSTNode) -> tuple[int, int, str]:
        """Span and text from the end of one node to the start of a later one."""
        start, end = self.span(left)[1], self.span(right)[0]
        return start, end, self.text[start:end].decode()

    def replace(self, site: Site, *changes: tuple[cst.CSTNode, str]) -> Proposal:
        """Replace whole nodes by texts; checked inside the site's unit."""
        splices = sorted(Splice(*self.span(node), text) for node, text in changes)
        return Proposal(tuple(splices), site.function, self._unit(site))

    def swap(self, site: Site, left: cst.CSTNode, right: cst.CSTNode) -> Proposal:
        """Exchange the texts of two nodes."""
        return self.replace(site, (left, self.source(right)), (right, self.source(left)))

    def edit(self, site: Site, start: int, end: int, text: str, *, whole: bool = False) -> Proposal:
        """Replace a byte range; `whole`: the edit can only be checked with the whole function."""
        return Proposal((Splice(start, end, text),), site.function, None if whole else self._unit(site))

    def _unit(self, site: Site) -> tuple[int, int] | None:
        return self.span(site.unit) if site.unit is not None else None


class _Collector(cst.CSTVisitor):
    """One walk that keeps the sites and the bindings of each function."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.sites: list[Site] = []
        self.names: dict[str, Names] = {}
        self._stack: list[Site] = []
        self._prefix = [prefix]

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, _SKIPPED) or is_remark(node):
            if isinstance(node, cst.Global | cst.Nonlocal) and self._stack:
                outer = self.names[self._stack[-1].function].outer
                outer.update(item.name.value for item in node.names)
            return False
        parent = self._stack[-1] if self._stack else None
        function = parent.function if parent else ""
        if isinstance(node, cst.FunctionDef):
            function = self._prefix[-1] + node.name.value
            self._prefix.append(f"{function}.<locals>.")
            self.names.setdefault(function, Names())
        elif isinstance(node, cst.ClassDef):
            self._prefix.append(f"{self._prefix[-1]}{node.name.value}.")
        unit = parent.unit if parent else None
        if unit is None and isinstance(node, cst.BaseSmallStatement | cst.BaseExpression):
            unit = node
        default = bool(parent and (parent.default or _is_default(node, parent.node)))
        site = Site(node, parent, function, unit, default)
        self._bind(node, site)
        self._stack.append(site)
        if function:
            self.sites.append(site)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if self._stack and self._stack[-1].node is original_node:
            self._stack.pop()
            if isinstance(original_node, cst.FunctionDef | cst.ClassDef):
                self._prefix.pop()

    def _bind(self, node: cst.CSTNode, site: Site) -> None:
        targets: list[cst.CSTNode] = []
        if isinstance(node, cst.AssignTarget | cst.AugAssign | cst.AnnAssign | cst.For | cst.NamedExpr):
            targets = [node.target]
        elif isinstance(node, cst.WithItem | cst.ExceptHandler) and isinstance(
            asname := (node.asname if isinstance(node, cst.WithItem) else None), cst.AsName
        ):
            targets = [asname.name]
        elif isinstance(node, cst.Param):
            targets = [node.name]
        if site.function:
            self.names[site.function].bound.update(name for t in targets for name in _target_names(t))


def _target_names(target: cst.CSTNode) -> Iterator[str]:
    if isinstance(target, cst.Name):
        yield target.value
    elif isinstance(target, cst.Tuple | cst.List):
        for element in target.elements:
            yield from _target_names(element.value)


def _is_default(node: cst.CSTNode, parent: cst.CSTNode) -> bool:
    return isinstance(parent, cst.Param) and parent.default is node


def is_remark(node: cst.CSTNode) -> bool:
    """A statement that is nothing but a string: a docstring or a comment in disguise."""
    return isinstance(node, cst.Expr) and isinstance(node.value, cst.SimpleString | cst.ConcatenatedString)


def is_atom(node: cst.CSTNode) -> bool:
    """Binds tighter than any operator, or stands in parentheses."""
    return bool(getattr(node, "lpar", ())) or isinstance(node, _ATOMS)


def is_bare(node: cst.CSTNode) -> bool:
    """Without parentheses of its own."""
    return not getattr(node, "lpar", ())


@lru_cache(maxsize=32)
def parse(text: str, prefix: str) -> Tree:
    """The tree of one outermost function. `prefix` is what precedes its name in qualified names."""
    return Tree(text.encode(), prefix)
