"""One namespace sandbox, seen from the client."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, Self

from sandbox.base import (
    Capabilities,
    Data,
    ExecResult,
    NetworkPolicy,
    PolicyUnsupported,
    ProcessInfo,
    Repercussion,
    SandboxLost,
    SandboxSpec,
    SandboxUnavailable,
    Size,
)
from sandbox.hostbase import python_prefix
from sandbox.log import SandboxLog
from sandbox.namespace import keyed
from sandbox.namespace.channel import Channel, Collector, close_all, feed
from sandbox.namespace.files import Files
from sandbox.namespace.gate import Gate, Ways
from sandbox.namespace.process import HeldProcess, NamespaceProcess
from sandbox.network.proxy import Attempt

DEFAULT_PATH = (
    f"/opt/env/bin:{python_prefix()}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)
STDERR_KEPT = 1 << 16


def base_environment(user: str) -> dict[str, str]:
    """What every command gets; nothing of the host's environment is among it."""
    home = "/root" if user == "root" else "/home/agent"
    return {"PATH": DEFAULT_PATH, "HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/sh",
            "LANG": "C.UTF-8", "TZ": "UTC", "TERM": "dumb", "TMPDIR": "/tmp"}  # fmt: skip


class Keeper(Protocol):
    """What a handle needs of the provider that made it."""

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


class NamespaceSandbox:
    """See `sandbox.base.Sandbox`. Made by `NamespaceProvider.create` and `attach` only."""

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
        self._background: set[Collector] = set()
        self._processes: set[NamespaceProcess] = set()
        self._files = Files(self.send, self.lost)
        self._gate = Gate(self.send, provider.ways, policy or spec.policy)

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
        request = self._command(argv, cwd, env, user)
        request |= {"timeout": timeout, "max_output": max_output}
        data = bytes(stdin) if isinstance(stdin, bytes | bytearray) else None
        call = _call(request, env, streamed=stdin is not None and data is None)
        if key is not None:
            if stdin is not None and data is None:
                raise ValueError("a keyed command takes its input as bytes: a stream cannot be compared")
            self._check_open()
            return await keyed.run(self, key, call, request, data)
        async with self._logged("exec", call, data) as token:
            result = await self._exec(request, stdin, timeout, max_output)
            self.log.finish(token, result)
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
        async with self._logged("spawn", call, None) as token:
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
            process.on_end = lambda result: self.log.finish(token, result)
        return process

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

    def _spawned(self) -> list[Any]:
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

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxLost(f"sandbox {self.id} is closed")

    async def send(self, message: dict[str, Any], fds: list[int]) -> None:
        """Send init one request. Raises SandboxLost if it is gone."""
        self._check_open()
        try:
            await self._channel.send(message, fds)
        except OSError as error:
            raise await self.lost(str(error)) from error

    @contextlib.asynccontextmanager
    async def _logged(
        self, operation: str, call: Mapping[str, Any], data: bytes | None
    ) -> AsyncGenerator[str]:
        """Record the start of a call, and its end if it raises."""
        self._check_open()
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

    # ---- files

    async def read(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """See the contract."""
        return await self._files.read(self._absolute(path), max_bytes)

    async def write(self, path: str, data: Data, *, mode: int = 0o644) -> None:
        """See the contract."""
        where = self._absolute(path)
        async with self._logged("write", {"path": where, "mode": mode}, _whole(data)) as token:
            await self._files.write(where, data, mode)
            self.log.done(token)

    async def put_tree(self, path: str, tar: Data) -> None:
        """See the contract."""
        where = self._absolute(path)
        async with self._logged("put_tree", {"path": where}, _whole(tar)) as token:
            await self._files.put_tree(where, tar)
            self.log.done(token)

    async def get_tree(self, path: str, *, max_bytes: int = 256 << 20) -> bytes:
        """See the contract."""
        return await self._files.get_tree(self._absolute(path), max_bytes)

    async def snapshot(self) -> str:
        """See the contract."""
        async with self._logged("snapshot", {}, None) as token:
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
        self._check_open()
        if not self._ours:
            raise PolicyUnsupported("only the client that made a sandbox can change its network")
        async with self._logged("set_network", {"policy": policy.encode()}, None) as token:
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
        if self._ours:
            await self._provider.kill(self.id)

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


def _call(request: Mapping[str, Any], env: Mapping[str, str] | None, **further: Any) -> dict[str, Any]:
    """What the log keeps of a command: the image's and the spec's environment stand in the log's head."""
    kept = {
        name: request[name] for name in ("argv", "cwd", "user", "timeout", "max_output") if name in request
    }
    return {**kept, "env": dict(env or {}), **{name: value for name, value in further.items() if value}}


def _whole(data: Data) -> bytes | None:
    """The data if it is all there; what is streamed is not recorded."""
    return bytes(data) if isinstance(data, bytes | bytearray | memoryview) else None
