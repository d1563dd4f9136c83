"""A few test runners kept warm, the least recently used one closed first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

from verifiers.runner import TestRunner


@dataclass
class _Slot:
    runner: TestRunner | None = None
    users: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class RunnerPool:
    """Leases runners by key; at most `size` stay open while nobody uses them.

    A runner is shared by everybody who leases its key; each run still gets its own jail. A dead runner is
    replaced at the next lease, never under a running one.
    """

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._slots: OrderedDict[Hashable, _Slot] = OrderedDict()
        self.started = 0
        """Sandboxes opened so far."""

    @asynccontextmanager
    async def lease(
        self, key: Hashable, make: Callable[[], Awaitable[TestRunner]]
    ) -> AsyncIterator[TestRunner]:
        """The runner of `key`, made (and started) by `make` when there is none."""
        slot = self._slots.setdefault(key, _Slot())
        self._slots.move_to_end(key)
        slot.users += 1
        try:
            async with slot.lock:
                if slot.runner is None or not slot.runner.alive:
                    if slot.runner is not None:
                        await slot.runner.close()
                        slot.runner = None
                    await self._trim(self._size - 1)
                    slot.runner = await make()
                    self.started += 1
            yield slot.runner
        finally:
            slot.users -= 1
            await self._trim(self._size)

    async def _trim(self, keep: int) -> None:
        idle = [key for key, slot in self._slots.items() if slot.users == 0]
        surplus = sum(slot.runner is not None for slot in self._slots.values()) - keep
        for key in idle:
            runner = self._slots[key].runner
            if runner is not None and surplus <= 0:
                continue
            del self._slots[key]
            if runner is not None:
                surplus -= 1
                await runner.close()

    async def close(self) -> None:
        """Close every runner."""
        for slot in list(self._slots.values()):
            if slot.runner is not None:
                await slot.runner.close()
        self._slots.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
