"""Where the functions of a file are."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from typing import NamedTuple

_LINE_END = re.compile(r"\r\n|\r|\n")


class FunctionSpan(NamedTuple):
    """One function or method of a file."""

    qualname: str
    """As `__qualname__` and a tracer's `co_qualname` write it."""
    start_line: int
    """Of the first decorator, or of `def`; counted from 1."""
    end_line: int
    start: int
    """Character offset of the start of `start_line`."""
    end: int
    """Character offset after `end_line` and its line end."""
    def_line: int
    top: bool
    """Not inside another function."""

    @property
    def lines(self) -> int:
        return self.end_line - self.start_line + 1


@lru_cache(maxsize=16)
def functions(source: str) -> list[FunctionSpan]:
    """All functions and methods of a file in order of their `def` lines, nested ones included.

    Two functions of one name (a property and its setter) are two spans. A file that does not parse has
    none. Shared between callers: do not change the list.
    """
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    starts = [0, *(match.end() for match in _LINE_END.finditer(source)), len(source)]
    found: list[FunctionSpan] = []

    def walk(node: ast.AST, prefix: str, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                last = child.end_lineno or child.lineno
                qualname = prefix + child.name
                ends = starts[min(last, len(starts) - 1)]
                found.append(FunctionSpan(qualname, first, last, starts[first - 1], ends, child.lineno, top))
                walk(child, f"{qualname}.<locals>.", False)
            elif isinstance(child, ast.ClassDef):
                walk(child, f"{prefix}{child.name}.", top)
            else:
                walk(child, prefix, top)

    walk(module, "", True)
    return sorted(found, key=lambda span: (span.start_line, -span.end_line))
