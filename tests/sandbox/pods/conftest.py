"""A fake cluster on loopback and a provider that uses it; both end with their test.

Without the official client nothing here is collected: `make test-services` installs it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.base import SandboxSpec
from sandbox.namespace import NamespaceProvider

if importlib.util.find_spec("kubernetes") is None:
    collect_ignore_glob = ["test_*"]


@pytest.fixture
async def node(store: Path) -> AsyncIterator[NamespaceProvider]:
    async with NamespaceProvider(store, show_groups=True) as made:
        yield made


@pytest.fixture
async def cluster(node: NamespaceProvider, tmp_path: Path) -> AsyncIterator[Any]:
    from tests.sandbox.fake_kubernetes import FakeCluster

    async with FakeCluster(tmp_path, node) as made:
        yield made


@pytest.fixture
async def kube(cluster: Any, store: Path) -> AsyncIterator[Any]:
    from sandbox.kubernetes import KubernetesProvider
    from tests.sandbox.fake_kubernetes import settings

    async with KubernetesProvider(store, **settings(cluster)) as made:
        yield made


@pytest.fixture
def spec(node: NamespaceProvider) -> SandboxSpec:
    return SandboxSpec(image=node.images.host_base(), memory_mb=256, pids=64, disk_mb=64)
