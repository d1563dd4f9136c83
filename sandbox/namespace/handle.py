"""One namespace sandbox, seen from the client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from sandbox.base import Capabilities, ExecResult, Outcome, SandboxError, SandboxLost, SandboxSpec
from sandbox.hostbase import python_prefix
from sandbox.namespace.channel import Channel, Collector, close_all, feed
from sandbox.namespace.counters import Counters

if TYPE_CHECKING:
    from sandbox.namespace.provider import NamespaceProvider

DRAIN_SECONDS = 0.1
"""Silence after which output counts as complete although a background process holds the pipe."""
DRAIN_MAX_SECONDS = 2.0
GRACE_SECONDS = 15.0
"""How long after a command's timeout the sandbox itself is given up."""
DEFAULT_PATH = f"/opt/env/bin:{python_prefix()}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def base_environment(user: str) -> dict[str, str]:
    """What every command gets; nothing of the host's environment is among it."""
    home = "/root" if user == "root" else "/home/agent"
    return {"PATH": DEFAULT_PATH, "HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/sh",
            "LANG": "C.UTF-8", "TZ": "UTC", "TERM": "dumb", "TMPDIR": "/tmp"}  # fmt: skip


class NamespaceSandbox:
    """See `sandbox.base.Sandbox`. Made by `NamespaceProvider.create` only."""

    def __init__(
        self,
        provider: NamespaceProvider,
        id: str,
        spec: SandboxSpec,
        environment: Mapping[str, str],
        channel: Channel,
        counters: Counters,
    ) -> None:
        self.id = id
        self.spec = spec
        self.capabilities: Capabilities = provider.capabilities()
        self._provider = provider
        self._environment = dict(environment)
        self._channel = channel
        self._counters = counters
        self._closed = False
        self._background: set[Collector] = set()
        self._processes: set[NamespaceProcess] = set()

    # ---- commands

    async def exec(
        self,
        argv: Sequence[str] | str,
        *,
        stdin: bytes | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = 60,
        max_output: int = 1 << 20,
        key: str | None = None,
    ) -> ExecResult:
        """See the contract. `max_output` holds for each of the two streams."""
        if key is not None:
            raise NotImplementedError("exec(key=...) is not supported yet")
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
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> NamespaceProcess:
        """Start a long-lived process. The last 64 KiB of its standard error are kept for `wait`."""
        process = await self._launch(argv, cwd, env, user, None, 1 << 16, True, stream=True)
        await process.open_streams()
        return process

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
        before = self._counters.read()
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
            self, Channel(ours), in_w, out_r, err_r, timeout, max_output, before, stream
        )
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
        self, message: dict[str, Any], data: bytes | None, limit: int = 0
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

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file and its parent folders, owned by the agent; raises OSError as `open` would."""
        message = {"op": "write", "path": self._absolute(path), "mode": mode}
        reply, _ = await self._transfer(message, data)
        if reply["bytes"] != len(data):
            raise SandboxLost(f"wrote {reply['bytes']} of {len(data)} bytes of {path}")

    async def put_tree(self, path: str, tar: bytes) -> None:
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

    def _absolute(self, path: str) -> str:
        if "\0" in path:
            raise ValueError("a path may not contain a NUL character")
        return os.path.join(self.spec.workdir, path)

    # ---- end

    @property
    def alive(self) -> bool:
        return not self._closed and not self._provider.is_dead(self.id)

    def forget(self, process: NamespaceProcess) -> None:
        self._processes.discard(process)

    def keep_draining(self, collector: Collector) -> None:
        self._background = {each for each in self._background if not each.ended.done()}
        self._background.add(collector)

    async def abandon(self) -> None:
        """Kill the sandbox because it no longer answers."""
        await self._provider.kill(self.id)

    async def counters_since(self, before: dict[str, int]) -> set[str]:
        return self._counters.rose(before)

    async def close(self) -> None:
        """Idempotent; kills everything inside and frees the writable layer."""
        if self._closed:
            return
        self._closed = True
        self._channel.close()
        for process in list(self._processes):
            process.release()
        for collector in self._background:
            collector.close()
        await self._provider.kill(self.id)

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


class NamespaceProcess:
    """A command under way; see `sandbox.base.Process`."""

    def __init__(
        self,
        sandbox: NamespaceSandbox,
        status: Channel,
        stdin: int,
        stdout: int,
        stderr: int,
        timeout: float | None,
        max_output: int,
        before: dict[str, int],
        stream: bool,
    ) -> None:
        self._sandbox = sandbox
        self._status = status
        self._stdin = stdin
        self._stdout_fd = stdout
        self._timeout = timeout
        self._before = before
        self._started = time.monotonic()
        self._out = None if stream else Collector(stdout, max_output)
        self._err = Collector(stderr, max_output)
        self._reader = asyncio.StreamReader(limit=64 << 20) if stream else None
        self._transport: asyncio.ReadTransport | None = None
        self._writing = asyncio.Lock()
        self._result: ExecResult | None = None
        self._waiting = asyncio.Lock()

    async def open_streams(self) -> None:
        assert self._reader is not None
        loop = asyncio.get_running_loop()
        protocol = asyncio.StreamReaderProtocol(self._reader)
        pipe = os.fdopen(self._stdout_fd, "rb", 0)
        self._transport, _ = await loop.connect_read_pipe(lambda: protocol, pipe)

    def take_stdin(self) -> int:
        fd, self._stdin = self._stdin, -1
        return fd

    async def write(self, data: bytes) -> None:
        """Raises BrokenPipeError once the process no longer reads."""
        async with self._writing:
            if self._stdin < 0:
                raise BrokenPipeError("standard input is closed")
            copy = os.dup(self._stdin)
            view = memoryview(data)
            os.set_blocking(copy, False)
            loop = asyncio.get_running_loop()
            try:
                while view:
                    try:
                        view = view[os.write(copy, view) :]
                    except BlockingIOError:
                        ready = loop.create_future()
                        loop.add_writer(copy, lambda ready=ready: ready.done() or ready.set_result(None))
                        try:
                            await ready
                        finally:
                            loop.remove_writer(copy)
            finally:
                os.close(copy)

    async def close_stdin(self) -> None:
        if self._stdin >= 0:
            os.close(self.take_stdin())

    async def readline(self) -> bytes:
        """Next line of standard output, b'' at the end."""
        assert self._reader is not None, "only spawned processes have line streams"
        return await self._reader.readline()

    async def read_exactly(self, size: int) -> bytes:
        """Exactly `size` bytes of standard output; raises asyncio.IncompleteReadError at its end."""
        assert self._reader is not None, "only spawned processes have line streams"
        return await self._reader.readexactly(size)

    async def kill(self) -> None:
        """Kill the process and everything it started; `wait` then reports `cancelled`."""
        self._hang_up()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._status.sock.shutdown(socket.SHUT_WR)

    async def wait(self) -> ExecResult:
        """The result; cancelling this call kills the process."""
        async with self._waiting:
            if self._result is None:
                try:
                    self._result = await self._wait()
                finally:
                    self.release()
            return self._result

    async def _wait(self) -> ExecResult:
        limit = None if self._timeout is None else self._timeout + GRACE_SECONDS
        try:
            async with asyncio.timeout(limit):
                report = await self._status.receive()
        except TimeoutError:
            await self._sandbox.abandon()
            report = None
        duration = time.monotonic() - self._started
        await self._drain()
        rose = await self._sandbox.counters_since(self._before)
        outcome, code, number = _outcome(report, rose, lost=not self._sandbox.alive)
        return ExecResult(
            outcome=outcome,
            exit_code=code,
            signal=number,
            stdout=self._out.take() if self._out else b"",
            stderr=self._err.take(),
            stdout_total=self._out.total if self._out else 0,
            stderr_total=self._err.total,
            duration_s=duration,
            peak_memory=report.get("maxrss") if report else None,
        )

    async def _drain(self) -> None:
        """Wait for the pipes' ends, or for silence if a background process holds them."""
        loop = asyncio.get_running_loop()
        ends = [each for each in (self._out, self._err) if each is not None]
        began = loop.time()
        while waiting := [each.ended for each in ends if not each.ended.done()]:
            now = loop.time()
            quiet = now - max(began, *(each.last_data for each in ends))
            if quiet >= DRAIN_SECONDS or now - began >= DRAIN_MAX_SECONDS:
                return
            await asyncio.wait(waiting, timeout=DRAIN_SECONDS - quiet)

    def release(self) -> None:
        """Give up everything but the draining of pipes that background processes still hold; idempotent."""
        self._sandbox.forget(self)
        self._hang_up()
        self._status.close()
        if self._stdin >= 0:
            os.close(self.take_stdin())
        if self._transport is not None:
            self._transport.close()
        for collector in (self._out, self._err):
            if collector is not None and not collector.ended.done():
                collector.discard()
                self._sandbox.keep_draining(collector)


def _outcome(
    report: dict[str, Any] | None, rose: set[str], *, lost: bool
) -> tuple[Outcome, int | None, int | None]:
    """(outcome, exit code, signal) from the monitor's report and the limits that were hit meanwhile."""
    if report is None:
        return (Outcome.OOM if "oom" in rose and not lost else Outcome.LOST), None, None
    if "error" in report:
        return Outcome.PIDS, None, None
    code, number = report["exit"], report["signal"]
    if report["reason"] == "timeout":
        return Outcome.TIMEOUT, None, number
    if report["reason"] == "killed":
        return Outcome.CANCELLED, None, number
    if code == 0:
        return Outcome.EXITED, 0, None
    if "oom" in rose:
        return Outcome.OOM, code, number
    if "pids" in rose:
        return Outcome.PIDS, code, number
    if report["disk_full"]:
        return Outcome.DISK, code, number
    return (Outcome.SIGNALED if number is not None else Outcome.EXITED), code, number
