"""Commands of a namespace sandbox, from the client: requests to init, pipes, what the log keeps."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import socket
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from sandbox.base import Data, ExecResult, ProcessInfo, Size
from sandbox.hostbase import python_prefix
from sandbox.log import Entry
from sandbox.metrics import METRICS
from sandbox.namespace import keyed
from sandbox.namespace.channel import Channel, close_all, feed
from sandbox.namespace.connection import Connection
from sandbox.namespace.process import HeldProcess, NamespaceProcess

DEFAULT_PATH = (
    f"/opt/env/bin:{python_prefix()}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)
STDERR_KEPT = 1 << 16


def base_environment(user: str) -> dict[str, str]:
    """What every command gets; nothing of the host's environment is among it."""
    home = "/root" if user == "root" else "/home/agent"
    return {"PATH": DEFAULT_PATH, "HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/sh",
            "LANG": "C.UTF-8", "TZ": "UTC", "TERM": "dumb", "TMPDIR": "/tmp"}  # fmt: skip


class Commands(Connection):
    """The part of a sandbox's handle that starts commands; `NamespaceSandbox` completes it."""

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
        request = self._command(argv, cwd, env, user)
        request |= {"timeout": timeout, "max_output": max_output}
        data = bytes(stdin) if isinstance(stdin, bytes | bytearray) else None
        call = _call(request, env, streamed=stdin is not None and data is None)
        if key is not None:
            if stdin is not None and data is None:
                raise ValueError("a keyed command takes its input as bytes: a stream cannot be compared")
            self.check_open()
            return await self._counted(keyed.run(self, key, call, request, data))
        async with self.logged("exec", call, data) as token:
            result = await self._counted(self._exec(request, stdin, timeout, max_output))
            self.log.finish(token, result)
        return result

    async def _counted(self, command: Coroutine[Any, Any, ExecResult]) -> ExecResult:
        began = time.perf_counter()
        try:
            result = await command
        except asyncio.CancelledError:
            METRICS.cancelled(self._provider.name)
            raise
        METRICS.finished(self._provider.name, result, time.perf_counter() - began)
        return result

    async def _exec(
        self, request: dict[str, Any], stdin: Data | None, timeout: float | None, max_output: int
    ) -> ExecResult:
        status, pipes = await self._launch(request, stdin is not None)
        process = NamespaceProcess(self, status, pipes, timeout, max_output, False,
                                   may_kill_monitor=self._may_kill(request))  # fmt: skip
        self._processes.add(process)
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
        """See the contract. The last 64 KiB of its standard error are kept for `wait`."""
        terminal = {"TERM": "xterm"} if pty else {}
        request = self._command(argv, cwd, {**terminal, **(env or {})}, user)
        call = _call(request, env, tag=tag, pty=dataclasses.astuple(pty) if pty else None)
        async with self.logged("spawn", call, None) as token:
            if pty is None and tag is None:
                status, pipes = await self._launch({**request, "timeout": None}, True)
                process = NamespaceProcess(self, status, pipes, None, STDERR_KEPT, True,
                                           may_kill_monitor=self._may_kill(request))  # fmt: skip
                self._processes.add(process)
                await process.open_streams()
            else:
                request |= {"held": "relay", "pty": dataclasses.astuple(pty) if pty else None, "token": token}
                request |= {"name": f"tag:{tag}"} if tag is not None else {}
                process = await self._held(request, tag, pty=pty is not None)
        if tag is None:
            process.on_end = functools.partial(self._spawned_ended, token)
        return process

    def _spawned_ended(self, token: str, result: ExecResult) -> None:
        self.log.finish(token, result)
        METRICS.finished(self._provider.name, result)

    async def process(self, tag: str, *, offset: int = 0) -> NamespaceProcess:
        """See the contract."""
        spawned = next((each for each in self._spawned() if each.call.get("tag") == tag), None)
        if spawned is None:
            raise KeyError(f"no process of this sandbox has the tag {tag!r}")
        request = {"op": "join", "name": f"tag:{tag}", "offset": offset, "user": spawned.call["user"]}
        return await self._held(request, tag, pty=bool(spawned.call.get("pty")))

    async def processes(self) -> list[ProcessInfo]:
        """See the contract."""
        return [
            ProcessInfo(each.call["tag"], tuple(each.call["argv"]), each.end is None and self.connected)
            for each in self._spawned()
        ]

    def _spawned(self) -> list[Entry]:
        return [
            entry
            for entry in self.log.entries()
            if entry.operation == "spawn" and entry.call.get("tag") and "error" not in (entry.end or {})
        ]

    async def _held(self, request: dict[str, Any], tag: str | None, *, pty: bool) -> HeldProcess:
        further = [self.log.fd] if request["op"] == "exec" and tag is not None else []
        status, pipes = await self._launch(request, True, further)
        process = HeldProcess(self, status, pipes, None, STDERR_KEPT, True, tag=tag, pty=pty,
                              may_kill_monitor=self._may_kill(request))  # fmt: skip
        self._processes.add(process)
        await process.begin()
        return process

    def _may_kill(self, request: dict[str, Any]) -> bool:
        return request["user"] == "root" or self.single_id

    def _command(
        self, argv: Sequence[str] | str, cwd: str | None, env: Mapping[str, str] | None, user: str | None
    ) -> dict[str, Any]:
        user = user or "agent"
        if user not in ("agent", "root"):
            raise ValueError(f"user {user!r} does not exist in sandboxes; choose agent or root")
        words = ["/bin/sh", "-c", argv] if isinstance(argv, str) else [str(word) for word in argv]
        gate = self._gate.environment
        environment = {**base_environment(user), **gate, **self._environment, **(env or {})}
        if not words or any("\0" in text for text in (*words, *environment, *environment.values())):
            raise ValueError("a command needs at least one word, and none may contain a NUL character")
        return {
            "op": "exec",
            "argv": words,
            "env": environment,
            "cwd": cwd or self.spec.workdir,
            "user": user,
        }

    async def _launch(
        self, request: dict[str, Any], with_stdin: bool, further: Sequence[int] = ()
    ) -> tuple[Channel, tuple[int, int, int]]:
        """Send a request with fresh pipes: (status, our ends of stdin, stdout and stderr)."""
        ours, theirs = socket.socketpair()
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        if with_stdin:
            in_r, in_w = os.pipe()
        else:
            in_r, in_w = os.open("/dev/null", os.O_RDONLY), -1
        try:
            await self.send(request, [theirs.fileno(), in_r, out_w, err_w, *further])
        except BaseException:
            ours.close()
            close_all([out_r, err_r, *([in_w] if with_stdin else [])])
            raise
        finally:
            theirs.close()
            close_all([in_r, out_w, err_w])
        return Channel(ours), (in_w, out_r, err_r)


def _call(request: Mapping[str, Any], env: Mapping[str, str] | None, **further: Any) -> dict[str, Any]:
    """What the log keeps of a command: the image's and the spec's environment stand in the log's head."""
    kept = {
        name: request[name] for name in ("argv", "cwd", "user", "timeout", "max_output") if name in request
    }
    return {**kept, "env": dict(env or {}), **{name: value for name, value in further.items() if value}}
