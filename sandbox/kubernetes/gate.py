"""The way out of one pod: its network denies everything, and a proxy in the client's process is reached over
the link. Names are resolved and judged here, so an allow-list holds whatever the cluster's DNS says."""

from __future__ import annotations

import asyncio
import socket

from sandbox.base import NetworkPolicy, SandboxUnavailable
from sandbox.kubernetes.link import Link
from sandbox.namespace.channel import Channel
from sandbox.namespace.gate import ANSWER_SECONDS, Gate, Send, Ways
from sandbox.network.environment import PORT
from sandbox.network.proxy import Proxy


class LinkGate(Gate):
    """`Gate` whose listening end is the helper's, in the pod."""

    def __init__(self, send: Send, ways: Ways, policy: NetworkPolicy, link: Link) -> None:
        super().__init__(send, ways, policy)
        self._link = link
        self._serving: set[asyncio.Task[None]] = set()

    async def _open(self, proxy: Proxy) -> None:
        def accept(sock: socket.socket, port: int) -> None:
            task = asyncio.create_task(proxy.take(sock, port))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

        reply = await self._ask({"op": "listen", "port": PORT})
        if "error" in reply:
            raise SandboxUnavailable(f"no proxy in the pod: {reply['error']}")
        self._port = int(str(reply["port"]))
        self._link.accept = accept

    async def close(self) -> None:
        """Cut every connection; nothing listens inside any more."""
        was_open = self._link.accept is not None
        self._link.accept = None
        await super().close()
        if was_open and self._link.lost is None:
            await self._ask({"op": "unlisten"})

    async def _ask(self, message: dict[str, object]) -> dict[str, object]:
        ours, theirs = socket.socketpair()
        status = Channel(ours)
        try:
            with theirs:
                await self._send(message, [theirs.fileno()])
            async with asyncio.timeout(ANSWER_SECONDS):
                return await status.receive() or {"error": "no answer"}
        finally:
            status.close()
