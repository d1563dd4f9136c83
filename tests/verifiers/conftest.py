"""An image with pytest and a small workspace, made from the packages of the running interpreter."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from benchmarks._borrowed import make_environment
from sandbox.base import SandboxProvider, SandboxUnavailable, provider
from sandbox.images import ImageStore
from tests.verifiers.tasks import Blobs
from verifiers.grading import Grader
from verifiers.runner import TestRunner

MakeRunner = Callable[..., Awaitable[TestRunner]]


class Images:
    """Images for tests, each made once."""

    def __init__(self, root: Path) -> None:
        self.store = ImageStore(root / "images")
        environment = root / "environment"
        make_environment(environment)
        self.environment = self.store.add_layer(self.store.host_base(), environment, at="/opt/env")
        self._root = root
        self._made: dict[tuple[tuple[str, bytes], ...], str] = {}

    def workspace(self, files: Mapping[str, str | bytes]) -> str:
        """The digest of an image with these files in /workspace."""
        content = {path: data.encode() if isinstance(data, str) else data for path, data in files.items()}
        key = tuple(sorted(content.items()))
        if key not in self._made:
            tree = self._root / f"workspace{len(self._made)}"
            tree.mkdir()
            for path, data in key:
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                (tree / path).write_bytes(data)
            self._made[key] = self.store.add_layer(self.environment, tree, at="/workspace")
        return self._made[key]


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return Images(tmp_path_factory.mktemp("home"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandboxes(images: Images) -> AsyncIterator[SandboxProvider]:
    backend = provider("namespace", store=images.store.root)
    try:
        backend.capabilities()
    except SandboxUnavailable as reason:
        pytest.skip(str(reason))
    yield backend
    await backend.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runner_of(sandboxes: SandboxProvider, images: Images) -> AsyncIterator[MakeRunner]:
    """A function from workspace files to a started runner; the same files give the same runner."""
    made: dict[str, TestRunner] = {}

    async def make(files: Mapping[str, str | bytes], **options: Any) -> TestRunner:
        image = images.workspace(files)
        key = f"{image} {options}"
        if key not in made:
            made[key] = TestRunner(sandboxes, image, **options)
            await made[key].start()
        return made[key]

    yield make
    for runner in made.values():
        await runner.close()


@pytest.fixture(scope="module")
def blobs() -> Blobs:
    return Blobs()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grader(sandboxes: SandboxProvider, images: Images, blobs: Blobs) -> AsyncIterator[Grader]:
    async with Grader(sandboxes, images.store, blobs) as made:
        yield made
