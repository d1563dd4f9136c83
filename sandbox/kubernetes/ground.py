"""What all pods of a namespace stand on: the helper's config map, network policies, our client's lease."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import time
from typing import Any

from sandbox.base import SandboxError, SandboxUnavailable
from sandbox.kubernetes import manifests
from sandbox.kubernetes.cluster import Cluster
from sandbox.kubernetes.heartbeat import identity

MICRO_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"
MERGE = "application/merge-patch+json"


async def prepare(cluster: Cluster, client: str) -> str:
    """Put everything in place, whoever was here before; returns the config map's name."""
    name = await _helper(cluster)
    for policy in manifests.network_policies():
        await _policy(cluster, policy)
    await cluster.call(
        "creating our lease",
        cluster.coordination.create_namespaced_lease_without_preload_content,
        cluster.namespace,
        manifests.lease(client, identity(), cluster.settings.heartbeat_s, _now(cluster)),
        accept=(409,),
    )
    return name


async def _helper(cluster: Cluster) -> str:
    """Store the helper. SandboxUnavailable if its name is taken by something else."""
    map = manifests.config_map()
    name: str = map["metadata"]["name"]
    core, namespace = cluster.core, cluster.namespace
    create = core.create_namespaced_config_map_without_preload_content
    if await cluster.call("storing the helper", create, namespace, map, accept=(409,)) is None:
        read = core.read_namespaced_config_map_without_preload_content
        found = await cluster.call("reading the helper", read, name, namespace)
        if found is not None and found.get("binaryData") != map["binaryData"]:
            raise SandboxUnavailable(f"the config map {name} was put there by someone else: delete it")
    return name


async def _policy(cluster: Cluster, policy: dict[str, Any]) -> None:
    """Create the policy, or make the one that is there say what ours does."""
    net, namespace = cluster.networking, cluster.namespace
    create = net.create_namespaced_network_policy_without_preload_content
    if await cluster.call("denying network", create, namespace, policy, accept=(409,)) is None:
        patch = net.patch_namespaced_network_policy_without_preload_content
        name, change = policy["metadata"]["name"], {"spec": policy["spec"]}
        await cluster.call("denying network", patch, name, namespace, change, _content_type=MERGE)


async def beat(cluster: Cluster, client: str) -> None:
    """Renew our lease for ever; pods of a client whose lease is over may be reaped by anyone of the owner."""
    while True:
        await asyncio.sleep(cluster.settings.heartbeat_s / 4)
        with contextlib.suppress(SandboxError):
            await cluster.call(
                "renewing our lease",
                cluster.coordination.patch_namespaced_lease_without_preload_content,
                f"posttrain-{client}",
                cluster.namespace,
                {"spec": {"renewTime": _now(cluster)}},
                _content_type=MERGE,
            )


async def leave(cluster: Cluster, client: str) -> None:
    """Remove our lease; one that stays is removed by whoever reaps long after."""
    with contextlib.suppress(SandboxError):
        await cluster.call(
            "deleting our lease",
            cluster.coordination.delete_namespaced_lease_without_preload_content,
            f"posttrain-{client}",
            cluster.namespace,
            accept=(404,),
        )


def _now(cluster: Cluster) -> str:
    moment = datetime.datetime.fromtimestamp(time.time() + cluster.clock_offset, datetime.UTC)
    return moment.strftime(MICRO_TIME)
