"""All checked edits of a file."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Collection, Iterator
from types import CodeType

from verifiers.operators import (
    arithmetic,
    boundaries,
    calls,
    comparisons,
    conditions,
    names,
    returns,
    statements,
)
from verifiers.operators.base import Edit, Operator, Proposal, Splice, changed_lines, splice
from verifiers.operators.spans import FunctionSpan, functions
from verifiers.operators.tree import Tree, parse

OPERATORS: dict[str, Operator] = {
    op.name: op
    for module in (comparisons, boundaries, arithmetic, conditions, returns, calls, names, statements)
    for op in module.OPERATORS
}
"""Every operator by name, in the order in which edits at one place are listed."""


def inverse(name: str) -> tuple[str, ...]:
    """Names of the operators that can undo `name`."""
    return OPERATORS[name].inverse


def edits(
    source: str,
    *,
    functions: Collection[str] | None = None,
    operators: Collection[str] | None = None,
) -> list[Edit]:
    """Every edit of `source` that parses and changes the syntax tree, in a fixed order: by function, then by
    place, then by operator.

    `functions` limits them to the functions of these qualified names and what is nested in them, `operators`
    to these kinds. A file that does not parse has none. Two operators may give
    the same text. Raises ValueError for an unknown operator.
    """
    unknown = set(operators or ()) - OPERATORS.keys()
    if unknown:
        raise ValueError(f"unknown operators {sorted(unknown)}; known: {', '.join(OPERATORS)}")
    chosen = [op for op in OPERATORS.values() if operators is None or op.name in operators]
    found: list[Edit] = []
    with warnings.catch_warnings():
        # compiling an edit may warn of `is` with a literal or of an invalid escape: not our concern
        warnings.simplefilter("ignore")
        for span in _outermost(source, functions):
            found += _edits_of(source, span, functions, chosen)
    return found


def _outermost(source: str, wanted: Collection[str] | None) -> Iterator[FunctionSpan]:
    """Outermost functions that are wanted themselves or contain a wanted one."""
    for span in functions(source):
        inside = f"{span.qualname}.<locals>."
        if span.top and (
            _within(span.qualname, wanted) or any(name.startswith(inside) for name in wanted or ())
        ):
            yield span


def _within(function: str, wanted: Collection[str] | None) -> bool:
    """Wanted, or nested in a wanted one."""
    if wanted is None:
        return True
    parts = function.split(".<locals>.")
    return any(".<locals>.".join(parts[:n]) in wanted for n in range(1, len(parts) + 1))


def _edits_of(
    source: str, span: FunctionSpan, wanted: Collection[str] | None, chosen: list[Operator]
) -> Iterator[Edit]:
    text = source[span.start : span.end]
    tree = parse(text, span.qualname.rpartition(".")[0] + "." if "." in span.qualname else "")
    order = {op.name: i for i, op in enumerate(chosen)}
    proposals = [
        (proposal.splices, order[op.name], op.name, proposal)
        for op in chosen
        for proposal in op.find(tree)
        if _within(proposal.function, wanted)
    ]
    checker = _Checker(tree)
    for splices, _, name, proposal in sorted(proposals, key=lambda p: (p[0][0].start, p[1], p[0])):
        if checker.changes(proposal):
            index, before, after = changed_lines(tree.text, splices)
            new = splice(tree.text, splices).decode()
            line = span.start_line + index
            yield Edit(name, proposal.function, line, before, after, source, (span.start, span.end), new)


class _Checker:
    """Tells whether a proposal parses and differs, looking at no more text than it must."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._units: dict[tuple[int, int], str | None] = {}
        self._code: tuple[object, ...] | None = None

    def changes(self, proposal: Proposal) -> bool:
        if proposal.unit is None:
            if self._code is None:
                self._code = _compiled(self._tree.text)
            new = _compiled(splice(self._tree.text, proposal.splices))
            return new is not None and new != self._code
        start, end = proposal.unit
        if proposal.unit not in self._units:
            self._units[proposal.unit] = _dumped(self._tree.text[start:end])
        moved = tuple(Splice(s.start - start, s.end - start, s.text) for s in proposal.splices)
        new = _dumped(splice(self._tree.text[start:end], moved))
        return new is not None and new != self._units[proposal.unit]


def _dumped(text: bytes) -> str | None:
    """The syntax tree of a simple statement or an expression; None: it does not parse.

    A header's expression may run over several lines inside parentheses that are not part of it.
    """
    bare, wrapped = text, b"(\n" + text + b"\n)"
    for attempt in (wrapped, bare) if b"\n" in text else (bare, wrapped):
        try:
            return ast.dump(ast.parse(attempt))
        except SyntaxError:
            continue
    return None


def _compiled(text: bytes) -> tuple[object, ...] | None:
    """What a function compiles to, without positions; None: it does not compile."""
    header = b"if 1:\n" if text[:1] in (b" ", b"\t") else b""
    try:
        return _plain(compile(header + text, "<edit>", "exec", dont_inherit=True))
    except (SyntaxError, ValueError):
        return None


def _plain(code: CodeType) -> tuple[object, ...]:
    constants = tuple(
        _plain(c) if isinstance(c, CodeType) else (type(c).__name__, repr(c)) for c in code.co_consts
    )
    return (
        code.co_code,
        code.co_names,
        code.co_varnames,
        code.co_cellvars,
        code.co_flags,
        code.co_exceptiontable,
        constants,
    )
