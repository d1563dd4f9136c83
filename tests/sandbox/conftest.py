"""Real sandboxes on this host. The image store lives as long as the session, a provider as its test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox.base import SandboxSpec
from sandbox.namespace import NamespaceProvider, NamespaceSandbox


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture
async def provider(store: Path) -> AsyncIterator[NamespaceProvider]:
    async with NamespaceProvider(store) as made:
        yield made


@pytest.fixture
async def box(provider: NamespaceProvider) -> AsyncIterator[NamespaceSandbox]:
    spec = SandboxSpec(image=provider.images.host_base(), memory_mb=256, pids=64, disk_mb=64)
    async with await provider.create(spec) as made:
        yield made
