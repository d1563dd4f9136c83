"""The text of the `repair-choice` game: prompt, actions, results of tries. Pure functions, no torch.

The agent, the SFT data and the pretraining documents all call these, so that a policy reads in training
exactly what it reads in a rollout. The prompt fits about 420 tokens of the shared 4,096-token BPE: long
lines, tests and messages are cut, and `~` stands where something was cut out.

    Reasoning Effort: 50 (range 1-100; higher values request more thorough reasoning)   <- system

    test                                                                                 <- user
    def test_first_of_empty():
        assert first([]) is None
    error
    IndexError: list index out of range
    1 boltons/iterutils.py:12
    - if len(src) >= 0:
    + if len(src) > 0:
    2 ...

The policy answers `try 3` or `submit 3`; a try comes back as `3 passes` or `3 fails: IndexError: ...`.
"""

from __future__ import annotations

import ast
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

from rollout.agents.effort import effort_line

CUT = "~"
"""Stands for text that was cut out."""
MAX_TRIES = 3
MAX_ACTION_TOKENS = 12
"""A readable action fits in so many tokens even letter by letter; more is not an action."""

_ACTION = re.compile(r"(try|submit) ([1-9][0-9]?)", re.ASCII)


class Edit(Protocol):
    """What the prompt shows of a candidate (`catalog.models.Candidate` is one)."""

    @property
    def path(self) -> str: ...
    @property
    def line(self) -> int: ...
    @property
    def before(self) -> str: ...
    @property
    def after(self) -> str: ...


class Action(NamedTuple):
    """One readable action. `choice` counts from 1, as shown."""

    kind: Literal["try", "submit"]
    choice: int

    def __str__(self) -> str:
        return f"{self.kind} {self.choice}"


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """How much of each part is shown, in characters and lines."""

    line: int = 72
    test_lines: int = 14
    message: int = 150
    edit_lines: int = 2
    edit: int = 56


def render_choice(
    *,
    effort: int | None,
    test_source: str,
    failure: str,
    candidates: Sequence[Edit],
    budget: int = 420,
    count: Callable[[str], int] | None = None,
) -> list[tuple[str, str]]:
    """The conversation's opening: (role, text) messages, the effort line first.

    Args:
        effort: 1..100, or None for no system message.
        test_source: source of the failing visible test (`test_excerpt`).
        failure: what the failing test says; its last lines matter most.
        candidates: in the order shown; the policy answers with their numbers, from 1.
        budget: tokens that the whole should stay under.
        count: tokens of a text, the policy's own count. Default: characters / 2.2, more than the shared BPE
            needs for nearly all code. SFT data and rollouts must pass the same one.
    """
    measure = count or (lambda text: math.ceil(len(text) / 2.2))
    system = [("system", effort_line(effort))] if effort is not None else []
    spent = sum(measure(text) for _, text in system) + 4  # the marks of the turns
    limits = PromptLimits()
    text = _body(test_source, failure, candidates, limits)
    while spent + measure(text) > budget and _tighter(limits) != limits:
        limits = _tighter(limits)
        text = _body(test_source, failure, candidates, limits)
    return [*system, ("user", text)]


def parse_action(text: str, candidates: int) -> Action | None:
    """The action that a turn is, or None if it is not exactly one of them."""
    match = _ACTION.fullmatch(text.strip())
    if not match or int(match[2]) > candidates:
        return None
    return Action("try" if match[1] == "try" else "submit", int(match[2]))


def render_try(choice: int, passed: bool, message: str, tries_left: int) -> str:
    """What the policy reads after `try choice`."""
    result = f"{choice} passes" if passed else f"{choice} fails: {_cut_end(_headline(message), 60)}"
    return result if tries_left else f"{result}\nno tries left"


