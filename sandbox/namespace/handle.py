"""One namespace sandbox, seen from the client."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from sandbox.base import (
    Capabilities,
    Data,
    ExecResult,
    NetworkPolicy,
    PolicyUnsupported,
    ProcessInfo,
    SandboxError,
    SandboxLost,
    SandboxSpec,
    Size,
)
from sandbox.hostbase import python_prefix
from sandbox.namespace.channel import Channel, Collector, Counted, close_all, feed
from sandbox.namespace.process import NamespaceProcess


class Keeper(Protocol):
    """What a handle needs of the provider that made it."""

    def capabilities(self) -> Capabilities: ...

    async def create(self, spec: SandboxSpec) -> Any: ...

    async def kill(self, id: str) -> None:
        """End the sandbox and remove what was its."""
        ...

    def import_snapshot(self, parent: str, tar: bytes, note: str) -> str: ...


DEFAULT_PATH = (
    f"/opt/env/bin:{python_prefix()}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)


def base_environment(user: str) -> dict[str, str]:
    """What every command gets; nothing of the host's environment is among it."""
    home = "/root" if user == "root" else "/home/agent"
    return {"PATH": DEFAULT_PATH, "HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/sh",
            "LANG": "C.UTF-8", "TZ": "UTC", "TERM": "dumb", "TMPDIR": "/tmp"}  # fmt: skip


