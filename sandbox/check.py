"""The conformance suite: what every sandbox backend must do, as checks that anyone can run.

    results = await run(provider, image)

A check is an async function of a `Bench`; it raises AssertionError with what it saw. The image needs /bin/sh,
coreutils, procps and python3. A check that needs a limit which the backend says it does not enforce is
reported as not applicable, never as passed.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from sandbox.base import Sandbox, SandboxProvider, SandboxSpec, provider

CHECK_SECONDS = 240.0
"""After that a check has failed: a backend that hangs must not hang whoever checks it."""
Status = Literal["passed", "failed", "not applicable"]


@dataclass(frozen=True)
class Bench:
    """What a check works with."""

    provider: SandboxProvider
    image: str
    owner: str = "check"
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What makes another provider like this one (`sandbox.base.provider(name, store=..., **settings)`)."""

    def spec(self, **changes: Any) -> SandboxSpec:
        """256 MiB, 64 processes, 64 MiB of disk unless `changes` say otherwise."""
        defaults: dict[str, Any] = {
            "image": self.image,
            "memory_mb": 256,
            "pids": 64,
            "disk_mb": 64,
            "owner": self.owner,
        }
        return SandboxSpec(**{**defaults, **changes})

    @asynccontextmanager
    async def box(self, **changes: Any) -> AsyncGenerator[Sandbox]:
        """A fresh sandbox."""
        async with await self.provider.create(self.spec(**changes)) as box:
            yield box

    @asynccontextmanager
    async def another(self) -> AsyncGenerator[SandboxProvider]:
        """Another client of the same backend and image store."""
        made = provider(self.provider.name, store=self.provider.images.root, **self.settings)
        try:
            yield made
        finally:
            await made.close()


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
    from sandbox.checks import (
        clients,
        commands,
        containment,
        files,
        harm,
        life,
        limits,
        memory,
        network,
        scheduling,
        streams,
        transfers,
    )

    modules = (
        commands, streams, limits, scheduling, files, transfers, containment, network, life, clients, memory,
        harm,
    )  # fmt: skip
    return [check for module in modules for check in module.CHECKS]


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
        async with asyncio.timeout(CHECK_SECONDS):
            await check.run(bench)
    except Exception as error:  # a conformance suite must survive whatever a backend throws
        status = "failed"
        where = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
    return CheckResult(check.title(), status, detail, time.monotonic() - started)


async def run(
    provider: SandboxProvider,
    image: str,
    names: Sequence[str] = (),
    *,
    settings: Mapping[str, Any] | None = None,
    told: Callable[[CheckResult], None] | None = None,
) -> list[CheckResult]:
    """Run the named checks (default: all), one after the other. ValueError for an unknown name.

    `settings` are those that `provider` was made with; `told` hears each result as it comes.
    """
    every = {check.title(): check for check in checks()}
    unknown = [name for name in names if name not in every]
    if unknown:
        raise ValueError(f"unknown check {unknown[0]!r}; choose from {', '.join(every)}")
    bench = Bench(provider, image, settings=settings or {})
    results: list[CheckResult] = []
    for name in names or every:
        results.append(await run_one(every[name], bench))
        if told is not None:
            told(results[-1])
    return results
