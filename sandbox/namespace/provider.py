"""The namespace backend's provider: one nodelet process, any number of sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from sandbox import hostbase
from sandbox.admission import Admission
from sandbox.base import (
    AdmissionRefused,
    Capabilities,
    PolicyUnsupported,
    Repercussion,
    SandboxInfo,
    SandboxLost,
    SandboxProvider,
    SandboxSpec,
    SandboxUnavailable,
)
from sandbox.images import ImageManifest, ImageStore, default_store
from sandbox.log import SandboxLog, prune
from sandbox.metrics import METRICS
from sandbox.namespace import buildnet, gate, guests, probe, records
from sandbox.namespace.channel import Channel
from sandbox.namespace.handle import NamespaceSandbox
from sandbox.namespace.records import Records
from sandbox.node import wire

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 30.0
FATE_SECONDS = 2.0
_BOOT = (
    "import sys; sys.path.insert(0, {root!r}); "
    "from sandbox.node import zygote; sys.path.pop(0); zygote.main()"
)


class NamespaceProvider(SandboxProvider):
    """See `sandbox.base.SandboxProvider`. Its sandboxes die with this process, however it ends."""

    name = "namespace"

    def __init__(
        self,
        store: Path | ImageStore | None = None,
        *,
        admission: Admission | None = None,
        trusted_networks: Sequence[str] = (),
        index_url: str | None = None,
        show_groups: bool = False,
    ) -> None:
        """`trusted_networks`: private networks (CIDR) where names of an allow-list may lie, such as that of a
        company's mirror. `index_url`: the package index that policies cut at a day (PIP_INDEX_URL, pypi.org).
        `show_groups`: sandboxes see their own control groups, read-only, as containers do.
        """
        self._show_groups = show_groups
        self.images = store if isinstance(store, ImageStore) else ImageStore(store or default_store())
        self.ways = gate.Ways(self.images.root / "index", trusted_networks, index_url)
        self.admission = admission or Admission()
        self._records = Records(self.images.root / "run")
        self._nodelet: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._groups: dict[str, Any] = {}
        self._capabilities: Capabilities | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: dict[str, NamespaceSandbox] = {}
        self._dying: dict[str, asyncio.Future[None]] = {}
        self._dead: dict[str, Repercussion | None] = {}
        """Sandboxes that ended before anybody asked, and whether by their own doing."""

    # ---- the nodelet

    def capabilities(self) -> Capabilities:
        """What is enforced here; starts the nodelet. Raises SandboxUnavailable if the host cannot."""
        if self._capabilities is None or self._nodelet is None:
            self._start()
        assert self._capabilities is not None
        return self._capabilities

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        boot = _BOOT.format(root=str(ROOT))
        self._nodelet = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", boot, str(theirs.fileno()), str(self.images.root / "run")],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={"PATH": os.defpath, "LC_ALL": "C.UTF-8"},
        )
        theirs.close()
        ours.settimeout(START_SECONDS)
        try:
            hello, _ = wire.receive(ours)
        except TimeoutError:
            hello = None
        if hello is None or "error" in hello:
            ours.close()
            self._nodelet.kill()
            self._nodelet.wait()
            self._nodelet = None
            raise SandboxUnavailable(hello["error"] if hello else "the sandbox nodelet did not start")
        self._groups = hello["groups"]
        self._facts = hello
        self._capabilities = probe.capabilities(hello)
        self._channel = Channel(ours)
        self._loop = None
        self._dead.clear()

    def _attach_loop(self) -> Channel:
        """Hear the nodelet's events on the running loop."""
        loop = asyncio.get_running_loop()
        if self._channel is None:
            self.capabilities()
        assert self._channel is not None
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._channel.sock)
            self._channel = Channel(self._channel.sock)
            self._loop = loop
            loop.add_reader(self._channel.sock, self._events)
        return self._channel

    def _events(self) -> None:
        assert self._channel is not None
        assert self._loop is not None
        open_end = self._channel.feed()
        while (event := self._channel.pop()) is not None:
            if event["event"] == "dead":
                self._bury(event["id"], Repercussion.INIT if event.get("oom") else None)
        if not open_end:
            self._loop.remove_reader(self._channel.sock)
            self._channel.close()
            self._channel = self._capabilities = None
            if self._nodelet is not None:
                self._nodelet.kill()  # it has closed its socket: it is dead or about to be
                self._nodelet.wait()
                self._nodelet = None
            for id in [*self._live, *self._dying]:
                self._bury(id)

    def _bury(self, id: str, fate: Repercussion | None = None) -> None:
        self._dead[id] = fate
        future = self._dying.get(id)
        if future is not None and not future.done():
            future.set_result(None)

    # ---- sandboxes

    async def create(self, spec: SandboxSpec) -> NamespaceSandbox:
        """Raises KeyError for an unknown image, PolicyUnsupported, or SandboxUnavailable."""
        with METRICS.creating(self):
            return await self._create(spec)

    async def _create(self, spec: SandboxSpec) -> NamespaceSandbox:
        manifest = self.images.manifest(spec.image)
        channel = self._attach_loop()
        _check(spec)
        id = secrets.token_hex(8)
        name = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', spec.owner)[:40]}-{id}"
        log = SandboxLog.create(self.images.root, spec, id, backend=self.name)
        assert self._nodelet is not None
        self._records.write(id, spec, name, self._groups, self._nodelet.pid)
        request, environment = self._request(id, name, spec, manifest)
        ours, theirs = socket.socketpair()
        inner = Channel(ours)
        try:
            with theirs:
                await channel.send(request, [theirs.fileno()])
            async with asyncio.timeout(START_SECONDS):
                reply = await inner.receive()
        except BaseException as error:
            inner.close()
            log.discard()
            await asyncio.shield(self.kill(id))
            if isinstance(error, OSError | TimeoutError):
                raise SandboxUnavailable(f"the sandbox nodelet does not answer: {error}") from error
            raise
        if reply is None or "error" in reply:
            inner.close()
            log.discard()
            await self.kill(id)
            if reply is not None and "refused" in reply:
                raise AdmissionRefused(f"this node is full: {reply['error']}", reply["refused"])
            raise SandboxUnavailable(probe.explain(reply))
        sandbox = NamespaceSandbox(self, id, spec, environment, inner, log, single_id=request["single_id"])
        self._live[id] = sandbox
        await sandbox.open_gate()
        return sandbox

    def _request(
        self, id: str, name: str, spec: SandboxSpec, manifest: ImageManifest
    ) -> tuple[dict[str, Any], dict[str, str]]:
        run_binds, etc_binds, network_env = buildnet.passage(spec.policy.mode)
        user_namespace = bool(self._facts["user_namespace"])
        lowers, mounts = self.images.lowers(manifest.layers, can_mount=self._facts["mounts_layers"])
        request: dict[str, Any] = {
            "op": "create",
            "id": id,
            "name": name,
            "scratch": str(self.images.root / "mnt"),
            "layers_dir": str(self.images.root),
            "layers": lowers,
            "mounts": mounts,
            "base": f"base/{manifest.base_digest[7:]}",
            "binds": hostbase.binds() if manifest.base == "host" else [],
            "run_binds": run_binds,
            "etc_binds": etc_binds,
            "workdir": spec.workdir,
            "network": "host" if spec.policy.mode == "host" else "none",
            "nested": spec.nested,
            "lease_s": spec.lease_s,
            "scheduling": spec.scheduling,
            "admission": {
                "sandboxes": self.admission.sandboxes,
                "overcommit": self.admission.overcommit,
                "available": self.admission.available_mb << 20,
            },
            "memory_bytes": spec.memory_mb << 20,
            "pids": spec.pids + 1,  # init does not count
            "disk_bytes": spec.disk_mb << 20,
            "inodes": max(4096, spec.disk_mb * 256),
            "user_namespace": user_namespace,
            "id_map": self._facts["id_map"],
            "single_id": self._single_id(),
            "cgroup_namespace": True,
            "show_groups": self._show_groups,
            "handle": {
                "environment": {**manifest.env, **network_env, **spec.env},
            },
            "rlimits": self._rlimits(spec),
        }
        return request, {**manifest.env, **network_env, **spec.env}

    def _rlimits(self, spec: SandboxSpec) -> dict[str, int]:
        limits = {"RLIMIT_NOFILE": 4096}
        if not self._groups["memory"]:
            limits["RLIMIT_DATA"] = spec.memory_mb << 20
        if not self._groups["pids"]:
            limits["RLIMIT_NPROC"] = spec.pids
        return limits

    async def fate(self, id: str) -> Repercussion | None:
        """Why a sandbox of ours that answers no more ended: by its own doing, or (None) by a fault of
        ours."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FATE_SECONDS):
                while id in self._live and not self.is_dead(id):
                    await asyncio.sleep(0.005)
        return self._dead.get(id)

    def living(self) -> int:
        """How many sandboxes of this client are alive."""
        return sum(not self.is_dead(id) for id in self._live)

    def is_dead(self, id: str) -> bool:
        return id in self._dead or self._channel is None

    async def kill(self, id: str) -> None:
        """Kill a sandbox's init, and wait until the nodelet has removed what was its.

        If the nodelet itself died, control group and record stay for `reap`.
        """
        self._live.pop(id, None)
        if not self.is_dead(id):
            await self._ask({"op": "kill", "id": id})
        self._dead.pop(id, None)

    async def _ask(self, message: dict[str, Any]) -> None:
        """Send a request about one sandbox and wait for the event that it is gone."""
        channel = self._attach_loop()
        id: str = message["id"]
        future = self._dying.setdefault(id, asyncio.get_running_loop().create_future())
        with contextlib.suppress(OSError):
            await channel.send(message)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                await asyncio.shield(future)
        self._dying.pop(id, None)
        self._dead.pop(id, None)

    def import_snapshot(self, parent: str, tar: bytes, note: str) -> str:
        """Store an upper layer's tar on top of `parent`."""
        layer = self.images.import_layer(io.BytesIO(tar))
        return self.images.stack(parent, layer, note=f"snapshot {note}")

    # ---- bookkeeping

    async def attach(self, id: str) -> NamespaceSandbox:
        """The handle of a living sandbox: ours, or that of another process which shares the image store.

        Closing the latter only detaches while its creator lives; one that lives on its lease is ended by it.
        Raises SandboxLost if there is none.
        """
        sandbox = self._live.get(id)
        if sandbox is not None and sandbox.connected:
            return sandbox
        record = self._records.find(id)
        if sandbox is not None or record is None:
            raise SandboxLost(f"no living sandbox {id}")
        self.capabilities()
        ours, theirs = socket.socketpair()
        with theirs:
            reply = guests.introduce(self.images.root / "run", record["nodelet"], id, theirs)
        if reply is None or "error" in reply:
            ours.close()
            raise SandboxLost(f"no living sandbox {id}: its process is gone")
        log = SandboxLog(self.images.root, id)
        sandbox = NamespaceSandbox(
            self, id, log.spec, reply["handle"]["environment"], Channel(ours), log,
            single_id=self._single_id(), ours=records.is_orphan(record),
            policy=gate.last_policy(log.entries(), log.spec.policy),
        )  # fmt: skip
        await sandbox.open_gate()
        return sandbox

    async def end(self, id: str, channel: Channel) -> None:
        """End a sandbox of ours, or one that we inherited."""
        if id in self._live:
            await self.kill(id)
            return
        record = self._records.path(id)
        with contextlib.suppress(OSError, TimeoutError):
            await channel.send({"op": "end"})
            async with asyncio.timeout(START_SECONDS):
                while record.exists():
                    await asyncio.sleep(0.005)

    def _single_id(self) -> bool:
        return bool(self._facts["user_namespace"]) and self._facts["id_map"] is None

    async def list(self, owner: str) -> list[SandboxInfo]:
        """Living sandboxes of `owner`, of every process that shares the image store."""
        return [
            SandboxInfo(record["id"], owner, record["image"], record["created"], records.is_orphan(record))
            for record in self._records.of(owner)
            if records.is_alive(record)
        ]

    async def reap(self, owner: str) -> int:
        """Remove what dead clients of this owner left behind; returns how many sandboxes. Old logs go too."""
        count = 0
        for record in self._records.of(owner):
            if not records.is_alive(record):
                folders = [f"{parent}/{record['group']}" for parent in record["groups"]]
                await self._ask({"op": "sweep", "id": record["id"], "folders": folders})
                self._records.remove(record["id"])
                count += 1
        for path in (self.images.root / "run").glob("*.sock"):
            if not probe.is_running(int(path.stem), None):
                path.unlink(missing_ok=True)
        living = [path.stem for path in self._records.folder.glob("*.json")]
        await asyncio.to_thread(prune, self.images.root, spare=living)
        return count

    async def close(self) -> None:
        """Close all sandboxes and the nodelet; idempotent."""
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._live.values())))
        if self._channel is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._channel.sock)
            self._channel.close()
            self._channel = None
        if self._nodelet is not None:
            while self._nodelet.poll() is None:
                await asyncio.sleep(0.005)
            self._nodelet = None
        self._capabilities = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _check(spec: SandboxSpec) -> None:
    gate.check(spec.policy)
    spec.check_scheduling()
    if spec.runtime:
        raise PolicyUnsupported(f"the namespace backend has no runtime {spec.runtime!r}; leave it empty")
    if spec.lease_s is not None and not 0 < spec.lease_s < float("inf"):
        raise PolicyUnsupported(f"lease_s must be a positive number of seconds, not {spec.lease_s}")
    for name in ("memory_mb", "pids", "disk_mb"):
        if getattr(spec, name) < 1:
            raise PolicyUnsupported(f"{name} must be at least 1, not {getattr(spec, name)}")
    if not spec.workdir.startswith("/"):
        raise PolicyUnsupported(f"workdir must be absolute, not {spec.workdir!r}")
