"""Runs the tests of one built package on changed workspaces, and never the same run twice.

All stage agents of a synthesis share one workbench: a warm runner on the build's clean image. A run is
named by what determines it (changes, tests, repetition), so that two hundred tasks of one package ask for
the gold run of a test file once.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from catalog.models import TestStatus, digest_json
from envfactory.build import Build
from envfactory.prune import test_path
from envfactory.trees import Tree, difference
from sandbox.base import SandboxProvider
from verifiers.runner import TestRun, TestRunner


@dataclass(frozen=True)
class Gold:
    """What the clean tree does on some test files, k times."""

    expected: Mapping[str, TestStatus]
    """Statuses that all k runs agree on."""
    unstable: tuple[str, ...]
    duration_s: float
    """Of the slowest run."""


class Workbench:
    """See the module. An async context manager.

    Args:
        provider: where jails come from.
        build: the package; `build.image` is what runs start from.
        jobs: jails at once.
    """

    def __init__(self, provider: SandboxProvider, build: Build, *, jobs: int = 2) -> None:
        self.build = build
        self._runner = TestRunner(provider, build.image, jobs=jobs, env=build.env)
        self._runs: dict[str, asyncio.Future[TestRun]] = {}
        self.count = 0
        """Runs made."""
        self.saved = 0
        """Runs that were known already."""

    async def run(
        self,
        files: Mapping[str, bytes | None],
        arguments: Sequence[str],
        *,
        timeout: float = 60,
        trace: bool = False,
        repeat: int = 0,
    ) -> TestRun:
        """Like `TestRunner.run`; `repeat` counts up to make the same run again."""
        digests = [
            [p, None if d is None else hashlib.sha256(d).hexdigest()] for p, d in sorted(files.items())
        ]
        key = digest_json([digests, list(arguments), trace, repeat])
        known = self._runs.get(key)
        if known is None:
            self.count += 1
            run = self._runner.run(files, arguments, timeout=timeout, trace=trace)
            known = self._runs[key] = asyncio.ensure_future(run)
            if trace:  # traces are large and seldom asked for again
                known.add_done_callback(lambda _: self._runs.pop(key, None))
        else:
            self.saved += 1
        return await asyncio.shield(known)

    async def gold(self, arguments: Sequence[str], runs: int) -> Gold:
        """The clean tree's statuses, tests in other than the given files left out."""
        done = [await self.run({}, arguments, repeat=i) for i in range(runs)]
        names = sorted({name for run in done for name in run.tests if test_path(name) in arguments})
        stable = {n: done[0].tests[n] for n in names if len({run.tests.get(n) for run in done}) == 1}
        stable = {n: status for n, status in stable.items() if n in self.build.suite.statuses}
        unstable = tuple(n for n in names if n not in stable)
        return Gold(stable, unstable, max(run.duration_s for run in done))

    def changes(self, tree: Tree) -> dict[str, bytes | None]:
        """What to lay over the build's clean workspace to get this tree."""
        return difference(self.build.tree, tree)

    async def __aenter__(self) -> Self:
        await self._runner.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for run in self._runs.values():
            run.cancel()
        await asyncio.gather(*self._runs.values(), return_exceptions=True)
        await self._runner.close()
