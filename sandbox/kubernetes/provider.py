"""The kubernetes backend's provider: pods of one namespace of one cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self
from weakref import WeakSet

from sandbox.base import (
    Capabilities,
    NetworkPolicy,
    PolicyUnsupported,
    Repercussion,
    SandboxError,
    SandboxInfo,
    SandboxLost,
    SandboxProvider,
    SandboxSpec,
    SandboxUnavailable,
)
from sandbox.images import ImageStore, default_store
from sandbox.kubernetes import errors, ground, manifests, roll
from sandbox.kubernetes.cluster import Cluster
from sandbox.kubernetes.execstream import ExecStream
from sandbox.kubernetes.handle import KubernetesSandbox, Recorder
from sandbox.kubernetes.link import Link
from sandbox.kubernetes.manifests import GROUP
from sandbox.kubernetes.official import require
from sandbox.kubernetes.podwatch import PodWatch
from sandbox.kubernetes.settings import load
from sandbox.log import SandboxLog
from sandbox.metrics import METRICS
from sandbox.namespace import gate
from sandbox.namespace.channel import Channel
from sandbox.namespace.gate import Ways

CLOSE_SECONDS = 30.0
POLL_SECONDS = 0.2


class KubernetesProvider(SandboxProvider):
    """See `sandbox.base.SandboxProvider`. `settings` are the fields of `KubernetesSettings`."""

    name = "kubernetes"

    def __init__(self, store: Path | ImageStore | None = None, **settings: Any) -> None:
        require()
        self.images = store if isinstance(store, ImageStore) else ImageStore(store or default_store())
        self.settings = load(settings)
        self.ways = Ways(self.images.root / "index", self.settings.trusted_networks, self.settings.index_url)
        self.client = secrets.token_hex(6)
        self.cluster: Cluster | None = None
        self.watch: PodWatch | None = None
        self._heart: asyncio.Task[None] | None = None
        self._opening: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: dict[str, KubernetesSandbox] = {}
        self._guests: WeakSet[KubernetesSandbox] = WeakSet()
        self._helper = ""
        self._network_holds = False

    def capabilities(self) -> Capabilities:
        """What the API can ask of nodes, and what `settings` say that the nodes do besides."""
        settings = self.settings
        missing = [
            text
            for given, text in (
                (settings.pids_limit, "processes: pods have no field for it; set podPidsLimit on the nodes"),
                (
                    settings.hard_disk,
                    "disk at the moment of writing: the kubelet evicts, up to a minute later",
                ),
                (
                    settings.kill_one,
                    "memory without losing the sandbox: the whole pod is killed at its limit",
                ),
                (
                    settings.network_enforced == "probe",
                    "network: not probed whether the policies take effect",
                ),
                (
                    False,
                    "the class batch: such a pod requests 1m of a processor, a small share, but is not idle",
                ),
                (False, "own cores and memory nodes: those are the kubelet's (CPU and topology manager)"),
                (False, "the image's /usr may be changed by root inside, for its own pod only"),
            )
            if not given
        ]
        return Capabilities(
            network_none=True,
            memory_limit=True,
            pids_limit=settings.pids_limit is not None,
            disk_limit=settings.hard_disk,
            disk_limit_everywhere=settings.hard_disk,
            user_namespace=settings.host_users is False,
            unenforced=tuple(missing),
            seccomp=True,
            pty=True,
            tags=True,
            attach=True,
            log=True,
            lease=True,
            networks=("none", "allow", "host"),
            set_network=True,
        )

    # ---- the cluster

    async def open(self) -> Cluster:
        """Connect, and put what all pods share in place: helper, network policies, our lease."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._opening, self.cluster, self.watch, self._heart = (
                loop,
                asyncio.Lock(),
                None,
                None,
                None,
            )
        assert self._opening is not None
        async with self._opening:
            if self.cluster is None:
                cluster = Cluster(self.settings)
                try:
                    await cluster.open()
                    self._helper = await ground.prepare(cluster, self.client)
                    self.watch = PodWatch(cluster, f"{GROUP}/client={self.client}", self._changed)
                    await self.watch.start()
                except BaseException:
                    await cluster.close()
                    raise
                self.cluster = cluster
                self._heart = asyncio.create_task(ground.beat(cluster, self.client))
        return self.cluster

    def _changed(self, name: str) -> None:
        """The watch has news of a pod: if that is its end, its commands end now."""
        sandbox = self._live.get(name.removeprefix("posttrain-"))
        if sandbox is None or self.watch is None:
            return
        pod = self.watch.pods.get(name)
        ended = errors.end(pod) if pod is not None else SandboxLost(f"pod {name} was deleted by someone else")
        if ended is not None:
            sandbox.link.fail(ended)

    # ---- sandboxes

    async def create(self, spec: SandboxSpec) -> KubernetesSandbox:
        """See the contract. Raises the errors of `sandbox.kubernetes.errors` too."""
        with METRICS.creating(self):
            return await self._create(spec)

    async def _create(self, spec: SandboxSpec) -> KubernetesSandbox:
        manifest = self.images.manifest(spec.image)
        self._check(spec)
        cluster = await self.open()
        id = secrets.token_hex(8)
        environment = {**manifest.env, **spec.env}
        body = manifests.pod(id, self.client, spec, environment, self.settings, self._helper)
        log = SandboxLog.create(self.images.root, spec, id, backend=self.name)
        link: Link | None = None
        try:
            await self._create_pod(cluster, body)
            link = self._link(cluster, id, log, creator=True)
            facts = await link.start()
            _verify(facts, spec)
            sandbox = KubernetesSandbox(self, id, spec, environment, link, log)
            await self._probe_network(sandbox, facts)
        except BaseException:
            if link is not None:
                await link.close(bye=False)
            log.discard()
            await asyncio.shield(self.remove(id))
            raise
        self._live[id] = sandbox
        await sandbox.open_gate()
        return sandbox

    async def _probe_network(self, sandbox: KubernetesSandbox, facts: Mapping[str, Any]) -> None:
        """Once, before any sandbox is handed out: a pod that may reach nothing must not reach the API
        server. PolicyUnsupported if it does."""
        assert self._opening is not None
        host, port = facts["api_server"]
        if self._network_holds or self.settings.network_enforced == "trust" or not host or not port:
            return
        if sandbox.spec.policy.mode == "host":
            return
        async with self._opening:
            if self._network_holds:
                return
            if await sandbox.reaches(self.settings.python, host, port):
                raise PolicyUnsupported(
                    f"a pod that a NetworkPolicy denies everything reached the API server at {host}:{port}: "
                    'install a network plugin that enforces policies, or set network_enforced = "trust"'
                )
            self._network_holds = True

    def _link(self, cluster: Cluster, id: str, log: SandboxLog, *, creator: bool) -> Link:
        return Link(
            lambda: self._dial(cluster, id), id, self.settings.reconnect_s, Recorder(log), creator=creator
        )

    def _check(self, spec: SandboxSpec) -> None:
        for name in ("memory_mb", "pids", "disk_mb"):
            if getattr(spec, name) < 1:
                raise PolicyUnsupported(f"{name} must be at least 1, not {getattr(spec, name)}")
        if not spec.workdir.startswith("/"):
            raise PolicyUnsupported(f"workdir must be absolute, not {spec.workdir!r}")
        if spec.nested:
            raise PolicyUnsupported(
                "pods get no right to make namespaces; run graders on the namespace backend"
            )
        gate.check(spec.policy)
        spec.check_scheduling()

    async def _create_pod(self, cluster: Cluster, body: dict[str, Any]) -> None:
        """Create the pod and wait until it is ready, or raise why it never will be."""
        assert self.watch is not None
        name = body["metadata"]["name"]
        began = time.monotonic()
        made = await cluster.call(
            f"creating pod {name}",
            cluster.core.create_namespaced_pod_without_preload_content,
            cluster.namespace,
            body,
            accept=(409,),  # a repetition after a lost answer: the name is ours alone
        )
        if made is not None:
            self.watch.learn(made)
        failure: SandboxError | None = None

        def settled(pod: dict[str, Any] | None) -> bool:
            nonlocal failure
            if pod is None:
                return False
            failure = errors.start_failure(pod, time.monotonic() - began, self.settings.schedule_s)
            return failure is not None or errors.is_ready(pod)

        done = await self.watch.until(name, settled, self.settings.start_s)
        if failure is not None:
            raise failure
        if not done:
            state = (
                errors.container(self.watch.pods.get(name) or {"metadata": {}}).get("state") or "not started"
            )
            raise SandboxUnavailable(
                f"pod {name} was not ready after {self.settings.start_s:g} s ({state}): raise start_s"
            )

    async def _dial(self, cluster: Cluster, id: str) -> ExecStream:
        """A connection to the helper in the pod; SandboxLost with the reason once the pod has ended."""
        name = manifests.pod_name(id)
        try:
            return await cluster.exec(name, manifests.command(self.settings, "connect"))
        except (SandboxError, OSError) as error:
            pod = await roll.read(cluster, name)
            if pod is None:
                raise SandboxLost(f"pod {name} is gone") from error
            if (ended := errors.end(pod)) is not None:
                raise ended from error
            raise ConnectionError(str(error)) from error

    async def kill(self, id: str) -> None:
        """See `sandbox.namespace.handle.Keeper`."""
        await self.remove(id)

    async def end(self, id: str, channel: Channel) -> None:
        """See `sandbox.namespace.handle.Keeper`."""
        await self.remove(id)

    def living(self) -> int:
        """How many sandboxes of this client are alive."""
        return sum(box.connected for box in self._live.values())

    async def fate(self, id: str) -> Repercussion | None:
        """Links know why a pod ended; nothing is known here."""
        return None

    def import_snapshot(self, parent: str, tar: bytes, note: str) -> str:
        """PolicyUnsupported: pods have no snapshots."""
        raise PolicyUnsupported("pods have no snapshots")

    async def remove(self, id: str) -> None:
        """Delete the pod and wait until its node has ended it (at most half a minute).

        Where the API server does not answer, the pod ends itself: its helper misses its client.
        """
        self._live.pop(id, None)
        if self.cluster is None or self.watch is None:
            return
        name = manifests.pod_name(id)
        watched = name in self.watch.pods
        with contextlib.suppress(SandboxUnavailable, TimeoutError):
            if not await roll.delete(self.cluster, name):
                return
            if watched:
                await self.watch.until(name, lambda pod: pod is None, CLOSE_SECONDS)
                return
            async with asyncio.timeout(CLOSE_SECONDS):  # one that we inherited is not in our watch
                while await roll.read(self.cluster, name) is not None:
                    await asyncio.sleep(POLL_SECONDS)

    async def attach(self, id: str) -> KubernetesSandbox:
        """See the contract: ours, or a guest's handle of another client's."""
        sandbox = self._live.get(id)
        if sandbox is not None and sandbox.connected:
            return sandbox
        cluster = await self.open()
        pod = await roll.read(cluster, manifests.pod_name(id)) if id.isalnum() else None
        if sandbox is not None or pod is None or errors.end(pod) is not None:
            raise SandboxLost(f"no living sandbox {id}")
        note: Mapping[str, str] = pod["metadata"]["annotations"]
        orphan = (await roll.clients(cluster)).silent(pod) > 0
        log = self._log(id, pod)
        link = self._link(cluster, id, log, creator=False)
        try:
            await link.start()
        except BaseException:
            await link.close(bye=False)
            log.close()
            raise
        environment = json.loads(note[f"{GROUP}/environment"])
        guest = KubernetesSandbox(
            self, id, log.spec, environment, link, log,
            ours=orphan, policy=gate.last_policy(log.entries(), log.spec.policy),
        )  # fmt: skip
        self._guests.add(guest)
        await guest.open_gate()
        return guest

    def _log(self, id: str, pod: Mapping[str, Any]) -> SandboxLog:
        """The sandbox's log in our image store; a client of another store begins one of its own."""
        with contextlib.suppress(FileNotFoundError):
            return SandboxLog(self.images.root, id)
        kept: dict[str, Any] = json.loads(pod["metadata"]["annotations"][f"{GROUP}/spec"])
        kept["network"] = NetworkPolicy.decode(kept["network"])
        spec = SandboxSpec(**kept)
        return SandboxLog.create(self.images.root, spec, id, backend=self.name)

    # ---- bookkeeping

    async def list(self, owner: str) -> list[SandboxInfo]:
        """Living sandboxes of `owner`, of every client."""
        return await roll.living(await self.open(), owner)

    async def reap(self, owner: str) -> int:
        """Delete pods of this owner that have ended, or whose client is dead and whose lease is over."""
        return await roll.reap(await self.open(), owner, spare=self._live, life_s=self.settings.life_s)

    async def close(self) -> None:
        """Delete this client's pods and its lease; idempotent."""
        if self.cluster is None or self._loop is not asyncio.get_running_loop():
            return
        await asyncio.gather(*(sandbox.close() for sandbox in [*self._live.values(), *self._guests]))
        if self._heart is not None:
            self._heart.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._heart
        if self.watch is not None:
            await self.watch.close()
        await ground.leave(self.cluster, self.client)
        await self.cluster.close()
        self.cluster = self.watch = self._heart = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _verify(facts: Mapping[str, Any], spec: SandboxSpec) -> None:
    """A limit that did not take is no limit: compare what the pod's control group really says."""
    limit = facts["memory_max"]
    if limit is not None and limit > spec.memory_mb << 20:
        raise SandboxUnavailable(
            f"the node gave the pod {limit >> 20} MiB instead of {spec.memory_mb}: look at its settings"
        )
