"""Tests judged in containers: the jails of the grader need an engine with ids of its own."""

from __future__ import annotations

import pytest

from catalog.models import TestStatus
from sandbox.docker import DockerProvider
from sandbox.docker.private import PrivateEngine
from tests.verifiers.conftest import Images
from verifiers.runner import TestRunner

pytestmark = pytest.mark.services


async def test_jails_work_in_containers(images: Images, tmp_path_factory: pytest.TempPathFactory) -> None:
    files = {
        "test_it.py": "import os\n"
        "def test_good(): open('mark', 'w').write('x')\n"
        "def test_bad(): assert not os.path.exists('mark')\n"
        "def test_alone(): assert os.getuid() == 1000\n"
    }
    with PrivateEngine(tmp_path_factory.mktemp("engine")) as engine:
        async with (
            DockerProvider(images.store, url=engine.url) as provider,
            TestRunner(provider, images.workspace(files), memory_mb=256) as runner,
        ):
            for _ in range(2):  # the first run's file is gone in the second's
                run = await runner.run({}, ["test_it.py"])
                found = {name.partition("::")[2]: status for name, status in run.tests.items()}
                assert found == {
                    "test_good": TestStatus.PASSED,
                    "test_bad": TestStatus.FAILED,
                    "test_alone": TestStatus.PASSED,
                }
