"""A home, an image store and a provider for tests that run real sandboxes, and an index of wheels."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox.base import SandboxProvider, SandboxUnavailable, provider
from sandbox.images import ImageStore
from tests.envfactory.packages import local_wheels


@pytest.fixture(scope="session")
def wheel_index(tmp_path_factory: pytest.TempPathFactory) -> str:
    return local_wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture
def offline(wheel_index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip sees the local index and nothing else."""
    monkeypatch.setenv("PIP_INDEX_URL", wheel_index)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def images(home: Path) -> ImageStore:
    return ImageStore(home / "images")


@pytest.fixture
async def sandboxes(images: ImageStore) -> AsyncIterator[SandboxProvider]:
    backend = provider("namespace", store=images.root)
    try:
        backend.capabilities()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield backend
    await backend.close()
