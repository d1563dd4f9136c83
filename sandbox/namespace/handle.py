"""One namespace sandbox, seen from the client."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from typing import Self

from sandbox.base import (
    Data,
    NetworkPolicy,
    PolicyUnsupported,
)
from sandbox.namespace.commands import Commands
from sandbox.network.proxy import Attempt


class NamespaceSandbox(Commands):
    """See `sandbox.base.Sandbox`. Made by `NamespaceProvider.create` and `attach` only."""

    # ---- files

    async def read(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """See the contract."""
        return await self._files.read(self._absolute(path), max_bytes)

    async def write(self, path: str, data: Data, *, mode: int = 0o644) -> None:
        """See the contract."""
        where = self._absolute(path)
        whole = _whole(data)
        call = {"path": where, "mode": mode, "streamed": whole is None}
        async with self.logged("write", call, whole) as token:
            await self._files.write(where, data, mode)
            self.log.done(token)

    async def put_tree(self, path: str, tar: Data) -> None:
        """See the contract."""
        where = self._absolute(path)
        whole = _whole(tar)
        async with self.logged("put_tree", {"path": where, "streamed": whole is None}, whole) as token:
            await self._files.put_tree(where, tar)
            self.log.done(token)

    async def get_tree(self, path: str, *, max_bytes: int = 256 << 20) -> bytes:
        """See the contract."""
        return await self._files.get_tree(self._absolute(path), max_bytes)

    async def snapshot(self) -> str:
        """See the contract."""
        async with self.logged("snapshot", {}, None) as token:
            image = self._provider.import_snapshot(self.spec.image, await self._files.upper(), self.id)
            self.log.done(token, image=image)
        return image

    async def fork(self, n: int = 1) -> list[Self]:
        """See the contract: one snapshot, whose layer all of them share."""
        spec = dataclasses.replace(self.spec, image=await self.snapshot(), network=self._gate.policy)
        tasks = [asyncio.create_task(self._provider.create(spec)) for _ in range(n)]
        made: list[Self | BaseException] = await asyncio.gather(*tasks, return_exceptions=True)
        failed = next((each for each in made if isinstance(each, BaseException)), None)
        boxes = [each for each in made if not isinstance(each, BaseException)]
        if failed is not None:
            await asyncio.gather(*(box.close() for box in boxes))
            raise failed
        return boxes

    async def set_network(self, policy: NetworkPolicy) -> None:
        """See the contract. Only the client that owns the sandbox can: the proxy runs in it."""
        self.check_open()
        if not self._ours:
            raise PolicyUnsupported("only the client that made a sandbox can change its network")
        async with self.logged("set_network", {"policy": policy.encode()}, None) as token:
            await self._gate.apply(policy)
            self.log.done(token)

    async def open_gate(self) -> None:
        """Start the proxy that the policy asks for. A sandbox without it would be one without network."""
        if self._ours:
            try:
                await self._gate.apply(self._gate.policy)
            except BaseException:
                await asyncio.shield(self.close())
                raise

    @property
    def attempts(self) -> list[Attempt]:
        """What the sandbox tried to reach through its proxy, oldest first, and why it was refused."""
        return self._gate.attempts

    def _absolute(self, path: str) -> str:
        if "\0" in path:
            raise ValueError("a path may not contain a NUL character")
        return os.path.join(self.spec.workdir, path)

    # ---- end

    async def alive(self) -> bool:
        """See the contract."""
        return self.connected

    async def close(self) -> None:
        """See the contract."""
        if self._closed:
            return
        self._closed = True
        await self._gate.close()
        if self._ours:
            await self._provider.end(self.id, self._channel)
        self._channel.close()
        for process in list(self._processes):
            process.abandon()
        for collector in self._background:
            collector.close()
        self.log.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _whole(data: Data) -> bytes | None:
    """The data if it is all there; what is streamed is not recorded."""
    return bytes(data) if isinstance(data, bytes | bytearray | memoryview) else None
