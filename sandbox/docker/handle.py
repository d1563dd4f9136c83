"""One docker sandbox, seen from the client: the same init as elsewhere, reached through a unix socket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sandbox.base import NetworkPolicy, SandboxSpec
from sandbox.docker.places import Place
from sandbox.log import SandboxLog
from sandbox.namespace.channel import Channel
from sandbox.namespace.handle import NamespaceSandbox

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sandbox.docker.provider import DockerProvider


class DockerSandbox(NamespaceSandbox):
    """See `sandbox.base.Sandbox`. Made by `DockerProvider` only."""

    def __init__(
        self,
        provider: DockerProvider,
        id: str,
        spec: SandboxSpec,
        environment: Mapping[str, str],
        channel: Channel,
        log: SandboxLog,
        place: Place,
        *,
        ours: bool = True,
        policy: NetworkPolicy | None = None,
    ) -> None:
        super().__init__(
            provider, id, spec, environment, channel, log, single_id=False, ours=ours, policy=policy
        )
        self.place = place

    async def close(self) -> None:
        """See the contract. A guest whose sandbox has lost its creator ends it."""
        if not self._closed and not self._ours:
            self._ours = self.place.lock()
        await super().close()
