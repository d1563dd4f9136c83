"""The way out of one namespace sandbox: its proxy, in the client's process, on a socket from inside."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from sandbox.base import NetworkPolicy, PolicyUnsupported, SandboxUnavailable
from sandbox.log import Entry
from sandbox.namespace.channel import readable
from sandbox.network.addresses import AllowList
from sandbox.network.environment import PORT, variables
from sandbox.network.index import PackageIndex
from sandbox.network.proxy import Attempt, Proxy
from sandbox.node import wire

ANSWER_SECONDS = 30.0
Send = Callable[[dict[str, Any], list[int]], Awaitable[None]]


class Ways:
    """What the gates of one provider share: trusted networks, package indexes and their files."""

    def __init__(self, cache: Path, trusted: Sequence[str], index_url: str | None) -> None:
        self.trusted = tuple(trusted)
        self._cache = cache
        self._index_url = index_url
        self._indexes: dict[tuple[Any, ...], PackageIndex] = {}

    def index(self, policy: NetworkPolicy) -> PackageIndex | None:
        """The index that a policy asks for; sandboxes with the same one share it."""
        if policy.index_before is None:
            return None
        key = (policy.index_before, policy.index_without)
        if key not in self._indexes:
            self._indexes[key] = PackageIndex(
                policy.index_before, self._cache, upstream=self._index_url, without=policy.index_without
            )
        return self._indexes[key]


def check(policy: NetworkPolicy) -> None:
    """PolicyUnsupported for what the namespace backend cannot enforce, or what contradicts itself."""
    if policy.mode != "allow" and (policy.allow or policy.index_before or policy.index_without):
        raise PolicyUnsupported(f"the network {policy.mode} takes no allow-list and no index: use allow")
    if policy.index_without and policy.index_before is None:
        raise PolicyUnsupported("index_without needs index_before")
    try:
        AllowList(policy.allow)
    except ValueError as error:
        raise PolicyUnsupported(str(error)) from None


class Gate:
    """Keeps one sandbox's proxy. Shut until `apply` opens it."""

    def __init__(self, send: Send, ways: Ways, policy: NetworkPolicy) -> None:
        """`policy`: what the sandbox was made with; a handle that is no owner only reads it."""
        self.policy = policy
        self._send = send
        self._ways = ways
        self._proxy: Proxy | None = None
        self._port = PORT

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which programs find the proxy and the index."""
        return variables(self.policy, self._port)

    @property
    def attempts(self) -> list[Attempt]:
        """What the sandbox tried to reach, oldest first."""
        return list(self._proxy.attempts) if self._proxy is not None else []

    async def apply(self, policy: NetworkPolicy) -> None:
        """Let the sandbox reach what `policy` says from now on; what it no longer says is cut."""
        check(policy)
        if "host" in (policy.mode, self.policy.mode) and policy.mode != self.policy.mode:
            raise PolicyUnsupported("the namespace backend cannot move a living sandbox to or from the host")
        if policy.mode != "allow":
            await self.close()
        elif self._proxy is None:
            proxy = Proxy(policy, index=self._ways.index(policy), trusted=self._ways.trusted)
            await self._open(proxy)
            self._proxy = proxy
        else:
            self._proxy.change(policy, self._ways.index(policy))
        self.policy = policy

    async def close(self) -> None:
        """Cut every connection; nothing listens inside any more."""
        if self._proxy is not None:
            proxy, self._proxy = self._proxy, None
            await proxy.close()

    async def _open(self, proxy: Proxy) -> None:
        """Let the inside of the sandbox reach the proxy."""
        await proxy.listen(await self._listener())

    async def _listener(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                await self._send({"op": "listen", "port": PORT}, [theirs.fileno()])
            ours.setblocking(False)
            async with asyncio.timeout(ANSWER_SECONDS):
                await readable(ours.fileno())
            ours.setblocking(True)
            reply, fds = wire.receive(ours)
        if reply is None or "error" in reply or not fds:
            raise SandboxUnavailable(f"no proxy in the sandbox: {(reply or {}).get('error', 'no answer')}")
        self._port = int(reply["port"])
        return socket.socket(fileno=fds[0])


def last_policy(entries: Iterable[Entry], first: NetworkPolicy) -> NetworkPolicy:
    """The policy that a sandbox has by its log: that of its last `set_network`, or its first.

    A change that was begun and not finished leaves none: the sandbox gets no more than either allowed.
    """
    policy = first
    for entry in entries:
        if entry.operation == "set_network":
            if entry.end is None:
                policy = NetworkPolicy("none")
            elif "error" not in entry.end:
                policy = NetworkPolicy.decode(entry.call["policy"])
    return policy
