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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from sandbox import hostbase
from sandbox.base import (
    Capabilities,
    NetworkPolicy,
    PolicyUnsupported,
    Repercussion,
    SandboxInfo,
    SandboxLost,
    SandboxProvider,
    SandboxSpec,
    SandboxUnavailable,
)
from sandbox.docker import runtime
from sandbox.docker.engine import Engine, NotThere
from sandbox.docker.handle import DockerSandbox
from sandbox.docker.images import Loader
from sandbox.docker.places import Place, readable
from sandbox.images import ImageManifest, ImageStore, default_store
from sandbox.log import SandboxLog
from sandbox.namespace import buildnet
from sandbox.namespace.channel import Channel
from sandbox.node.contained import PLACE

LABEL = "posttrain"
START_SECONDS = 90.0
FATE_SECONDS = 5.0
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
                 "SYS_ADMIN", "SYS_CHROOT")  # fmt: skip
"""Of PID 1 while it builds the root. It keeps the first eight, commands of root seven, the agent none."""


class DockerProvider(SandboxProvider):
    """See `sandbox.base.SandboxProvider`. `url`: the engine's unix socket (default: $DOCKER_HOST)."""

    name = "docker"

    def __init__(self, store: Path | ImageStore | None = None, *, url: str | None = None) -> None:
        self.images = store if isinstance(store, ImageStore) else ImageStore(store or default_store())
        self.engine = Engine(url)
        self._loader = Loader(self.images, self.engine)
        self._capabilities: Capabilities | None = None
        self._apparmor = False
        self._live: dict[str, DockerSandbox] = {}
        self._names: dict[str, str] = {}

    def capabilities(self) -> Capabilities:
        """What this engine enforces. SandboxUnavailable if none answers, or it is not of this machine."""
        if self._capabilities is None:
            info = self.engine.info()
            if info["OSType"] != "linux" or info["KernelVersion"] != os.uname().release:
                raise SandboxUnavailable(
                    f"the engine at {self.engine.url} runs on another kernel: use one of this machine"
                )
            self._apparmor = any("name=apparmor" in option for option in info["SecurityOptions"])
            self._capabilities = _capabilities(info)
        return self._capabilities

    # ---- sandboxes

    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        """Raises KeyError for an unknown image, PolicyUnsupported, or SandboxUnavailable."""
        manifest = self.images.manifest(spec.image)
        self.capabilities()
        _check(spec)
        id = secrets.token_hex(8)
        place = Place(self.images.root, id)
        listener = place.make()
        self._names[id] = f"{LABEL}-{re.sub(r'[^A-Za-z0-9_.-]', '_', spec.owner)[:40]}-{id}"
        log = SandboxLog.create(self.images.root, spec, id, backend=self.name)
        request, mounts = self._request(spec, manifest)
        options = self._container(id, spec, {**mounts, str(place.run): f"{PLACE}/run"})
        starting = asyncio.ensure_future(self._start(spec.image, options))
        try:
            await asyncio.shield(starting)
            channel = await self._boot(id, spec, request, listener)
        except BaseException as error:
            log.discard()
            await asyncio.shield(self._abort(id, place, starting))
            if isinstance(error, OSError | NotThere):
                raise SandboxUnavailable(f"cannot start a container: {error}") from error
            raise
        finally:
            listener.close()
        sandbox = DockerSandbox(self, id, spec, request["handle"]["environment"], channel, log, place)
        self._live[id] = sandbox
        return sandbox

    async def _start(self, image: str, options: dict[str, Any]) -> None:
        """Start the container, after loading its image if the engine has it not (any more)."""
        options["image"] = await self._loader.ensure(image)
        try:
            await self.engine.start(options)
        except NotThere:
            self._loader.forget(image)
            await self._loader.ensure(image)
            await self.engine.start(options)

    async def _abort(self, id: str, place: Place, starting: asyncio.Future[None]) -> None:
        with contextlib.suppress(SandboxUnavailable, NotThere):
            await starting
        with contextlib.suppress(SandboxUnavailable):
            await self.engine.remove(self._names.pop(id))
        place.remove()

    def _request(self, spec: SandboxSpec, manifest: ImageManifest) -> tuple[dict[str, Any], dict[str, str]]:
        """What init is asked for, and the host folders that the container must show for it."""
        run_binds, etc_binds, network_env = buildnet.passage(spec.policy.mode)
        mounts = dict(runtime.mounts())
        mounts.update({source: runtime.inside(source) for source, _ in (*run_binds, *etc_binds)})
        environment = {**manifest.env, **network_env, **spec.env}
        return {
            "scratch": f"{PLACE}/scratch",
            "layers_dir": "/",
            "layers": [],
            "base": ".",
            "binds": [
                (runtime.inside(source), target)
                for source, target in (hostbase.binds() if manifest.base == "host" else ())
            ],
            "run_binds": [(runtime.inside(source), name) for source, name in run_binds],
            "etc_binds": [(runtime.inside(source), target) for source, target in etc_binds],
            "workdir": spec.workdir,
            "network": spec.policy.mode,
            "nested": False,
            "single_id": False,
            "disk_bytes": spec.disk_mb << 20,
            "inodes": max(4096, spec.disk_mb * 256),
            "rlimits": {"RLIMIT_NOFILE": 4096},
            "lease_s": spec.lease_s,
            "handle": {"environment": environment},
        }, mounts

    def _container(self, id: str, spec: SandboxSpec, mounts: Mapping[str, str]) -> dict[str, Any]:
        """The engine's request, but for the image."""
        memory = spec.memory_mb << 20
        quiet = spec.policy.mode == "none"
        host = self.engine.api.create_host_config(
            network_mode="none" if quiet else "host",
            mem_limit=memory,
            memswap_limit=memory,
            pids_limit=spec.pids + 1,  # init does not count
            cap_drop=["ALL"],
            cap_add=list(_CAPABILITIES),
            security_opt=["no-new-privileges", *(["apparmor=unconfined"] if self._apparmor else [])],
            read_only=True,
            tmpfs={f"{PLACE}/scratch": "size=64k,mode=755"},
            ipc_mode="none",
            binds={source: {"bind": target, "mode": "ro"} for source, target in mounts.items()},
            log_config={"Type": "json-file", "Config": {"max-size": "64k", "max-file": "1"}},
        )
        # Not in the SDK: our init masks /proc itself, and more of it; the group is shown as the root.
        host |= {"MaskedPaths": [], "ReadonlyPaths": [], "CgroupnsMode": "private"}
        if spec.runtime:
            host["Runtime"] = spec.runtime
        return {
            "name": self._names[id],
            "entrypoint": list(runtime.command()),
            "command": [],
            "user": "0:0",
            "working_dir": "/",
            "hostname": "sandbox",
            "environment": ["PATH=/usr/bin", "LC_ALL=C.UTF-8"],
            "network_disabled": quiet,
            "host_config": host,
            "labels": {
                f"{LABEL}.id": id,
                f"{LABEL}.owner": spec.owner,
                f"{LABEL}.image": spec.image,
                f"{LABEL}.store": str(self.images.root),
                f"{LABEL}.created": repr(time.time()),
            },
        }

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
            _verify(spec, reply)
        except BaseException as error:
            channel.close()
            if isinstance(error, TimeoutError):
                raise SandboxUnavailable("the container's init does not answer") from error
            raise
        return channel

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
        sandbox = DockerSandbox(self, id, log.spec, environment, channel, log, place, ours=ours)
        if ours:
            self._live[id] = sandbox
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
        """Remove ended containers of this owner for which no client answers; returns how many."""
        count = 0
        for found in await self.engine.labelled({f"{LABEL}.owner": owner}):
            place = _place(found["Labels"])
            gone = place.is_orphan() or not place.folder.exists()
            if found["State"] != "running" and gone:
                await self.engine.remove(found["Id"])
                place.remove()
                count += 1
        return count

    async def close(self) -> None:
        """Close this client's sandboxes and the connection to the engine; idempotent."""
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._live.values())))
        self.engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _place(labels: Mapping[str, str]) -> Place:
    return Place(Path(labels[f"{LABEL}.store"]), labels[f"{LABEL}.id"])


