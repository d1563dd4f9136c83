"""One pod, seen from the client: the namespace backend's handle over a `Link` instead of a socket."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sandbox.base import (
    Capabilities,
    Data,
    ExecResult,
    NetworkPolicy,
    Outcome,
    PolicyUnsupported,
    SandboxLost,
    SandboxSpec,
)
from sandbox.kubernetes.errors import PodOutOfMemory
from sandbox.kubernetes.link import Link
from sandbox.namespace.handle import NamespaceSandbox

if TYPE_CHECKING:
    from sandbox.kubernetes.provider import KubernetesProvider


class KubernetesSandbox(NamespaceSandbox):
    """See `sandbox.base.Sandbox`. Made by `KubernetesProvider` only."""

    def __init__(
        self,
        provider: KubernetesProvider,
        id: str,
        spec: SandboxSpec,
        environment: Mapping[str, str],
        link: Link,
        *,
        guest: bool = False,
    ) -> None:
        self.id = id
        self.spec = spec
        self.capabilities: Capabilities = provider.capabilities()
        self.link = link
        self._pods = provider
        self._environment = dict(environment)
        self._closed = False
        self._guest = guest
        self.single_id = provider.settings.users == "one"
        self._background = set()
        self._processes = set()

    async def _request(self, message: dict[str, Any], fds: list[int]) -> None:
        if self._closed:
            raise SandboxLost(f"sandbox {self.id} is closed")
        if message.get("user") == "root" and self.single_id:
            raise PolicyUnsupported("there is no root in pods with users=one; set users=two")
        await self.link.request(message, fds)

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
        result = await super().exec(
            argv, stdin=stdin, cwd=cwd, env=env, user=user, timeout=timeout, max_output=max_output, key=key
        )
        lost = self.link.lost
        if result.outcome is Outcome.LOST and isinstance(lost, SandboxLost):
            outcome = Outcome.OOM if isinstance(lost, PodOutOfMemory) else Outcome.LOST
            return dataclasses.replace(result, outcome=outcome, repercussion=lost.repercussion)
        return result

    async def snapshot(self) -> str:
        """PolicyUnsupported: the API gives no access to a container's writable layer."""
        raise PolicyUnsupported(
            "pods have no snapshots: the API server gives no access to a container's writable layer; "
            "take what is needed with get_tree, or use the namespace or docker backend"
        )

    async def fork(self, n: int = 1) -> list[NamespaceSandbox]:
        """PolicyUnsupported, for the same reason."""
        raise PolicyUnsupported("pods cannot be forked, since they have no snapshots")

    async def set_network(self, policy: NetworkPolicy) -> None:
        """PolicyUnsupported unless nothing changes."""
        if policy != self.spec.policy:
            raise PolicyUnsupported("a pod's network is chosen at its creation")

    @property
    def connected(self) -> bool:
        """Whether the session goes on; a connection that is being renewed counts."""
        return not self._closed and self.link.lost is None

    async def abandon(self) -> None:
        """Delete the pod because it no longer answers."""
        if not self._guest:
            await self._pods.remove(self.id)

    async def close(self) -> None:
        """Idempotent. Of a guest's handle: end its own commands and detach."""
        if self._closed:
            return
        self._closed = True
        await self.link.close()
        if not self._guest:
            await self._pods.remove(self.id)
        for process in list(self._processes):
            process.abandon()
        for collector in self._background:
            collector.close()

    def _absolute(self, path: str) -> str:
        if "\0" in path:
            raise ValueError("a path may not contain a NUL character")
        return os.path.join(self.spec.workdir, path)
