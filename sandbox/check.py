"""The conformance suite: what every sandbox backend must do, as checks that anyone can run.

    results = await run(provider, image)

A check is an async function of a `Bench`; it raises AssertionError with what it saw. The image needs /bin/sh,
coreutils, procps and python3. A check that needs a limit which the backend says it does not enforce is
reported as not applicable, never as passed.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from sandbox.base import Sandbox, SandboxProvider, SandboxSpec

Status = Literal["passed", "failed", "not applicable"]


@dataclass(frozen=True)
class Bench:
    """What a check works with."""

    provider: SandboxProvider
    image: str
    owner: str = "check"

    @asynccontextmanager
    async def box(self, **changes: Any) -> AsyncGenerator[Sandbox]:
        """A fresh sandbox: 256 MiB, 64 processes, 64 MiB of disk unless `changes` say otherwise."""
        defaults: dict[str, Any] = {"memory_mb": 256, "pids": 64, "disk_mb": 64, "owner": self.owner}
        async with await self.provider.create(
            SandboxSpec(image=self.image, **{**defaults, **changes})
        ) as box:
            yield box


@dataclass(frozen=True)
class Check:
    """One requirement."""

    run: Callable[[Bench], Awaitable[None]]
    needs: tuple[str, ...] = ()
    """Fields of `Capabilities` that must be true."""
    name: str = field(default="")

    def title(self) -> str:
        return self.name or self.run.__name__


@dataclass(frozen=True)
class CheckResult:
    name: str
    status: Status
    detail: str
    """Why it failed or does not apply; the check's own first line otherwise."""
    seconds: float


def checks() -> list[Check]:
    """All checks, in the order of a report."""
    from sandbox.checks import commands, containment, files, life, limits

    return [*commands.CHECKS, *limits.CHECKS, *files.CHECKS, *containment.CHECKS, *life.CHECKS]


async def run_one(check: Check, bench: Bench) -> CheckResult:
    """Run one check; anything it raises is its failure."""
    capabilities = bench.provider.capabilities()
    missing = [name for name in check.needs if not getattr(capabilities, name)]
    if missing:
        return CheckResult(check.title(), "not applicable", f"backend lacks {', '.join(missing)}", 0.0)
    started = time.monotonic()
    status: Status = "passed"
    detail = (check.run.__doc__ or "").strip().splitlines()[0]
    try:
        await check.run(bench)
    except Exception as error:  # a conformance suite must survive whatever a backend throws
        status = "failed"
        where = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
    return CheckResult(check.title(), status, detail, time.monotonic() - started)


async def run(provider: SandboxProvider, image: str, names: Sequence[str] = ()) -> list[CheckResult]:
    """Run the named checks (default: all), one after the other. ValueError for an unknown name."""
    every = {check.title(): check for check in checks()}
    unknown = [name for name in names if name not in every]
    if unknown:
        raise ValueError(f"unknown check {unknown[0]!r}; choose from {', '.join(every)}")
    bench = Bench(provider, image)
    return [await run_one(every[name], bench) for name in (names or every)]
