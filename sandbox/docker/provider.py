"""The docker backend's provider: one container a sandbox, with our own init as its first process.

The engine gives what it is good at: images, namespaces, control groups, labels. Everything else is the code
of `sandbox/node`, as in the namespace backend: root, commands, limits of disk and output, files, snapshots.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from sandbox.admission import Admission
from sandbox.base import (
    AdmissionRefused,
    Capabilities,
    Repercussion,
    SandboxInfo,
    SandboxLost,
    SandboxProvider,
    SandboxSpec,
    SandboxUnavailable,
)
from sandbox.docker import requests
from sandbox.docker.engine import Engine, NotThere
from sandbox.docker.handle import DockerSandbox
from sandbox.docker.images import Loader
from sandbox.docker.places import Place, readable
from sandbox.docker.requests import LABEL
from sandbox.images import ImageManifest, ImageStore, default_store
from sandbox.log import SandboxLog
from sandbox.metrics import METRICS
from sandbox.namespace import gate
from sandbox.namespace.channel import Channel
from sandbox.node.contained import PLACE
from sandbox.node.ledger import Ledger, Refused

START_SECONDS = 90.0
FATE_SECONDS = 5.0


class DockerProvider(SandboxProvider):
    """See `sandbox.base.SandboxProvider`.

    `url`: the engine's unix socket (default: $DOCKER_HOST). `admission`: what this node may be promised; what
    lives on its lease after its client was killed counts only in the memory that is available.
    `trusted_networks`, `index_url`: as of the namespace backend.
    """

    name = "docker"

    def __init__(
        self,
        store: Path | ImageStore | None = None,
        *,
        url: str | None = None,
        admission: Admission | None = None,
        trusted_networks: Sequence[str] = (),
        index_url: str | None = None,
    ) -> None:
        self.admission = admission or Admission()
        self._ledger: Ledger | None = None
        self.images = store if isinstance(store, ImageStore) else ImageStore(store or default_store())
        self.ways = gate.Ways(self.images.root / "index", trusted_networks, index_url)
        self.engine = Engine(url)
        self._loader = Loader(self.images, self.engine)
        self._capabilities: Capabilities | None = None
        self._apparmor = False
        self._live: dict[str, DockerSandbox] = {}
        self._names: dict[str, str] = {}
        self._promised: dict[str, int] = {}

    def capabilities(self) -> Capabilities:
        """What this engine enforces. SandboxUnavailable if none answers, or it is not of this machine."""
        if self._capabilities is None:
            info = self.engine.info()
            if info["OSType"] != "linux" or info["KernelVersion"] != os.uname().release:
                raise SandboxUnavailable(
                    f"the engine at {self.engine.url} runs on another kernel: use one of this machine"
                )
            self._apparmor = any("name=apparmor" in option for option in info["SecurityOptions"])
            self._capabilities = requests.capabilities(info)
        return self._capabilities

    # ---- sandboxes

    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        """Raises KeyError for an unknown image, PolicyUnsupported, or SandboxUnavailable."""
        with METRICS.creating(self):
            return await self._create(spec)

    async def _create(self, spec: SandboxSpec) -> DockerSandbox:
        manifest = self.images.manifest(spec.image)
        requests.check(spec, self.capabilities())
        id = secrets.token_hex(8)
        self._admit(id, spec)
        async with contextlib.AsyncExitStack() as undo:
            undo.callback(self._release, id)
            sandbox = await self._make(id, spec, manifest, undo)
            undo.pop_all()
        self._live[id] = sandbox
        await sandbox.open_gate()
        return sandbox

    async def _make(
        self, id: str, spec: SandboxSpec, manifest: ImageManifest, undo: contextlib.AsyncExitStack
    ) -> DockerSandbox:
        """Everything that a failure or a cancellation takes back through `undo`."""
        place = Place(self.images.root, id)
        undo.callback(place.remove)
        listener = place.make()
        with listener:
            log = SandboxLog.create(self.images.root, spec, id, backend=self.name)
            undo.callback(log.discard)
            self._names[id] = f"{LABEL}-{re.sub(r'[^A-Za-z0-9_.-]', '_', spec.owner)[:40]}-{id}"
            request, mounts = requests.for_init(spec, manifest)
            options = requests.for_engine(
                self.engine.api, id, self._names[id], spec, {**mounts, str(place.run): f"{PLACE}/run"},
                str(self.images.root), apparmor=self._apparmor,
            )  # fmt: skip
            starting = asyncio.ensure_future(self._start(spec.image, options))
            undo.push_async_callback(lambda: asyncio.shield(self._abort(id, starting)))
            try:
                await asyncio.shield(starting)
                channel = await self._boot(id, spec, request, listener)
            except (OSError, NotThere) as error:
                raise SandboxUnavailable(f"cannot start a container: {error}") from error
        return DockerSandbox(self, id, spec, request["handle"]["environment"], channel, log, place)

    def _admit(self, id: str, spec: SandboxSpec) -> None:
        """Promise the sandbox its memory, or raise AdmissionRefused."""
        if self._ledger is None:
            self._ledger = Ledger(str(self.images.root / "node"), None, f"-{secrets.token_hex(4)}")
        limits = {
            "sandboxes": self.admission.sandboxes,
            "overcommit": self.admission.overcommit,
            "available": self.admission.available_mb << 20,
        }
        try:
            self._ledger.admit(spec.memory_mb << 20, limits)
        except Refused as refused:
            raise AdmissionRefused(f"this node is full: {refused}", refused.limit) from None
        self._promised[id] = spec.memory_mb << 20

    async def _start(self, image: str, options: dict[str, Any]) -> None:
        """Start the container, after loading its image if the engine has it not (any more)."""
        options["image"] = await self._loader.ensure(image)
        try:
            await self.engine.start(options)
        except NotThere:
            self._loader.forget(image)
            await self._loader.ensure(image)
            await self.engine.start(options)

    async def _abort(self, id: str, starting: asyncio.Future[None]) -> None:
        """Remove a container, once it is known whether there is one."""
        await asyncio.wait([starting])  # raises nothing; whoever waits for `starting` sees its error
        with contextlib.suppress(SandboxUnavailable):
            await self.engine.remove(self._names.pop(id))

    def _release(self, id: str) -> None:
        memory = self._promised.pop(id, None)
        if self._ledger is not None and memory is not None:
            self._ledger.release(memory)

    async def _boot(
        self, id: str, spec: SandboxSpec, request: dict[str, Any], listener: socket.socket
    ) -> Channel:
        """Wait for init, tell it what to be, and see that the engine did what it was asked for."""
        deadline = time.monotonic() + START_SECONDS
        while not await readable(listener, 2):
            state = (await self.engine.inspect(self._names[id]))["State"]
            if not state["Running"] or time.monotonic() > deadline:
                said = await self.engine.tail(self._names[id])
                raise SandboxUnavailable(f"the container's init did not start ({state['Status']}): {said}")
        sock, _ = listener.accept()
        channel = Channel(sock)
        try:
            await channel.send(request, [listener.fileno()])
            async with asyncio.timeout(START_SECONDS):
                reply = await channel.receive()
            if reply is None or "error" in reply:
                said = reply["error"] if reply else await self.engine.tail(self._names[id])
                raise SandboxUnavailable(f"cannot set up the container: {said}")
            requests.verify(spec, reply, remapped=self.capabilities().user_namespace)
        except BaseException as error:
            channel.close()
            if isinstance(error, TimeoutError):
                raise SandboxUnavailable("the container's init does not answer") from error
            raise
        return channel

    def living(self) -> int:
        """How many sandboxes of this client are alive."""
        return sum(box.connected for box in self._live.values())

    async def fate(self, id: str) -> Repercussion | None:
        """By its own doing if the memory limit killed init; else, also if somebody removed it, None."""
        deadline = time.monotonic() + FATE_SECONDS
        try:
            while time.monotonic() < deadline:
                state = (await self.engine.inspect(self._names.get(id, id)))["State"]
                if not state["Running"]:
                    return Repercussion.INIT if state["OOMKilled"] else None
                await asyncio.sleep(0.02)
        except (NotThere, SandboxUnavailable):
            return None
        return None

    async def end(self, id: str, channel: Channel) -> None:
        """The same for a sandbox that this client inherited: its name is known here too."""
        await self.kill(id)

    async def kill(self, id: str) -> None:
        """Remove a sandbox's container and what lies on disk for it."""
        sandbox = self._live.pop(id, None)
        name = self._names.pop(id, None)
        if name is not None:
            await self.engine.remove(name)
        (sandbox.place if sandbox else Place(self.images.root, id)).remove()
        self._release(id)

    def import_snapshot(self, parent: str, tar: bytes, note: str) -> str:
        """Store an upper layer's tar on top of `parent`."""
        layer = self.images.import_layer(io.BytesIO(tar))
        return self.images.stack(parent, layer, note=f"snapshot {note}")

    # ---- bookkeeping

    async def attach(self, id: str) -> DockerSandbox:
        """The handle of a living sandbox. If its creator is gone, this client answers for it from now on."""
        sandbox = self._live.get(id)
        if sandbox is not None and sandbox.connected:
            return sandbox
        self.capabilities()
        found = await self.engine.labelled({f"{LABEL}.id": id})
        place = Place(self.images.root, id)
        sock = place.connect() if sandbox is None and found else None
        if sock is None:
            raise SandboxLost(f"no living sandbox {id}")
        channel = Channel(sock)
        reply = await channel.receive()
        if reply is None:
            channel.close()
            raise SandboxLost(f"no living sandbox {id}: it just ended")
        self._names[id] = found[0]["Names"][0].lstrip("/")
        log = SandboxLog(self.images.root, id)
        ours = place.lock()
        environment = reply["handle"]["environment"]
        policy = gate.last_policy(log.entries(), log.spec.policy)
        sandbox = DockerSandbox(
            self, id, log.spec, environment, channel, log, place, ours=ours, policy=policy
        )
        if ours:
            self._live[id] = sandbox
        await sandbox.open_gate()
        return sandbox

    async def list(self, owner: str) -> list[SandboxInfo]:
        """Running containers of `owner`, of every client of this engine."""
        return [
            SandboxInfo(
                labels[f"{LABEL}.id"],
                owner,
                labels[f"{LABEL}.image"],
                float(labels[f"{LABEL}.created"]),
                orphan=_place(labels).is_orphan(),
            )
            for found in await self.engine.labelled({f"{LABEL}.owner": owner})
            if found["State"] == "running"
            for labels in (found["Labels"],)
        ]

    async def reap(self, owner: str) -> int:
        """Remove this owner's containers for which no client answers, unless they live on their lease.

        Images that the store has collected leave the engine too. Returns how many sandboxes.
        """
        count = 0
        for found in await self.engine.labelled({f"{LABEL}.owner": owner}):
            place = _place(found["Labels"])
            gone = place.is_orphan() or not place.folder.exists()
            mortal = found["Labels"].get(f"{LABEL}.lease") == "" and place.is_orphan()
            if gone and (found["State"] != "running" or mortal):
                await self.engine.remove(found["Id"])
                place.remove()
                count += 1
        await self._sweep()
        await self._loader.collect()
        return count

    async def _sweep(self) -> None:
        """Remove folders of clients that were killed before or after they had a container."""
        folders = [Place(self.images.root, path.name) for path in (self.images.root / "docker").glob("*")]
        orphans = [place for place in folders if place.is_orphan()]
        found = await self.engine.labelled({f"{LABEL}.store": str(self.images.root)}) if orphans else []
        alive = {each["Labels"][f"{LABEL}.id"] for each in found}
        for place in orphans:
            if place.folder.name not in alive:
                place.remove()

    async def close(self) -> None:
        """Close this client's sandboxes and the connection to the engine; idempotent."""
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._live.values())))
        self.engine.close()
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _place(labels: Mapping[str, str]) -> Place:
    return Place(Path(labels[f"{LABEL}.store"]), labels[f"{LABEL}.id"])
