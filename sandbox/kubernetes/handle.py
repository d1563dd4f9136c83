"""One pod, seen from the client: the namespace backend's handle over a `Link` instead of a socket."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from sandbox.base import (
    Data,
    ExecResult,
    NetworkPolicy,
    Outcome,
    PolicyUnsupported,
    Repercussion,
    SandboxLost,
    SandboxSpec,
    SandboxUnavailable,
)
from sandbox.kubernetes.errors import PodOutOfMemory
from sandbox.kubernetes.gate import LinkGate
from sandbox.kubernetes.link import Link
from sandbox.log import SandboxLog
from sandbox.namespace.channel import Channel
from sandbox.namespace.handle import NamespaceSandbox

if TYPE_CHECKING:
    from sandbox.kubernetes.provider import KubernetesProvider


_CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"
_REQUESTS: ContextVar[list[int] | None] = ContextVar("requests", default=None)
"""Numbers of the requests that the running `exec` has sent."""


class KubernetesSandbox(NamespaceSandbox):
    """See `sandbox.base.Sandbox`. Made by `KubernetesProvider` only."""

    def __init__(
        self,
        provider: KubernetesProvider,
        id: str,
        spec: SandboxSpec,
        environment: Mapping[str, str],
        link: Link,
        log: SandboxLog,
        *,
        ours: bool = True,
        policy: NetworkPolicy | None = None,
    ) -> None:
        super().__init__(
            provider, id, spec, environment, LinkChannel(link), log,
            single_id=provider.settings.users == "one", ours=ours, policy=policy,
        )  # fmt: skip
        self.link = link
        self._gate = LinkGate(self.send, provider.ways, policy or spec.policy, link)
        self._closing = False

    async def send(self, message: dict[str, Any], fds: list[int]) -> None:
        """Send the helper one request. Raises SandboxLost if the pod is gone."""
        self.check_open()
        if message.get("user") == "root" and self.single_id:
            raise PolicyUnsupported("there is no root in pods with users=one; set users=two")
        number = await self.link.request(message, fds)
        if (requests := _REQUESTS.get()) is not None:
            requests.append(number)

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
        """See the contract. A pod killed at its memory limit while the command runs is outcome OOM."""
        requests: list[int] = []
        before = _REQUESTS.set(requests)
        try:
            result = await super().exec(argv, stdin=stdin, cwd=cwd, env=env, user=user, timeout=timeout,
                                        max_output=max_output, key=key)  # fmt: skip
        finally:
            _REQUESTS.reset(before)
        lost = self.link.lost
        if result.outcome is not Outcome.LOST or lost is None or self._closing:
            return result
        began = any(self.link.heard(number) for number in requests)
        if not began and result.repercussion is None:
            raise lost
        return (
            dataclasses.replace(result, outcome=Outcome.OOM) if isinstance(lost, PodOutOfMemory) else result
        )

    async def reaches(self, python: str, host: str, port: str) -> bool:
        """Whether a TCP connection from inside comes about; not part of the log."""
        request = self._command([python, "-I", "-S", "-c", _CONNECT, host, port], "/", None, None)
        request["timeout"] = 10.0
        return (await self._exec(request, None, 10.0, 1000)).ok

    async def snapshot(self) -> str:
        """PolicyUnsupported, and so is `fork`: the API gives no access to a container's writable layer."""
        raise PolicyUnsupported(
            "pods have no snapshots and forks: the API gives no access to a container's writable layer; "
            "take what is needed with get_tree, or use the namespace or docker backend"
        )

    @property
    def connected(self) -> bool:
        """Whether the session goes on; a connection that is being renewed counts."""
        return not self._closed and self.link.lost is None

    async def fate(self) -> Repercussion | None:
        """Why a lost pod is lost, if its own commands did it."""
        if self._closing:
            return None
        lost = self.link.lost
        if lost is None:
            return Repercussion.INIT  # the pod lives, but the helper of this operation was killed
        return lost.repercussion if isinstance(lost, SandboxLost) else None

    async def lost(self, text: str) -> SandboxLost:
        """The error for an operation that the pod did not survive: its own reason where it is known."""
        if isinstance(self.link.lost, SandboxLost) and not self._closing:
            return self.link.lost
        return await super().lost(text)

    async def close(self) -> None:
        """See the contract."""
        if not self._closing:
            self._closing = True
            await self._gate.close()
            await self.link.close()
        await super().close()


class LinkChannel(Channel):
    """A link where the namespace backend has a socket to init."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        await self._link.request(message, fds)

    def close(self) -> None:
        """The handle closes its link itself."""


class Recorder:
    """Stores lines of a monitor in the pod, on the disk before the pod hears that they arrived."""

    def __init__(self, log: SandboxLog) -> None:
        self._log = log

    def __call__(self, lines: bytes) -> None:
        """Raises SandboxUnavailable where the log cannot grow."""
        fd = self._log.fd
        if fd < 0:
            return
        try:
            if os.write(fd, lines) != len(lines):
                raise OSError(28, "No space left on device")
            os.fdatasync(fd)
        except OSError as error:
            raise SandboxUnavailable(
                f"cannot write {self._log.path}: {error.strerror}; free some disk"
            ) from error
