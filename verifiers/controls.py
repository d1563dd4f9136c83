"""Control runs: the task's own tests with other expectations, which an honest solution must fail.

A program that makes tests pass without solving the task (forged reports, skipped assertions, objects that
equal everything, answers read from the test) passes whatever a test asks for. So a change that passed runs
again, on copies of the test files in which each test that decides expects something else: another number or
text, the opposite, another exception. What still passes is no solution. A solution that is told apart this
way only by luck is none either: a statement is altered only where the test cannot come to its end without
failing there, so that no honest solution, however written, can pass. Pure; nothing is executed here.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

ROUNDS = 3
"""Statements of one test that are altered, each in a run of its own."""
_RAISES = frozenset({"raises", "assertRaises", "assertRaisesRegex"})
_OTHER = b'type("Other", (Exception,), {})'


@dataclass(frozen=True)
class Control:
    """Altered test files, and what cannot pass with them."""

    files: Mapping[str, bytes]
    tests: frozenset[str]
    """Ids without their parameters."""


@dataclass(frozen=True)
class _Edit:
    start: int
    end: int
    text: bytes


def plan(sources: Mapping[str, bytes], tests: Collection[str]) -> list[Control]:
    """The control runs for tests that decide.

    Args:
        sources: path -> content of test files as they are graded.
        tests: node ids; those in other files, and functions with decorators of unknown effect, are left out.
    """
    wanted = {name.split("[")[0] for name in tests}
    files: list[dict[str, bytes]] = [{} for _ in range(ROUNDS)]
    names: list[set[str]] = [set() for _ in range(ROUNDS)]
    for path, source in sorted(sources.items()):
        found = {f"{path}::{name}": edits for name, edits in _altered_functions(source)}
        chosen = {name: edits for name, edits in found.items() if name in wanted}
        for number in range(ROUNDS):
            here = {name: edits[number] for name, edits in chosen.items() if len(edits) > number}
            changed = _apply(source, list(here.values()))
            if here and changed is not None:
                files[number][path] = changed
                names[number] |= set(here)
    return [Control(files[n], frozenset(names[n])) for n in range(ROUNDS) if names[n]]


def still_passing(control: Control, passed: Collection[str]) -> list[str]:
    """Ids that passed a control run and cannot have."""
    return sorted(name for name in passed if name.split("[")[0] in control.tests)


def _altered_functions(source: bytes) -> Iterator[tuple[str, list[_Edit]]]:
    """`Class::name` of each test function -> ways to make it fail, the best first."""
    if b"\r" in source.replace(b"\r\n", b""):
        return  # lines that are counted in another way
    try:
        tree = ast.parse(source.decode())
    except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError):
        return
    text = _Text(source)
    for names, function in _functions(tree.body, ()):
        if _plain(function) and not _ends_early(function.body):
            edits = [edit for statement in function.body for edit in _edits(statement, text)]
            edits.sort(key=lambda edit: edit[0])
            last = text.line_end(function.body[-1].end_lineno or 0)
            if function.body[0].lineno > function.lineno:
                indent = b" " * function.body[0].col_offset
                edits.append((9, _Edit(last, last, b"\n" + indent + b"assert False")))
            yield "::".join(names), [edit for _, edit in edits]


def _functions(
    body: list[ast.stmt], above: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], ast.FunctionDef]]:
    """Functions and methods under a name that is bound once: a second binding may hide the first."""
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
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]


def _is_mark(decorator: ast.expr) -> bool:
    """`pytest.mark.anything`, with or without arguments: it calls the function as it is."""
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(node).startswith("pytest.mark.")


def _plain(function: ast.FunctionDef) -> bool:
    return all(map(_is_mark, function.decorator_list))


def _ends_early(body: list[ast.stmt]) -> bool:
    """Whether the function itself returns or yields somewhere, and may pass without reaching its end."""
    todo: list[ast.AST] = list(body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)):
            return True
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            todo += ast.iter_child_nodes(node)
    return False


class _Text:
    """Offsets in a source from the line and column of nodes."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.shift = 1000 + int.from_bytes(hashlib.sha256(source).digest()[:3])
        self._lines = [0]
        for line in source.split(b"\n"):
            self._lines.append(self._lines[-1] + len(line) + 1)

    def span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset

    def line_end(self, line: int) -> int:
        return self._lines[line] - 1

    def around(self, node: ast.expr, before: bytes, after: bytes) -> _Edit:
        start, end = self.span(node)
        return _Edit(start, end, before + self.source[start:end] + after)


def _edits(statement: ast.stmt, text: _Text) -> Iterator[tuple[int, _Edit]]:
    """Alterations of one statement of a test's body after which it must fail, with their rank."""
    match statement:
        case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
            yield 0, _other_value(left, right, text)
        case ast.Assert(test=test):
            yield 1, text.around(test, b"not (", b")")
        case ast.Expr(ast.Call(ast.Attribute(ast.Name("self"), "assertEqual"), [left, right, *_])):
            yield 0, _other_value(left, right, text)
        case ast.With([ast.withitem(ast.Call(ast.Attribute(attr=name), [expected, *_]))]) if name in _RAISES:
            yield 1, _Edit(*text.span(expected), _OTHER)
        case _:
            pass


def _other_value(left: ast.expr, right: ast.expr, text: _Text) -> _Edit:
    """A literal becomes another of its type; anything else becomes a pair with itself in it."""
    for side in (right, left):
        start, end = text.span(side)
        for node in ast.walk(side):
            if not isinstance(node, ast.Constant):
                continue
            inner_start, inner_end = text.span(node)
            other = _other_constant(node.value, text.shift).encode()
            changed = text.source[start:inner_start] + other + text.source[inner_end:end]
            try:
                if ast.literal_eval(f"({changed.decode()})") != ast.literal_eval(side):
                    return _Edit(start, end, changed)
            except (ValueError, TypeError, SyntaxError):
                break
    return text.around(right, b"(0.5, (", b"))")


def _other_constant(value: object, shift: int) -> str:
    match value:
        case bool():
            return repr(not value)
        case int() | float() | complex():
            return repr(value + shift)
        case str():
            return repr(f"{value} {shift}")
        case bytes():
            return repr(value + b" %d" % shift)
        case _:
            return "..."


def _apply(source: bytes, edits: list[_Edit]) -> bytes | None:
    """The source with the edits; None where the result is no Python."""
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        source = source[: edit.start] + edit.text + source[edit.end :]
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    return source
