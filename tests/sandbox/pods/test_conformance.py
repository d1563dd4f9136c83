"""The conformance suite that we ship, against pods: of the fake, whose pods are namespace sandboxes, and with
`-m cluster` of the cluster that the settings name ($POSTTRAIN_KUBERNETES, else the usual kubeconfig)."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox import check
from sandbox.images import ImageStore
from sandbox.kubernetes import KubernetesProvider
from sandbox.namespace import NamespaceProvider
from tests.sandbox.fake_kubernetes import FakeCluster, settings

NAMES = [each.title() for each in check.checks()]
LACKING = {"snapshot", "fork", "scheduling", "core_scheduling"}
"""What pods cannot."""
BEYOND = {each.title() for each in check.checks() if LACKING & set(each.needs)}


@pytest.mark.services
@pytest.mark.parametrize("name", NAMES)
async def test_on_the_fake(cluster: FakeCluster, node: NamespaceProvider, store: Path, name: str) -> None:
    wanted = settings(cluster)
    async with KubernetesProvider(store, **wanted) as kube:
        (result,) = await check.run(kube, node.images.host_base(), [name], settings=wanted)
    assert result.status == ("not applicable" if name in BEYOND else "passed"), result.detail
    assert cluster.pods() == [], "a check left a pod"


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
async def test_on_a_cluster(tmp_path: Path, name: str) -> None:
    """Every image is what `image` of the settings says; a fixed one with Python, such as
    `python:3.12-slim-bookworm`, needs no registry of ours."""
    images = ImageStore(tmp_path / "images")
    async with KubernetesProvider(images) as kube:
        (result,) = await check.run(kube, images.host_base(), [name])
    assert result.status != "failed", result.detail
