"""Owners, leases, guests, and clients that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from sandbox.base import PolicyUnsupported, SandboxLost, SandboxSpec, SandboxUnavailable, provider
from sandbox.kubernetes import KubernetesProvider, manifests
from sandbox.namespace import NamespaceProvider
from tests.sandbox.fake_kubernetes import FakeCluster, settings

pytestmark = pytest.mark.services

CLIENT = """
import asyncio, json, sys
from sandbox.base import SandboxSpec
from sandbox.kubernetes import KubernetesProvider
async def main():
    store, settings, spec = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    provider = KubernetesProvider(__import__("pathlib").Path(store), **settings)
    box = await provider.create(SandboxSpec(**spec))
    print(box.id, flush=True)
    await box.exec("echo begun > begun; sleep 300", timeout=None)
asyncio.run(main())
"""


async def mortal(cluster: FakeCluster, store: Path, spec: SandboxSpec, **changes: object) -> tuple[int, str]:
    """Start another client with one sandbox; kill it as soon as its command runs. (returns pid, id)."""
    wanted = {"image": spec.image, "owner": "mortal", "memory_mb": 256, "disk_mb": 64, **changes}
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, str(store), json.dumps(settings(cluster, reconnect_s=1, heartbeat_s=1)),
        json.dumps(wanted), stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert client.stdout is not None
    id = (await client.stdout.readline()).decode().strip()
    await asyncio.sleep(0.3)
    client.send_signal(signal.SIGKILL)
    await client.wait()
    return client.pid, id


async def test_a_killed_clients_pod_ends_by_itself_and_is_reaped(
    cluster: FakeCluster, kube: KubernetesProvider, store: Path, spec: SandboxSpec
) -> None:
    _, id = await mortal(cluster, store, spec)
    assert await kube.reap("someone-else") == 0
    async with asyncio.timeout(15):
        while cluster.pods()[0]["status"]["phase"] == "Running":
            await asyncio.sleep(0.1)
    assert cluster.pods()[0]["status"]["phase"] == "Succeeded", "the helper ends its pod without its client"
    assert await kube.list("mortal") == []
    assert await kube.reap("mortal") == 1
    with pytest.raises(SandboxLost):
        await kube.attach(id)


async def test_a_leased_pod_is_found_by_the_next_client(
    cluster: FakeCluster, kube: KubernetesProvider, store: Path, spec: SandboxSpec
) -> None:
    _, id = await mortal(cluster, store, spec, lease_s=30)
    await asyncio.sleep(1.5)
    (info,) = await kube.list("mortal")
    assert (info.id, info.image, info.orphan) == (id, spec.image, True)
    assert await kube.reap("mortal") == 0, "its lease is not over"
    box = await kube.attach(id)
    assert (await box.exec("cat begun")).stdout == b"begun\n"
    await box.close()
    assert cluster.pods() == [], "whoever inherits a sandbox ends it"


async def test_guests_share_a_pod(
    cluster: FakeCluster, kube: KubernetesProvider, store: Path, spec: SandboxSpec
) -> None:
    async with KubernetesProvider(store, **settings(cluster)) as other, await kube.create(spec) as box:
        guest = await other.attach(box.id)
        await box.write("file", b"shared")
        assert (await guest.exec("cat file")).stdout == b"shared"
        assert guest.spec.memory_mb == box.spec.memory_mb
        await box.close()
        with pytest.raises(SandboxLost):
            await guest.exec("true")
        await guest.close()


async def test_closing_leaves_nothing(cluster: FakeCluster, store: Path, spec: SandboxSpec) -> None:
    before = set(os.listdir("/proc/self/fd"))
    kube = KubernetesProvider(store, **settings(cluster))
    for _ in range(3):
        box = await kube.create(spec)
        await box.exec("sleep 400 & echo x")
        await box.spawn(["cat"])
    await kube.close()
    await kube.close()
    assert cluster.pods() == []
    assert cluster.store.list("leases", "") == []
    left = set(os.listdir("/proc/self/fd")) - before
    assert len(left) <= 6, "server and node of the fake may keep a few connections"


async def test_what_cannot_be_enforced_is_refused(kube: KubernetesProvider, node: NamespaceProvider) -> None:
    image = node.images.host_base()
    for spec in (
        SandboxSpec(image=image, nested=True),
        SandboxSpec(image=image, memory_mb=0),
        SandboxSpec(image=image, workdir="relative"),
    ):
        with pytest.raises(PolicyUnsupported):
            await kube.create(spec)
    assert "podPidsLimit" in " ".join(KubernetesProvider(kube.images).capabilities().unenforced)


async def test_builds_get_a_network_and_nobody_else(
    cluster: FakeCluster, kube: KubernetesProvider, spec: SandboxSpec
) -> None:
    from dataclasses import replace

    async with await kube.create(replace(spec, network="host")) as open, await kube.create(spec) as closed:
        names = ["python3", "-c", "import socket; print(len(socket.if_nameindex()))"]
        assert int((await open.exec(names)).stdout) >= 1
        assert (await closed.exec(names)).stdout == b"1\n"
    modes = {pod["spec"]["podSelector"]["matchLabels"]["posttrain.dev/network"]: pod["spec"]["egress"]
             for pod in cluster.store.list("networkpolicies", "")}  # fmt: skip
    assert modes["none"] == []
    assert "169.254.0.0/16" in json.dumps(modes["host"])


async def test_policies_that_nobody_enforces_are_noticed(
    cluster: FakeCluster, store: Path, spec: SandboxSpec
) -> None:
    cluster.faults.network_plugin = False
    async with KubernetesProvider(store, **settings(cluster)) as kube:
        with pytest.raises(PolicyUnsupported, match="reached the API server"):
            await kube.create(spec)
        assert cluster.pods() == []
    async with KubernetesProvider(store, **settings(cluster, network_enforced="trust")) as kube:
        await (await kube.create(spec)).close()


async def test_changed_network_policies_are_put_right(cluster: FakeCluster, kube: KubernetesProvider) -> None:
    loose = manifests.network_policies()[0]
    loose["spec"]["egress"] = [{}]
    cluster.store.create("networkpolicies", "default", loose)
    await kube.open()
    assert cluster.store.list("networkpolicies", "")[0]["spec"]["egress"] == []


async def test_a_foreign_helper_is_refused(cluster: FakeCluster, kube: KubernetesProvider) -> None:
    wrong = manifests.config_map()
    wrong["binaryData"] = {"podlet.pyz": "AAAA"}
    cluster.store.create("configmaps", "default", wrong)
    with pytest.raises(SandboxUnavailable, match="someone else"):
        await kube.open()


async def test_without_a_cluster_it_says_what_to_set(store: Path, tmp_path: Path) -> None:
    kube = provider("kubernetes", store=store, kubeconfig=str(tmp_path / "none"))
    with pytest.raises(SandboxUnavailable, match="set KUBECONFIG"):
        await kube.list("x")


async def test_one_user_pods_have_no_root(cluster: FakeCluster, store: Path, spec: SandboxSpec) -> None:
    async with (
        KubernetesProvider(store, **settings(cluster, users="one")) as kube,
        await kube.create(spec) as box,
    ):
        seen = await box.exec("id -u; grep -E '^(NoNewPrivs|CapBnd)' /proc/self/status")
        assert seen.stdout.split()[0] == b"1000"
        assert b"NoNewPrivs:\t1" in seen.stdout
        assert b"CapBnd:\t0000000000000000" in seen.stdout
        await box.write("a/b", b"x")
        assert await box.read("a/b") == b"x"
        assert (await box.exec("sleep 100", timeout=0.3)).outcome == "timeout"
        with pytest.raises(PolicyUnsupported, match="users=two"):
            await box.exec("id", user="root")
