"""Compiled code shared by all jails: compiled here, from sources that we trust, in memory only.

Jails start without any .pyc, and would compile the same modules and rewrite the same tests every time. The
harness keeps the code objects, keyed by file name and exact source bytes, and jails inherit them through
fork. Nothing that a jail computed ever gets in: `learn` compiles the clean workspace's own files.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import types
from collections.abc import Iterable
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
        self._done: set[str] = set()

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

    def learn(self, workdir: str, base: str, paths: Iterable[str]) -> None:
        """Compile the clean copies of workspace files that a jail imported. Each path is looked at once."""
        for path in paths:
            if path in self._done or len(self._done) >= MAX_FILES or ".." in path:
                continue
            if not path.startswith(workdir + "/") or not path.endswith(".py"):
                continue
            self._done.add(path)
            clean = Path(base + path[len(workdir) :])
            if clean.is_symlink() or not clean.is_file() or clean.stat().st_size > MAX_BYTES:
                continue
            source = clean.read_bytes()
            try:
                self.modules[path, source] = compile(source, path, "exec", dont_inherit=True)
                tree = ast.parse(source, filename=path)
                rewrite.rewrite_asserts(tree, source, path, None)
                self.tests[path, source] = compile(tree, path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError, RecursionError):
                continue
