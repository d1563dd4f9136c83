"""What an operator is, and what it yields.

An operator looks at one parsed function (`verifiers.operators.tree.Tree`) and proposes splices of its
text. It never sees a rendered module: everything outside the splices stays byte for byte, so comments,
spacing and line numbers survive, and the opposite splice restores the very same file.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from verifiers.operators.tree import Tree


class Splice(NamedTuple):
    """Replace bytes `start:end` of a function's text with `text`."""

    start: int
    end: int
    text: str


Splices = tuple[Splice, ...]
"""Disjoint splices of one edit in ascending order."""


class Proposal(NamedTuple):
    """One possible edit before it is checked."""

    splices: Splices
    function: str
    """Qualified name of the innermost function around the edit."""
    unit: tuple[int, int] | None
    """Byte range of the statement or expression in which the edit can be checked on its own; None: the
    whole function must be compiled."""


@dataclass(frozen=True)
class Operator:
    """One kind of edit."""

    name: str
    doc: str
    inverse: tuple[str, ...]
    """Names of the operators that can undo its edits; empty: an edit loses text for good."""
    find: Callable[[Tree], Iterator[Proposal]]

    @property
    def invertible(self) -> bool:
        """Whether every edit is undone by some edit of the operators named in `inverse`."""
        return bool(self.inverse)


def operator(*inverse: str) -> Callable[[Callable[[Tree], Iterator[Proposal]]], Operator]:
    """Make an operator of a function; its name is the function's, its `doc` the docstring's first line."""

    def make(find: Callable[[Tree], Iterator[Proposal]]) -> Operator:
        assert find.__doc__, f"operator {find.__name__} needs a docstring"
        return Operator(find.__name__, find.__doc__.strip().splitlines()[0], inverse, find)

    return make


@dataclass(frozen=True)
class Edit:
    """One checked edit of a file. `source`, the whole new file, is put together when asked for."""

    operator: str
    function: str
    """Qualified name in the file, as `__qualname__` writes it (`Outer.<locals>.inner`)."""
    line: int
    """First changed line, counted from 1, in the file before the edit."""
    before: str
    """The lines that change, as they were, dedented and without the last line end."""
    after: str
    original: str
    """The whole file before the edit."""
    segment: tuple[int, int]
    """Character range of the lines of the function in `original`."""
    text: str
    """What replaces the segment."""

    @property
    def source(self) -> str:
        """The whole file after the edit."""
        return self.original[: self.segment[0]] + self.text + self.original[self.segment[1] :]

    def __repr__(self) -> str:
        return f"Edit({self.operator}, {self.function}:{self.line}, {self.before!r} -> {self.after!r})"


def splice(text: bytes, splices: Splices) -> bytes:
    """`text` with the splices applied."""
    parts: list[bytes] = []
    at = 0
    for start, end, new in splices:
        assert at <= start <= end, "splices must be disjoint and ascending"
        parts += [text[at:start], new.encode()]
        at = end
    return b"".join([*parts, text[at:]])


def changed_lines(text: bytes, splices: Splices) -> tuple[int, str, str]:
    """Index of the first line that the splices touch, and the touched lines before and after, dedented."""
    start = text.rfind(b"\n", 0, splices[0].start) + 1
    end = text.find(b"\n", splices[-1].end)
    end = len(text) if end < 0 else end
    moved = tuple(Splice(s.start - start, s.end - start, s.text) for s in splices)
    after = splice(text[start:end], moved)
    return text.count(b"\n", 0, start), _dedent(text[start:end]), _dedent(after)


def _dedent(text: bytes) -> str:
    """Without the indentation of its first line; later lines that are less indented stay as they are."""
    lines = text.decode().rstrip("\r\n").split("\n")
    dedented = textwrap.dedent("\n".join(lines))
    return dedented.lstrip(" \t") if dedented[:1] in " \t" else dedented