class NamespaceSandbox:
    """See `sandbox.base.Sandbox`. Made by `NamespaceProvider.create` only."""

    def __init__(
        self,
        provider: Keeper,
        id: str,
        spec: SandboxSpec,
        environment: Mapping[str, str],
        channel: Channel,
        *,
        single_id: bool,
        guest: bool = False,
    ) -> None:
        self.id = id
        self.spec = spec
        self.capabilities: Capabilities = provider.capabilities()
        self._provider = provider
        self._environment = dict(environment)
        self._channel = channel
        self.single_id = single_id
        self._guest = guest
        self._closed = False
        self._background: set[Collector] = set()
        self._processes: set[NamespaceProcess] = set()

    # ---- commands

    async def exec(
        self,
        argv: Sequence[str] | str,
        *,
        stdin: Data | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = 60,
        max_output: int = 1 << 20,
        key: str | None = None,
    ) -> ExecResult:
        """See the contract. `max_output` holds for each of the two streams."""
        if key is not None:
            raise PolicyUnsupported("exec(key=...) is not supported yet")
        process = await self._launch(argv, cwd, env, user, timeout, max_output, stdin is not None)
        feeder = None
        if stdin is not None:
            feeder = asyncio.create_task(feed(process.take_stdin(), stdin))
        try:
            return await process.wait()
        finally:
            if feeder is not None:
                feeder.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await feeder

    async def spawn(
        self,
        argv: Sequence[str] | str,
        *,
        pty: Size | None = None,
        tag: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> NamespaceProcess:
        """Start a long-lived process. The last 64 KiB of its standard error are kept for `wait`."""
        if pty is not None or tag is not None:
            raise PolicyUnsupported("pseudo-terminals and tags are not supported yet")
        process = await self._launch(argv, cwd, env, user, None, 1 << 16, True, stream=True)
        await process.open_streams()
        return process

    async def process(self, tag: str, *, offset: int = 0) -> NamespaceProcess:
        raise KeyError(f"no process has the tag {tag!r}")

    async def processes(self) -> list[ProcessInfo]:
        return []

    async def _launch(
        self,
        argv: Sequence[str] | str,
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
        timeout: float | None,
        max_output: int,
        with_stdin: bool,
        *,
        stream: bool = False,
    ) -> NamespaceProcess:
        user = user or "agent"
        if user not in ("agent", "root"):
            raise ValueError(f"user {user!r} does not exist in sandboxes; choose agent or root")
        words = ["/bin/sh", "-c", argv] if isinstance(argv, str) else [str(word) for word in argv]
        environment = {**base_environment(user), **self._environment, **(env or {})}
        if not words or any("\0" in text for text in (*words, *environment, *environment.values())):
            raise ValueError("a command needs at least one word, and none may contain a NUL character")
        request: dict[str, Any] = {
            "op": "exec", "argv": words, "env": environment, "cwd": cwd or self.spec.workdir,
            "user": user, "timeout": timeout,
        }  # fmt: skip
        ours, theirs = socket.socketpair()
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        if with_stdin:
            in_r, in_w = os.pipe()
        else:
            in_r, in_w = os.open("/dev/null", os.O_RDONLY), -1
        try:
            await self._request(request, [theirs.fileno(), in_r, out_w, err_w])
        except BaseException:
            ours.close()
            close_all([out_r, err_r, *([in_w] if with_stdin else [])])
            raise
        finally:
            theirs.close()
            close_all([in_r, out_w, err_w])
        process = NamespaceProcess(
            self, Channel(ours), (in_w, out_r, err_r), timeout, max_output, stream,
            may_kill_monitor=user == "root" or self.single_id,
        )  # fmt: skip
        self._processes.add(process)
        return process

    async def _request(self, message: dict[str, Any], fds: list[int]) -> None:
        if self._closed:
            raise SandboxLost(f"sandbox {self.id} is closed")
        try:
            await self._channel.send(message, fds)
        except OSError as error:
            raise SandboxLost(f"sandbox {self.id} died: {error}") from error

    # ---- files

    async def _transfer(
        self, message: dict[str, Any], data: Data | None, limit: int = 0
    ) -> tuple[dict[str, Any], bytes]:
        """Run a file operation: send `data`, or receive at most `limit` bytes."""
        ours, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        inner, outer = (write_end, read_end) if data is None else (read_end, write_end)
        channel = Channel(ours)
        collector: Collector | None = None
        feeder: asyncio.Task[None] | None = None
        try:
            try:
                await self._request(message, [theirs.fileno(), inner])
            finally:
                theirs.close()
                os.close(inner)
            if data is None:
                collector = Collector(outer, limit)
            else:
                feeder = asyncio.create_task(feed(outer, data))
            reply = await channel.receive()
            if reply is None:
                raise SandboxLost(f"sandbox {self.id} died during {message['op']} of {message.get('path')}")
            if collector is not None:
                await collector.ended
            if feeder is not None and reply.get("ok"):
                await feeder
            _raise(reply)
            return reply, collector.take() if collector is not None else b""
        finally:
            channel.close()
            if collector is not None:
                collector.close()
            elif feeder is None:
                os.close(outer)
            if feeder is not None:
                feeder.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await feeder

    async def read(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """Raises FileNotFoundError, IsADirectoryError, or ValueError if larger than `max_bytes`."""
        message = {"op": "read", "path": self._absolute(path), "max_bytes": max_bytes}
        reply, data = await self._transfer(message, None, max_bytes)
        if len(data) != reply["bytes"]:
            raise SandboxLost(f"read {len(data)} of {reply['bytes']} bytes of {path}")
        return data

    async def write(self, path: str, data: Data, *, mode: int = 0o644) -> None:
        """Write a file and its parent folders, owned by the agent; raises OSError as `open` would."""
        message = {"op": "write", "path": self._absolute(path), "mode": mode}
        source = Counted(data)
        reply, _ = await self._transfer(message, source)
        if reply["bytes"] != source.total:
            raise SandboxLost(f"wrote {reply['bytes']} of {source.total} bytes of {path}")

    async def put_tree(self, path: str, tar: Data) -> None:
        """Raises ValueError for entries that would leave `path`, for devices and broken tars."""
        await self._transfer({"op": "put_tree", "path": self._absolute(path)}, tar)

    async def get_tree(self, path: str, *, max_bytes: int = 256 << 20) -> bytes:
        """Regular files, folders and links, sorted; ValueError if the files exceed `max_bytes`."""
        message = {"op": "get_tree", "path": self._absolute(path), "max_bytes": max_bytes}
        _, data = await self._transfer(message, None, 2 * max_bytes + (64 << 20))
        return data

    async def snapshot(self) -> str:
        """Writes under /tmp, /run and /dev/shm are not part of a snapshot; times are normalised."""
        _, data = await self._transfer({"op": "snapshot"}, None, 4 << 30)
        return self._provider.import_snapshot(self.spec.image, data, self.id)

    async def fork(self, n: int = 1) -> list[Self]:
        """Snapshot, then `n` sandboxes of its image."""
        spec = dataclasses.replace(self.spec, image=await self.snapshot())
        made: list[Self] = []
        try:
            for _ in range(n):
                made.append(await self._provider.create(spec))
        except BaseException:
            await asyncio.gather(*(box.close() for box in made))
            raise
        return made

    async def set_network(self, policy: NetworkPolicy) -> None:
        if policy != self.spec.policy:
            raise PolicyUnsupported("the namespace backend cannot change a living sandbox's network")

    def _absolute(self, path: str) -> str:
        if "\0" in path:
            raise ValueError("a path may not contain a NUL character")
        return os.path.join(self.spec.workdir, path)

    # ---- end

    async def alive(self) -> bool:
        """See the contract."""
        return self.connected

    @property
    def connected(self) -> bool:
        """Whether init still holds its socket; that closes before anything else in the sandbox dies."""
        if self._closed:
            return False
        try:
            return self._channel.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def forget(self, process: NamespaceProcess) -> None:
        self._processes.discard(process)

    def keep_draining(self, collector: Collector) -> None:
        self._background = {each for each in self._background if not each.ended.done()}
        self._background.add(collector)

    async def abandon(self) -> None:
        """Kill the sandbox because it no longer answers."""
        if not self._guest:
            await self._provider.kill(self.id)

    async def close(self) -> None:
        """Idempotent; kills everything inside and frees the writable layer."""
        if self._closed:
            return
        self._closed = True
        if not self._guest:
            await self._provider.kill(self.id)
        self._channel.close()
        for process in list(self._processes):
            process.abandon()
        for collector in self._background:
            collector.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _raise(reply: dict[str, Any]) -> None:
    if reply.get("ok"):
        return
    kind, text = reply.get("kind"), reply["error"]
    if kind == "os":
        raise OSError(reply["errno"], text, reply["path"])
    if kind == "refused":
        raise ValueError(text)
    raise SandboxError(text)
