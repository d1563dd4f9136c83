"""Runs pytest in this process and reports every step over the pipe.

A test counts as passed only when our own wrapper saw its function return *and* pytest reported all three
phases as passed; code under test that bends pytest's reports can therefore only lose. References are taken
before foreign code is imported. What an attacker in the same process can still do is in docs/verifiers.md.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import pytest
from _pytest.config import default_plugins
from _pytest.unittest import TestCaseFunction

from verifiers.harness.folding import FAILED, PASSED, SKIPPED, SUBTEST, XFAIL
from verifiers.harness.wire import Kind, Send

PHASES = {"setup": 0, "call": 1, "teardown": 2}
OUTCOMES = {"passed": PASSED, "failed": FAILED, "skipped": SKIPPED}
MESSAGE = 2048
"""Bytes of a failure's text that are kept: the end, where the error is."""


def encode(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def tail(text: str) -> bytes:
    return encode(text)[-MESSAGE:]


def codes(function: Any) -> tuple[types.CodeType, ...]:
    """Code objects of a function and of what it wraps: its identity, however often it is bound."""
    found: list[types.CodeType] = []
    while function is not None and len(found) < 16:
        code = getattr(function, "__code__", None)
        if isinstance(code, types.CodeType):
            found.append(code)
        function = getattr(function, "__wrapped__", None)
    return tuple(found)


def nested(code: types.CodeType) -> set[types.CodeType]:
    """A code object and all code objects inside of it."""
    found, todo = {code}, [code]
    while todo:
        inner = [c for c in todo.pop().co_consts if isinstance(c, types.CodeType)]
        found.update(inner)
        todo += inner
    return found


def unwrapped(value: Any) -> Any:
    """The function in a static method, class method or property; other values as they are."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value  # pyright: ignore


def function_of(item: pytest.Function) -> Any:
    """The test function of an item, without its instance."""
    return item.function  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class Integrity:
    """Remembers the functions that decide outcomes, and names those that were replaced."""

    def __init__(self) -> None:
        names = ("_pytest", "pytest", "pluggy", "unittest.case", "unittest.loader", "unittest.suite")
        modules = [m for n, m in sorted(sys.modules.items()) if n.startswith(names) or n in COMPARING]
        self._known: list[tuple[str, dict[str, Any] | types.MappingProxyType[str, Any], str, Any, Any]] = []
        for module in modules:
            self._remember(module.__name__, vars(module))
            for name, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__ == module.__name__:
                    self._remember(f"{module.__name__}.{name}", vars(value))
        self._remember("builtins", vars(sys.modules["builtins"]))

    def _remember(self, owner: str, space: Any) -> None:
        for name, value in list(space.items()):
            inner = unwrapped(value)
            if callable(inner):
                self._known.append((f"{owner}.{name}", space, name, value, getattr(inner, "__code__", None)))

    def altered(self) -> list[str]:
        """Full names of what is no longer the object or the code that it was."""
        found: list[str] = []
        for full, space, name, value, code in self._known:
            now = space.get(name)
            if now is not value or (code is not None and unwrapped(now).__code__ is not code):
                found.append(full)
        return found


class Tracer:
    """Collects the code objects that are entered, at the price of one call for each Python function call."""

    def __init__(self) -> None:
        self.seen: set[types.CodeType] = set()
        self._monitoring = getattr(sys, "monitoring", None)
        if self._monitoring is not None:
            tool, events = self._monitoring.COVERAGE_ID, self._monitoring.events
            self._monitoring.use_tool_id(tool, "verifier")
            self._monitoring.register_callback(tool, events.PY_START, self._started)

    def _started(self, code: types.CodeType, offset: int) -> Any:
        self.seen.add(code)
        return sys.monitoring.DISABLE  # pyright: ignore

    def start(self) -> None:
        self.seen = set()
        if self._monitoring is not None:
            self._monitoring.restart_events()
            self._monitoring.set_events(self._monitoring.COVERAGE_ID, self._monitoring.events.PY_START)
        else:
            add = self.seen.add

            def entered(frame: types.FrameType, event: str, argument: Any) -> None:
                add(frame.f_code)

            sys.settrace(entered)

    def stop(self) -> None:
        if self._monitoring is not None:
            self._monitoring.set_events(self._monitoring.COVERAGE_ID, 0)
        else:
            sys.settrace(None)


class Reporter:
    """The pytest plugin. Holds no list of results: what is reported is gone from this process."""

    def __init__(self, send: Send, workdir: str, known: Mapping[str, types.CodeType], trace: bool) -> None:
        """`known`: path of a test file -> its module's code, compiled from the clean source."""
        self.workdir = workdir
        self.send = send
        self._known = known
        self._nested: dict[str, set[types.CodeType]] = {}
        self._prefix = workdir.rstrip("/") + "/"
        self._tracer = Tracer() if trace else None
        self._index: dict[int, int] = {}
        self._codes: dict[int, tuple[types.CodeType, ...]] = {}
        self._tests: set[str] = set()
        self._current = -1
        self.collected = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for index, item in enumerate(session.items):
            self._index[id(item)] = index
            self._tests.add(str(item.path))
            self.send(Kind.COLLECTED, index, self._has_function(item), encode(item.nodeid))
            if isinstance(item, pytest.Function):
                self._codes[index] = codes(function_of(item))
                if not self._is_genuine(item):
                    self.send(Kind.PATCHED, 0, 0, encode(f"{item.nodeid} is not the code of its file"))
        self.collected = True
        self.send(Kind.READY, len(session.items), 0, b"")

    def _is_genuine(self, item: pytest.Function) -> bool:
        """False when the file's clean source has a function of that name and the item runs another one."""
        path = str(item.path)
        if path not in self._known:
            return True
        if path not in self._nested:
            self._nested[path] = nested(self._known[path])
        classes = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
        name = ".".join((*classes, item.originalname))
        named = {code for code in self._nested[path] if code.co_qualname == name}
        return not named or not named.isdisjoint(codes(function_of(item)))

    @staticmethod
    def _has_function(item: pytest.Item) -> int:
        if not isinstance(item, pytest.Function):
            return 0
        # unittest looks a coroutine method up by itself, past our wrapper
        return int(
            not (isinstance(item, TestCaseFunction) and inspect.iscoroutinefunction(function_of(item)))
        )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            text = encode(report.nodeid) + b"\0" + tail(report.longreprtext)
            self.send(Kind.UNCOLLECTED, 0, int(report.outcome == "skipped"), text)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._current = self._index.get(id(item), 1 << 31)
        if self._tracer is None:
            result: Any = yield
            return result
        self._tracer.start()
        try:
            result = yield
            return result
        finally:
            self._tracer.stop()
            self.send(Kind.TRACE, self._current, 0, encode("\n".join(self._functions(self._tracer.seen))))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        if isinstance(item, pytest.Function) and self._has_function(item):
            if codes(function_of(item)) != self._codes.get(self._current):
                self.send(Kind.PATCHED, 0, 0, encode(f"{item.nodeid} was replaced after collection"))
            item.obj = self._watched(item.obj, self._current)
        result: Any = yield
        return result

    def _watched(self, function: Callable[..., Any], index: int) -> Callable[..., Any]:
        send, returned = self.send, int(Kind.RETURNED)
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                __tracebackhide__ = True
                value = await function(*args, **kwargs)
                send(returned, index, 0, b"")
                return value

            return call_async

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            value = function(*args, **kwargs)
            send(returned, index, 0, b"")
            return value

        return call

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        flag = PHASES.get(report.when or "", 3) + 4 * OUTCOMES[report.outcome]
        if hasattr(report, "wasxfail"):
            flag += XFAIL
        if type(report).__name__ == "SubtestReport":
            if report.outcome != "failed":
                return
            flag += SUBTEST
        text = b"" if report.outcome == "passed" else tail(report.longreprtext)
        self.send(Kind.PHASE, self._current, flag, text)

    def pytest_internalerror(self, excrepr: Any) -> None:
        self.send(Kind.NOTE, 0, 0, tail(str(excrepr)))

    def _functions(self, seen: set[types.CodeType]) -> set[str]:
        """`path::qualname` of the workspace's functions, tests and conftest files left out."""
        found: set[str] = set()
        for code in seen:
            file = code.co_filename
            if not file.startswith(self._prefix) or file in self._tests or file.endswith("/conftest.py"):
                continue
            name = code.co_qualname.split(".<locals>")[0]
            if "<" not in name:
                found.add(f"{file[len(self._prefix) :]}::{name}")
        return found


def loaded(workdir: str) -> list[str]:
    """Workspace files behind imported modules."""
    prefix = workdir.rstrip("/") + "/"
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return sorted(file for file in files if isinstance(file, str) and file.startswith(prefix))


FIXED = (
    *("-q", "--no-header", "--no-summary", "--color=no", "--tb=short"),
    *("--continue-on-collection-errors", "--maxfail=0"),
    *("-p", "no:cacheprovider", "-p", "no:pastebin", "-p", "no:stepwise"),
    *("-p", "no:setuponly", "-p", "no:setupplan"),
)
COMPARING = ("collections", "copy", "difflib", "functools", "itertools", "json", "math", "operator", "re")
"""Of the standard library, what tests judge values with."""
LAZY = (*COMPARING, "_pytest._argcomplete", "difflib", "pdb", "pprint", "tomllib", "xml.etree.ElementTree")


def warm(folder: str) -> None:
    """Import what pytest loads late, and fill its caches with a run over an empty test of our own."""
    for name in (*(f"_pytest.{plugin}" for plugin in default_plugins), *LAZY):
        importlib.import_module(name)
    path = os.path.join(folder, "test_warm.py")
    with open(path, "w") as file:
        file.write("def test_warm():\n    assert 1\n")
    saved, quiet = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    pytest.main([*FIXED, "--rootdir", folder, "-c", os.devnull, path])
    sys.stdout.flush()
    os.dup2(saved, 1)
    os.close(saved)
    os.close(quiet)
    os.unlink(path)
    sys.modules.pop("test_warm", None)


def run(reporter: Reporter, integrity: Integrity, arguments: Sequence[str], plugins: Sequence[str]) -> None:
    """pytest over `arguments` with this process as the test process; ends with END."""
    send = reporter.send
    fixed = [*FIXED, "--rootdir", reporter.workdir, f"--basetemp={tempdir()}"]
    for plugin in plugins:
        fixed += ["-p", plugin]
    code = pytest.main([*fixed, *arguments], plugins=[reporter])
    if code == pytest.ExitCode.USAGE_ERROR and not reporter.collected:
        # addopts of the repository may name plugins that the image does not have (coverage, xdist)
        send(Kind.NOTE, 0, 0, b"addopts of the repository were left out: pytest refused them")
        code = pytest.main([*fixed, "-o", "addopts=", *arguments], plugins=[reporter])
    send(Kind.LOADED, 0, 0, encode("\n".join(loaded(reporter.workdir))))
    if names := integrity.altered():
        send(Kind.PATCHED, 0, 0, encode("replaced during the run: " + ", ".join(names[:8])))
    send(Kind.END, int(code), 0, b"")


def tempdir() -> str:
    return os.path.join(os.environ.get("TMPDIR", "/tmp"), "pytest")
