"""Test files reduced to the tests that an agent may see.

Helpers, fixtures, imports, tables and comments that belong to what stays are kept byte for byte (libcst);
every other test goes. So the file still runs, and hidden tests cannot be read from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import lru_cache

import libcst as cst

_Body = Iterable[cst.BaseStatement | cst.BaseSmallStatement]


def test_path(test_id: str) -> str:
    """File of a test id."""
    return test_id.partition("::")[0]


def test_name(test_id: str) -> str:
    """Qualified name of a test id without its parameters: `t.py::TestA::test_b[1]` is `TestA::test_b`."""
    rest = test_id.partition("::")[2]
    return rest.partition("[")[0]


test_path.__test__ = False  # type: ignore[attr-defined]
test_name.__test__ = False  # type: ignore[attr-defined]


@lru_cache(maxsize=8)
def _module(source: str) -> cst.Module:
    return cst.parse_module(source)


def prune(source: str, keep: Collection[str]) -> str:
    """The test file with only the tests in `keep` (names as `test_name` gives them).

    A kept test that is inherited keeps the method of that name in the base class. A file that libcst
    cannot parse raises `libcst.ParserSyntaxError`.
    """
    module = _module(source)
    wanted = _wanted(module, keep)
    body: list[cst.BaseStatement] = []
    for statement in module.body:
        if isinstance(statement, cst.FunctionDef) and is_test_function(statement.name.value):
            if statement.name.value in keep:
                body.append(statement)
        elif isinstance(statement, cst.ClassDef):
            name = statement.name.value
            if name in wanted or not _holds_tests(statement):
                body.append(_reduced(statement, wanted.get(name, set())))
        else:
            body.append(statement)  # type: ignore[arg-type]
    return module.with_changes(body=body).code


def is_test_function(name: str) -> bool:
    """Whether pytest collects a function or method of this name."""
    return name.startswith("test")


def _wanted(module: cst.Module, keep: Collection[str]) -> dict[str, set[str]]:
    """Class to the methods that stay in it, bases of a kept class included."""
    bases: dict[str, list[str]] = {}
    for statement in module.body:
        if isinstance(statement, cst.ClassDef):
            names = [arg.value.value for arg in statement.bases if isinstance(arg.value, cst.Name)]
            bases[statement.name.value] = names
    wanted: dict[str, set[str]] = defaultdict(set)
    for qualified in keep:
        owner, _, method = qualified.partition("::")
        pending = [owner] if method else []
        seen: set[str] = set()
        while pending:
            name = pending.pop()
            if name in seen or name not in bases:
                continue
            seen.add(name)
            wanted[name].add(method.partition("::")[0])
            pending += bases[name]
    return wanted


def _holds_tests(node: cst.ClassDef) -> bool:
    return any(
        isinstance(item, cst.FunctionDef) and is_test_function(item.name.value) for item in node.body.body
    ) or any(isinstance(item, cst.ClassDef) and _holds_tests(item) for item in node.body.body)


def _reduced(node: cst.ClassDef, methods: set[str]) -> cst.ClassDef:
    if not isinstance(node.body, cst.IndentedBlock):
        return node
    body = [
        item
        for item in node.body.body
        if not (
            isinstance(item, cst.FunctionDef)
            and is_test_function(item.name.value)
            and item.name.value not in methods
        )
        and not (isinstance(item, cst.ClassDef) and _holds_tests(item) and item.name.value not in methods)
    ]
    if not body:
        body = [cst.SimpleStatementLine([cst.Pass()])]
    return node.with_changes(body=node.body.with_changes(body=body))


def test_source(source: str, name: str) -> str:
    """Source of one test function or method (name as `test_name` gives it); empty when it is not there."""
    module = _module(source)
    body: _Body = module.body
    *owners, last = name.split("::")
    for owner in owners:
        found = [item for item in body if isinstance(item, cst.ClassDef) and item.name.value == owner]
        if not found:
            return ""
        body = found[0].body.body
    for item in body:
        if isinstance(item, cst.FunctionDef) and item.name.value == last:
            return module.code_for_node(item).strip("\n") + "\n"
    return ""


test_source.__test__ = False  # type: ignore[attr-defined]
