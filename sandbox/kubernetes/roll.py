"""All pods of an owner and all clients of the namespace: what `list`, `attach` and `reap` go by."""

from __future__ import annotations

import time
from collections.abc import Container
from typing import Any

from sandbox.base import SandboxInfo
from sandbox.kubernetes import errors, manifests
from sandbox.kubernetes.cluster import Cluster
from sandbox.kubernetes.heartbeat import Clients, seconds
from sandbox.kubernetes.manifests import GROUP


async def read(cluster: Cluster, name: str) -> dict[str, Any] | None:
    """The pod of that name, None if there is none."""
    return await cluster.call(
        f"reading pod {name}",
        cluster.core.read_namespaced_pod_without_preload_content,
        name,
        cluster.namespace,
        accept=(404,),
    )


async def delete(cluster: Cluster, name: str) -> bool:
    """Delete a pod; False if there was none."""
    found = await cluster.call(
        f"deleting pod {name}",
        cluster.core.delete_namespaced_pod_without_preload_content,
        name,
        cluster.namespace,
        accept=(404,),
    )
    return found is not None


async def pods(cluster: Cluster, owner: str) -> list[dict[str, Any]]:
    """Pods of exactly that owner: the label finds them, the annotation decides."""
    answer = await cluster.call(
        "listing pods",
        cluster.core.list_namespaced_pod_without_preload_content,
        cluster.namespace,
        label_selector=f"{GROUP}/owner={manifests.label(owner)},app.kubernetes.io/managed-by=posttrain",
    )
    assert answer is not None
    return [pod for pod in answer["items"] if pod["metadata"]["annotations"][f"{GROUP}/owner"] == owner]


async def clients(cluster: Cluster) -> Clients:
    """Everyone who makes pods in this namespace."""
    answer = await cluster.call(
        "listing leases",
        cluster.coordination.list_namespaced_lease_without_preload_content,
        cluster.namespace,
        label_selector="app.kubernetes.io/managed-by=posttrain",
    )
    assert answer is not None
    return Clients(answer["items"], time.time() + cluster.clock_offset)


async def living(cluster: Cluster, owner: str) -> list[SandboxInfo]:
    """What `list` answers."""
    found, alive = await pods(cluster, owner), await clients(cluster)
    return [
        SandboxInfo(
            id=pod["metadata"]["labels"][f"{GROUP}/id"],
            owner=owner,
            image=pod["metadata"]["annotations"][f"{GROUP}/image"],
            created=seconds(pod["metadata"]["creationTimestamp"]),
            orphan=alive.silent(pod) > 0,
        )
        for pod in found
        if errors.end(pod) is None
    ]


async def reap(cluster: Cluster, owner: str, *, spare: Container[str], life_s: float) -> int:
    """Delete what `reap` may; how many pods. Leases of clients that are long dead go with them."""
    found, alive = await pods(cluster, owner), await clients(cluster)
    count = 0
    for pod in found:
        id = pod["metadata"]["labels"][f"{GROUP}/id"]
        lease = float(pod["metadata"]["annotations"][f"{GROUP}/lease-seconds"])
        ended = errors.end(pod) is not None and id not in spare
        if ended or alive.silent(pod) > lease:
            count += await delete(cluster, pod["metadata"]["name"])
    for name in alive.forgotten(life_s):
        await cluster.call(
            "deleting a lease",
            cluster.coordination.delete_namespaced_lease_without_preload_content,
            name,
            cluster.namespace,
            accept=(404,),
        )
    return count
