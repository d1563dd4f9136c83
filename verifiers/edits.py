"""Places and replacements in the source of test files: what `verifiers.controls` alters them with. Pure."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

_OTHER_VALUE = b"""(lambda v, n: not v if v is True or v is False
 else -v - n if isinstance(v, (int, float, complex)) else f"{v} {n}" if isinstance(v, str)
 else b"%%b %%d" %% (v, n) if isinstance(v, bytes) else [*v, n] if isinstance(v, list)
 else (*v, n) if isinstance(v, tuple) else {**v, n: n} if isinstance(v, dict)
 else {*v, n} if isinstance(v, (set, frozenset)) else (n, v))(%b, %d)"""
"""A value that differs from an expression's, of the same type where we know the type."""


@dataclass(frozen=True)
class Edit:
    """Bytes `start` to `end` of a file become `text`."""

    path: str
    start: int
    end: int
    text: bytes
    quiet: bool = False
    """Whether the file looks as it might have been written: nothing tells that it was altered."""


@dataclass(frozen=True)
class Source:
    """A parsed file."""

    path: str
    data: bytes
    tree: ast.Module

    @classmethod
    def of(cls, path: str, data: bytes) -> Self | None:
        """None for what is no Python, or has lines or characters that we would count in another way."""
        if not path.endswith(".py") or b"\r" in data.replace(b"\r\n", b""):
            return None
        try:
            return cls(path, data, ast.parse(data.decode()))
        except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError):
            return None

    @cached_property
    def shift(self) -> int:
        """A small odd number that nobody can know who has not read the file."""
        return 1 + 2 * (hashlib.sha256(self.data).digest()[0] % 32)

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        """`Class::name` -> function, of names that are bound once: a second binding may hide the first."""
        return {"::".join(names): function for names, function in _functions(self.tree.body, ())}

    @cached_property
    def _lines(self) -> list[int]:
        starts = [0]
        for line in self.data.split(b"\n"):
            starts.append(starts[-1] + len(line) + 1)
        return starts

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Offsets of a node's first byte and of the one after its last."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset

    def after(self, statement: ast.stmt, text: bytes) -> Edit:
        """A line more after a statement."""
        end = self._lines[statement.end_lineno or 0] - 1
        return Edit(self.path, end, end, b"\n" + b" " * statement.col_offset + text)

    def imported(self, name: str, sources: Collection[str]) -> tuple[str, str] | None:
        """The path and name of what `from ... import` gives a name at the file's top, if it is among ours."""
        bound = [found for statement in self.tree.body for found in _bound(statement)]
        if bound.count(name) != 1:
            return None
        for statement in self.tree.body:
            if isinstance(statement, ast.ImportFrom) and statement.module:
                folders = self.path.split("/")[: -statement.level] if statement.level else []
                path = "/".join((*folders, *statement.module.split("."))) + ".py"
                for alias in statement.names:
                    if (alias.asname or alias.name) == name and path in sources:
                        return path, alias.name
        return None


def apply(files: Mapping[str, bytes], edits: Collection[Edit]) -> dict[str, bytes]:
    """The files that change. One that would be no Python any more stays as it is and is left out."""
    changed: dict[str, bytes] = {}
    for path in {edit.path for edit in edits}:
        data = files[path]
        for edit in sorted((e for e in edits if e.path == path), key=lambda e: e.start, reverse=True):
            data = data[: edit.start] + edit.text + data[edit.end :]
        try:
            ast.parse(data)
        except (SyntaxError, ValueError, RecursionError):
            continue
        changed[path] = data
    return changed


def runs_to_its_end(function: ast.FunctionDef) -> bool:
    """Whether a function that passes has run every statement of its body: it is called as it is (marks of
    pytest aside), and nowhere returns or yields."""
    if not all(map(_is_mark, function.decorator_list)):
        return False
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)):
            return False
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            todo += ast.iter_child_nodes(node)
    return True


def is_parameter(side: ast.expr, other: ast.expr, function: ast.FunctionDef) -> int | None:
    """The position of the parameter that one side of a comparison is, if the other depends on it nowhere."""
    names = [parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args)]
    if not isinstance(side, ast.Name) or side.id not in names:
        return None
    stored = any(side.id in _bound(statement) for statement in function.body)
    used = any(isinstance(node, ast.Name) and node.id == side.id for node in ast.walk(other))
    return None if stored or used else names.index(side.id)


def binds(function: ast.FunctionDef, name: str) -> bool:
    """Whether a name inside of a function is one of its own."""
    parameters = (node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg))
    return name in parameters or any(name in _bound(statement) for statement in function.body)


def negated(test: ast.expr, source: Source) -> Edit:
    """The opposite of a condition."""
    start, end = source.span(test)
    return Edit(source.path, start, end, b"not (" + source.data[start:end] + b")", quiet=True)


def other_value(side: ast.expr, instead: ast.expr | None, source: Source) -> Edit:
    """Another value in the place of `side`, or of `instead` where that is a literal and `side` is none."""
    for expression in (side, instead):
        edit = _other_literal(expression, source) if expression is not None else None
        if edit is not None:
            return edit
    start, end = source.span(side)
    return Edit(source.path, start, end, _OTHER_VALUE % (source.data[start:end], source.shift))


def _other_literal(side: ast.expr, source: Source) -> Edit | None:
    """A literal with one constant exchanged, so that it looks like the one before."""
    try:
        value: object = ast.literal_eval(side)
    except (ValueError, TypeError, SyntaxError):
        return None
    start, end = source.span(side)
    for node in reversed(list(ast.walk(side))):
        if isinstance(node, ast.Constant):
            first, last = source.span(node)
            text = (
                source.data[start:first] + _other_constant(node.value, source.shift) + source.data[last:end]
            )
            try:
                if ast.literal_eval(f"({text.decode()})") != value:
                    return Edit(source.path, start, end, text, quiet=True)
            except (ValueError, TypeError, SyntaxError):
                continue
    return None


def _other_constant(value: object, shift: int) -> bytes:
    match value:
        case bool():
            other: object = not value
        case int() | float() | complex():
            # far enough for types that compare with a tolerance
            other = value + shift if abs(value) < 1000 else 2 * value + shift
        case str():
            other = value[:-1] + ("b" if value.endswith("a") else "a")
        case bytes():
            other = value[:-1] + (b"b" if value.endswith(b"a") else b"a")
        case _:
            other = shift
    return repr(other).encode()


def _functions(
    body: list[ast.stmt], above: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], ast.FunctionDef]]:
    bound = [name for statement in body for name in _bound(statement)]
    for statement in body:
        if isinstance(statement, ast.FunctionDef) and bound.count(statement.name) == 1:
            yield (*above, statement.name), statement
        elif (
            isinstance(statement, ast.ClassDef)
            and bound.count(statement.name) == 1
            and all(map(_is_mark, statement.decorator_list))
        ):
            yield from _functions(statement.body, (*above, statement.name))


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement binds, in inner blocks too."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]


def _is_mark(decorator: ast.expr) -> bool:
    """`pytest.mark.anything`, with or without arguments: it calls the function as it is."""
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(node).startswith("pytest.mark.")
