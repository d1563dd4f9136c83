"""Compiled code shared by all jails: compiled here, from sources that we trust, in memory only.

Jails start without any .pyc, and would compile the same modules and rewrite the same tests every time. The
harness keeps the code objects, keyed by file name and exact source bytes, and jails inherit them through
fork. Nothing that a jail computed ever gets in: only our own sources are compiled here.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import _pytest.assertion.rewrite as rewrite

MAX_FILES = 2000
MAX_BYTES = 1 << 20
"""Larger sources are left to the jails."""


class CompileMemo:
    """Code objects by (path, source), for plain modules and for tests with rewritten assertions."""

    def __init__(self) -> None:
        self.modules: dict[tuple[str, bytes], types.CodeType] = {}
        self.tests: dict[tuple[str, bytes], types.CodeType] = {}

    def install(self) -> None:
        """Make this process's import system and pytest's rewriting look here first."""
        modules, tests = self.modules, self.tests
        plain = importlib.machinery.SourceFileLoader.source_to_code
        rewriting = rewrite._rewrite_test  # pyright: ignore[reportPrivateUsage]

        def source_to_code(self: Any, data: Any, path: Any, **options: Any) -> types.CodeType:
            code = modules.get((path, data)) if isinstance(data, bytes) and isinstance(path, str) else None
            return code if code is not None else plain(self, data, path, **options)

        def rewrite_test(fn: Path, config: Any) -> tuple[bytes, types.CodeType]:
            source = fn.read_bytes()
            code = tests.get((str(fn), source))
            if code is None or config.getini("enable_assertion_pass_hook"):
                return rewriting(fn, config)
            return importlib.util.source_hash(source), code

        importlib.machinery.SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign]
        rewrite._rewrite_test = rewrite_test  # pyright: ignore[reportPrivateUsage]

    def module(self, path: str, source: bytes) -> None:
        """Compile a module of ours for all later jails."""
        if self._fits(path, source, self.modules):
            try:
                self.modules[path, source] = compile(source, path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError, RecursionError):
                return

    def test(self, path: str, source: bytes) -> types.CodeType | None:
        """The code that pytest makes of a test file of ours; None where that fails."""
        if len(self.tests) >= MAX_FILES:
            self.tests.clear()
        if self._fits(path, source, self.tests):
            try:
                tree = ast.parse(source, filename=path)
                rewrite.rewrite_asserts(tree, source, path, None)
                self.tests[path, source] = compile(tree, path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError, RecursionError):
                return None
        return self.tests.get((path, source))

    @staticmethod
    def _fits(path: str, source: bytes, known: Mapping[tuple[str, bytes], types.CodeType]) -> bool:
        return (path, source) not in known and len(known) < MAX_FILES and len(source) < MAX_BYTES