def test_excerpt(source: str, test_id: str) -> str:
    """Source of the one test that an id (`path::Class::name[parameters]`) names, dedented.

    The whole source if no such function is found. Decorators stay: parameters are part of the test.
    """
    names = test_id.partition("[")[0].split("::")[1:]
    try:
        body: list[ast.stmt] = ast.parse(source).body
    except SyntaxError:
        return source
    node: ast.stmt | None = None
    for name in names:
        node = next((item for item in body if getattr(item, "name", None) == name), None)
        body = getattr(node, "body", [])
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return source
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return textwrap.dedent("\n".join(source.splitlines()[first - 1 : node.end_lineno]))


test_excerpt.__test__ = False  # pyright: ignore[reportFunctionMemberAccess]


def _body(test_source: str, failure: str, candidates: Sequence[Edit], limits: PromptLimits) -> str:
    parts = ["test", *_test_lines(test_source, limits)]
    parts += ["error", _cut_end(_headline(failure), limits.message)]
    for number, edit in enumerate(candidates, 1):
        parts.append(f"{number} {_name(edit.path)}:{edit.line}")
        before, after = _edit_lines(edit, limits)
        parts += [f"- {line}" for line in before] + [f"+ {line}" for line in after]
    return "\n".join(parts)


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _test_lines(source: str, limits: PromptLimits) -> list[str]:
    """The test without docstring, comments and empty lines; the end is kept before the middle."""
    source = _without_docstring(source)
    lines = [line.rstrip() for line in source.splitlines()]
    lines = [line for line in lines if line and not line.lstrip().startswith("#")]
    lines = [_cut_end(line.replace("    ", " "), limits.line) for line in lines]
    if len(lines) > limits.test_lines:
        tail = max(1, limits.test_lines - 3)
        lines = [*lines[:2], CUT, *lines[-tail:]]
    return lines


def _without_docstring(source: str) -> str:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    lines = source.splitlines()
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or len(node.body) < 2:
            continue
        first = node.body[0]
        if ast.get_docstring(node, clean=False) is not None and first.end_lineno:
            lines[first.lineno - 1 : first.end_lineno] = [""] * (first.end_lineno - first.lineno + 1)
    return "\n".join(lines)


def _headline(message: str) -> str:
    """The line of a failure text that says most: pytest's first `E` line, else the last line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return "failed"
    marked = [line[1:].strip() for line in lines if re.match(r"E\s+\S", line)]
    line = marked[0] if marked else lines[-1]
    return re.sub(r"0x[0-9a-fA-F]{6,}", "0x", line)  # addresses differ from run to run


def _edit_lines(edit: Edit, limits: PromptLimits) -> tuple[list[str], list[str]]:
    """The lines that differ, each cut around what differs."""
    before, after = edit.before.splitlines(), edit.after.splitlines()
    while before and after and before[0] == after[0]:
        before, after = before[1:], after[1:]
    while before and after and before[-1] == after[-1]:
        before, after = before[:-1], after[:-1]
    before, after = [line.strip() for line in before], [line.strip() for line in after]
    if len(before) == len(after):
        pairs = [_cut_around(b, a, limits.edit) for b, a in zip(before, after, strict=True)]
        before, after = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return _some(before, limits), _some(after, limits)


def _some(lines: list[str], limits: PromptLimits) -> list[str]:
    if len(lines) > limits.edit_lines:
        lines = [*lines[: limits.edit_lines], CUT]
    return [_cut_end(line, limits.edit) for line in lines]


def _cut_around(before: str, after: str, width: int) -> tuple[str, str]:
    """Two versions of a line, cut alike on the left so that what differs stays in sight."""
    if max(len(before), len(after)) <= width:
        return before, after
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    start = max(0, same - width // 3)
    if start <= 1:
        return before, after
    return CUT + before[start:], CUT + after[start:]


def _cut_end(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + CUT


def _tighter(limits: PromptLimits) -> PromptLimits:
    return replace(
        limits,
        line=max(24, int(limits.line * 0.88)),
        test_lines=max(4, limits.test_lines - 2),
        message=max(40, int(limits.message * 0.85)),
        edit_lines=1,
        edit=max(16, int(limits.edit * 0.88)),
    )
