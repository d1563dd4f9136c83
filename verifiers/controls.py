"""Control runs: the task's own tests with other expectations, which an honest solution must fail.

A program that makes tests pass without solving the task (forged reports, dropped assertions, objects that
equal everything, answers read from the test) passes whatever a test asks for. So a change that passed runs
again, on copies of the test files in which each test that decides expects something else: another number or
text, the opposite, another exception. What still passes was not earned. A statement is altered only where
the test cannot come to its end without failing there: no honest solution, however written, is caught. Pure;
nothing is executed here.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from verifiers.edits import Edit, Source, apply, binds, is_parameter, negated, other_value, runs_to_its_end

ROUNDS = 2
"""Statements of one test that are altered, each in a run of its own."""
_RAISES = frozenset({"raises", "assertRaises", "assertRaisesRegex"})
_OTHER_ERROR = b"BufferError"
Ranked = tuple[int, Edit]
"""An alteration; the lower the number, the more kinds of cheating it finds."""


@dataclass(frozen=True)
class Control:
    """Altered test files, and what cannot pass with them."""

    files: Mapping[str, bytes]
    tests: frozenset[str]
    """Ids without their parameters."""


def plan(files: Mapping[str, bytes], tests: Collection[str]) -> list[Control]:
    """The control runs for tests that decide.

    Args:
        files: path -> content of all test files and their helpers, as they are graded.
        tests: node ids. Those of functions with decorators of unknown effect, say, are left out.
    """
    read = _Reader(files)
    chosen: dict[str, list[Edit]] = {}
    for name in sorted({test.split("[")[0] for test in tests}):
        path, _, inner = name.partition("::")
        source = read(path)
        if source is not None and inner in source.functions:
            chosen[name] = _ways(source.functions[inner], source, read)
    controls: list[Control] = []
    for number in range(ROUNDS):
        edits = {name: ways[number] for name, ways in chosen.items() if len(ways) > number}
        # Quiet ones by themselves, or else the loud would tell on them; those in helpers too, since a helper
        # that fails may turn the outcome of a test that expects that.
        groups: dict[tuple[bool, bool], dict[str, Edit]] = {}
        for name, edit in edits.items():
            key = not name.startswith(edit.path + "::"), not edit.quiet
            groups.setdefault(key, {})[name] = edit
        for _, group in sorted(groups.items()):
            altered = apply(files, set(group.values()))
            names = frozenset(name for name, edit in group.items() if edit.path in altered)
            if names:
                controls.append(Control(altered, names))
    return controls


def still_passing(control: Control, passed: Collection[str]) -> list[str]:
    """Ids that passed a control run and cannot have."""
    return sorted(name for name in passed if name.split("[")[0] in control.tests)


class _Reader:
    """Parses files when they are asked for, each once."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files
        self._known: dict[str, Source | None] = {}

    def __call__(self, path: str) -> Source | None:
        if path not in self._known:
            self._known[path] = Source.of(path, self.files[path]) if path in self.files else None
        return self._known[path]


def _ways(function: ast.FunctionDef, source: Source, read: _Reader) -> list[Edit]:
    """Alterations that each make a function fail: a quiet one, then the best."""
    if not runs_to_its_end(function):
        return []
    found = list(_direct(function, source))
    for statement in function.body:
        match statement:
            case ast.Expr(ast.Call(ast.Name(name)) as call) if not binds(function, name):
                found += _in_helper(call, source.imported(name, read.files), source, read)
            case _:
                pass
    if not found and function.body[0].lineno > function.lineno:
        found.append((9, source.after(function.body[-1], b"assert False")))
    found.sort(key=lambda way: way[0])
    edits = [edit for _, edit in found]
    first = next((edit for edit in edits if edit.quiet), None)
    return edits if first is None else [first, *(edit for edit in edits if edit is not first)]


def _direct(function: ast.FunctionDef, source: Source) -> Iterator[Ranked]:
    """From a function's own statements."""
    for statement in function.body:
        match statement:
            case ast.Assert(ast.Compare(left, [ast.Eq()], [right])):
                yield 0, other_value(right, left, source)
            case ast.Expr(ast.Call(ast.Attribute(ast.Name("self"), "assertEqual"), [left, right, *_])):
                yield 0, other_value(right, left, source)
            case ast.Assert(test):
                yield 1, negated(test, source)
            case ast.With([ast.withitem(ast.Call(ast.Attribute(attr=name), [error, *_]))]) if name in _RAISES:
                yield 1, Edit(source.path, *source.span(error), _OTHER_ERROR, quiet=True)
            case _:
                pass


def _in_helper(
    call: ast.Call, place: tuple[str, str] | None, source: Source, read: _Reader
) -> Iterator[Ranked]:
    """From a call of a helper that compares: another expectation in the call, or in the helper."""
    there = read(place[0]) if place else None
    helper = there.functions.get(place[1]) if there and place else None
    if there is None or helper is None or helper.decorator_list or not runs_to_its_end(helper):
        return
    if call.keywords or any(isinstance(argument, ast.Starred) for argument in call.args):
        return
    for statement in helper.body:
        match statement:
            case ast.Assert(ast.Compare(left, [ast.Eq()], [right])):
                places = (is_parameter(right, left, helper), is_parameter(left, right, helper))
                index = next((place for place in places if place is not None), len(call.args))
                if index < len(call.args):
                    yield 0, other_value(call.args[index], None, source)
            case _:
                pass
    yield from ((rank + 2, edit) for rank, edit in _direct(helper, there))
