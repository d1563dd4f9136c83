"""A client's line to the init of one namespace sandbox, and what the client knows of its life."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from sandbox.base import (
    Capabilities,
    NetworkPolicy,
    Repercussion,
    SandboxLost,
    SandboxSpec,
    SandboxUnavailable,
)
from sandbox.log import SandboxLog
from sandbox.namespace.channel import Channel, Collector
from sandbox.namespace.files import Files
from sandbox.namespace.gate import Gate, Ways

if TYPE_CHECKING:
    from sandbox.namespace.process import NamespaceProcess


class Keeper(Protocol):
    """What a handle needs of the provider that made it."""

    name: str
    ways: Ways

    def capabilities(self) -> Capabilities: ...

    async def create(self, spec: SandboxSpec) -> Any: ...

    async def kill(self, id: str) -> None:
        """End a sandbox of this client and remove what was its."""
        ...

    async def end(self, id: str, channel: Channel) -> None:
        """The same for one that this client made or inherited."""
        ...

    async def fate(self, id: str) -> Repercussion | None:
        """Why a sandbox that answers no more ended: by its own doing, or (None) by a fault of ours."""
        ...

    def import_snapshot(self, parent: str, tar: bytes, note: str) -> str: ...


class Connection:
    """What commands, files and the network of one sandbox are asked through."""

    def __init__(
        self,
        provider: Keeper,
        id: str,
        spec: SandboxSpec,
        environment: Mapping[str, str],
        channel: Channel,
        log: SandboxLog,
        *,
        single_id: bool,
        ours: bool = True,
        policy: NetworkPolicy | None = None,
    ) -> None:
        self.id = id
        self.spec = spec
        self.capabilities: Capabilities = provider.capabilities()
        self.log = log
        self.single_id = single_id
        self._provider = provider
        self._environment = dict(environment)
        self._channel = channel
        self._ours = ours
        """Whether closing this handle ends the sandbox."""
        self._closed = False
        self._abandoned = False
        self._background: set[Collector] = set()
        self._processes: set[NamespaceProcess] = set()
        self._files = Files(self.send, self.lost)
        self._gate = Gate(self.send, provider.ways, policy or spec.policy)

    def check_open(self) -> None:
        if self._closed:
            raise SandboxLost(f"sandbox {self.id} is closed")

    async def send(self, message: dict[str, Any], fds: list[int]) -> None:
        """Send init one request. Raises SandboxLost if it is gone."""
        self.check_open()
        try:
            await self._channel.send(message, fds)
        except OSError as error:
            raise await self.lost(str(error)) from error

    @contextlib.asynccontextmanager
    async def logged(
        self, operation: str, call: Mapping[str, Any], data: bytes | None
    ) -> AsyncGenerator[str]:
        """Record the start of a call, and its end if it raises."""
        self.check_open()
        try:
            token = self.log.start(operation, call, data=data)
        except OSError as error:
            raise SandboxUnavailable(
                f"cannot write {self.log.path}: {error.strerror}; free some disk"
            ) from error
        try:
            yield token
        except BaseException as error:
            self.log.done(token, error=f"{type(error).__name__}: {error}")
            raise

    # ---- life

    @property
    def connected(self) -> bool:
        """Whether init still holds its socket; that closes before anything else in the sandbox dies."""
        if self._closed or self._abandoned:
            return False
        try:
            return self._channel.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def fate(self) -> Repercussion | None:
        """Why a lost sandbox is lost, if its own commands did it."""
        if self._closed:
            return None
        return Repercussion.INIT if self.connected else await self._provider.fate(self.id)

    async def lost(self, text: str) -> SandboxLost:
        """The error for an operation that the sandbox did not survive, or whose helper inside was killed."""
        fate = await self.fate()
        blame = "its own commands ended it" if fate else "it is gone"
        return SandboxLost(f"sandbox {self.id}: {blame} ({text})", fate)

    def forget(self, process: NamespaceProcess) -> None:
        self._processes.discard(process)

    def keep_draining(self, collector: Collector) -> None:
        self._background = {each for each in self._background if not each.ended.done()}
        self._background.add(collector)

    async def abandon(self) -> None:
        """Kill the sandbox because it no longer answers."""
        self._abandoned = True
        if self._ours:
            await self._provider.kill(self.id)
