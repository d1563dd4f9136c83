"""A fake cluster on loopback and a provider that uses it; both end with their test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox.base import SandboxSpec
from sandbox.namespace import NamespaceProvider
from tests.sandbox.fake_kubernetes import FakeCluster, settings

pytest.importorskip("kubernetes", reason="install posttrain[kubernetes]")

from sandbox.kubernetes import KubernetesProvider


@pytest.fixture
async def node(store: Path) -> AsyncIterator[NamespaceProvider]:
    async with NamespaceProvider(store, show_groups=True) as made:
        yield made


@pytest.fixture
async def cluster(node: NamespaceProvider, tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, node) as made:
        yield made


@pytest.fixture
async def kube(cluster: FakeCluster, store: Path) -> AsyncIterator[KubernetesProvider]:
    async with KubernetesProvider(store, **settings(cluster)) as made:
        yield made


@pytest.fixture
def spec(node: NamespaceProvider) -> SandboxSpec:
    return SandboxSpec(image=node.images.host_base(), memory_mb=256, pids=64, disk_mb=64)