def _check(spec: SandboxSpec) -> None:
    if spec.policy not in (NetworkPolicy("none"), NetworkPolicy("host")):
        raise PolicyUnsupported("the docker backend offers the networks none and host")
    if spec.nested:
        raise PolicyUnsupported("the docker backend makes no nested sandboxes: grade with namespace")
    for name in ("memory_mb", "pids", "disk_mb"):
        if getattr(spec, name) < 1:
            raise PolicyUnsupported(f"{name} must be at least 1, not {getattr(spec, name)}")
    if spec.memory_mb < 32:
        raise PolicyUnsupported(f"memory_mb must be at least 32 (init needs some), not {spec.memory_mb}")
    if not spec.workdir.startswith("/"):
        raise PolicyUnsupported(f"workdir must be absolute, not {spec.workdir!r}")


def _verify(spec: SandboxSpec, facts: dict[str, Any]) -> None:
    """PolicyUnsupported unless the limits in force are those that were asked for."""
    for name, wanted in (("memory", spec.memory_mb << 20), ("pids", spec.pids + 1)):
        value: str = facts["limits"].get(name, "none")
        if not value.isdigit() or int(value) > wanted:
            raise PolicyUnsupported(f"the engine did not limit {name}: asked {wanted}, in force {value}")
    own = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "mnt")}
    shared = [kind for kind, name in own.items() if facts["namespaces"][kind] == name]
    if spec.policy.mode == "host" and "net" in shared:
        shared.remove("net")
    if shared:
        raise PolicyUnsupported(f"the engine gave no {shared[0]} namespace of its own")


def _capabilities(info: Mapping[str, Any]) -> Capabilities:
    options: list[str] = info["SecurityOptions"]
    remapped = any("name=userns" in option for option in options)
    missing: list[str] = []
    if not remapped:
        missing.append("own user namespace: the engine runs without userns-remap")
    if any("name=apparmor" in option for option in options):
        missing.append("AppArmor's docker-default: it forbids the mounts by which the disk is limited")
    for name, what in (("MemoryLimit", "memory"), ("PidsLimit", "processes")):
        if not info.get(name):
            missing.append(f"{what}: the engine finds no such control group on this host")
    return Capabilities(
        network_none=True,
        memory_limit=bool(info.get("MemoryLimit")),
        pids_limit=bool(info.get("PidsLimit")),
        disk_limit=True,
        user_namespace=remapped,
        unenforced=tuple(missing),
        disk_limit_everywhere=True,
        seccomp=any("name=seccomp" in option for option in options),
        read_only_system=True,
        attach=True,
        snapshot=True,
        fork=True,
        pty=True,
        tags=True,
        log=True,
        lease=True,
        networks=("none", "host"),
    )
