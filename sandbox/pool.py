"""Sandboxes that are ready before anybody asks.

    async with WarmPool(provider) as pool:
        await pool.keep(spec, 8)
        box = await pool.create(spec)  # ready at once; made on the spot if none is

A pool is a provider around a provider, so whatever takes one works with it. What is ready was made with
exactly the spec that is asked for (image, limits, owner, runtime), it is claimed once, and never more than
asked for are ready and under way together. What died while it waited is thrown away. A node that is full
(AdmissionRefused) leaves the pool smaller; it fills again later. Left out: guessing how many will be needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self

from sandbox.base import (
    AdmissionRefused,
    Capabilities,
    Sandbox,
    SandboxError,
    SandboxInfo,
    SandboxProvider,
    SandboxSpec,
)
from sandbox.metrics import METRICS

RETRY_SECONDS = 1.0


@dataclass
class Shelf:
    """The ready sandboxes of one spec."""

    spec: SandboxSpec
    wanted: int
    prepare: Callable[[Sandbox], Awaitable[None]] | None
    ready: deque[Sandbox] = field(default_factory=deque[Sandbox])
    filler: asyncio.Task[None] | None = None
    claimed: int = 0
    missed: int = 0


class WarmPool(SandboxProvider):
    """A provider whose `create` finds a ready sandbox where it can. Closing it leaves `provider` open."""

    name: str

    def __init__(self, provider: SandboxProvider) -> None:
        self.provider = provider
        self.name = provider.name
        self.images = provider.images
        self._shelves: dict[str, Shelf] = {}
        self._closed = False

    async def keep(
        self, spec: SandboxSpec, n: int, *, prepare: Callable[[Sandbox], Awaitable[None]] | None = None
    ) -> None:
        """Keep `n` sandboxes of that spec ready from now on; returns when they are, or when the node is full.

        `prepare` is run once in each before it counts as ready. `n` = 0 empties the shelf.
        """
        shelf = self._shelves.setdefault(_key(spec), Shelf(spec, n, prepare))
        shelf.wanted, shelf.prepare = n, prepare
        while len(shelf.ready) > n:
            await shelf.ready.pop().close()
        with contextlib.suppress(AdmissionRefused):
            while len(shelf.ready) < n and shelf.filler is None:
                shelf.ready.append(await self._make(shelf))
        self._fill(shelf)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A ready sandbox, or a new one."""
        shelf = self._shelves.get(_key(spec))
        while shelf is not None and shelf.ready:
            box = shelf.ready.popleft()
            self._fill(shelf)
            if await box.alive():
                shelf.claimed += 1
                METRICS.claimed(self.name, hit=True)
                return box
            await box.close()
        if shelf is not None:
            shelf.missed += 1
            METRICS.claimed(self.name, hit=False)
            self._fill(shelf)
        return await self.provider.create(spec)

    def ready(self, spec: SandboxSpec) -> int:
        """How many are ready."""
        shelf = self._shelves.get(_key(spec))
        return len(shelf.ready) if shelf is not None else 0

    def counts(self) -> dict[str, int]:
        """How often a ready one was claimed and how often there was none, over all specs."""
        shelves = self._shelves.values()
        return {
            "claimed": sum(each.claimed for each in shelves),
            "missed": sum(each.missed for each in shelves),
        }

    def _fill(self, shelf: Shelf) -> None:
        """See that one task, and no more, brings this shelf up to what is wanted."""
        if shelf.filler is None and len(shelf.ready) < shelf.wanted and not self._closed:
            shelf.filler = asyncio.create_task(self._filler(shelf))

    async def _filler(self, shelf: Shelf) -> None:
        try:
            while len(shelf.ready) < shelf.wanted:
                try:
                    shelf.ready.append(await self._make(shelf))
                except AdmissionRefused as refused:
                    await asyncio.sleep(refused.retry_after_s)
                except SandboxError:  # whoever asks next is told by his own creation
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            shelf.filler = None

    async def _make(self, shelf: Shelf) -> Sandbox:
        box = await self.provider.create(shelf.spec)
        try:
            if shelf.prepare is not None:
                await shelf.prepare(box)
        except BaseException:
            await box.close()
            raise
        return box

    # ---- the rest of a provider

    def capabilities(self) -> Capabilities:
        return self.provider.capabilities()

    async def attach(self, id: str) -> Sandbox:
        return await self.provider.attach(id)

    async def list(self, owner: str) -> list[SandboxInfo]:
        return await self.provider.list(owner)

    async def reap(self, owner: str) -> int:
        return await self.provider.reap(owner)

    async def close(self) -> None:
        """Close what is ready; sandboxes that were claimed live on. Idempotent."""
        self._closed = True
        fillers = [shelf.filler for shelf in self._shelves.values() if shelf.filler is not None]
        for filler in fillers:
            filler.cancel()
        await asyncio.gather(*fillers, return_exceptions=True)
        boxes = [box for shelf in self._shelves.values() for box in shelf.ready]
        self._shelves.clear()
        await asyncio.gather(*(box.close() for box in boxes))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _key(spec: SandboxSpec) -> str:
    return json.dumps(dataclasses.asdict(spec), sort_keys=True, default=str)
