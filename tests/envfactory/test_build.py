from pathlib import Path

import pytest

from catalog.models import TestStatus
from envfactory.build import BuildConfig, build
from envfactory.errors import BuildError
from envfactory.sources import open_source
from envfactory.sources.base import History
from sandbox.base import SandboxProvider, SandboxSpec
from sandbox.images import ImageStore
from tests.envfactory.packages import TESTS, repository, tiny

OFFLINE = "import socket\n\n\ndef test_a():\n    socket.getaddrinfo('example.org', 80)\n"

pytestmark = pytest.mark.usefixtures("offline")


def history_of(tmp_path: Path, files: dict[str, str]) -> History:
    folder = repository(tmp_path / "tinysum", [(files, "Start")])
    return open_source(str(folder)).fetch(tmp_path / "home")


async def test_a_package_becomes_an_environment_where_its_tests_ran_twice(
    tmp_path: Path, home: Path, images: ImageStore, sandboxes: SandboxProvider
) -> None:
    files = tiny(tests=TESTS + "\n\ndef test_wrong():\n    assert core.add(1, 1) == 3\n")
    history = history_of(tmp_path, files)
    told: list[str] = []
    made = await build(history, home, sandboxes, images, progress=told.append)
    assert made.suite.failing == ("tests/test_core.py::test_wrong",)
    assert len(made.suite.passing) == 6
    assert made.suite.statuses["tests/test_core.py::TestClamp::test_inside[3]"] is TestStatus.PASSED
    assert made.suite.functions["tests/test_core.py::test_add"] == ("tinysum/core.py::add",)
    assert (made.version, made.licence, made.layout.allowed) == ("1.0", "MIT", ("tinysum/",))
    assert "PKG-INFO" not in made.tree
    told.clear()
    assert await build(history, home, sandboxes, images, progress=told.append) == made
    assert told == []

    async with await sandboxes.create(SandboxSpec(image=made.image)) as sandbox:
        code = "import importlib.metadata as m, tinysum; print(m.version('tinysum'), tinysum.__file__)"
        shown = await sandbox.exec(["python", "-c", code])
        assert shown.stdout.decode().split() == ["1.0", "/workspace/tinysum/__init__.py"]
        refused = await sandbox.exec("echo x > /opt/env/lib/x")
        assert not refused.ok


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tests/test_core.py": "def test_a():\n    assert False\n"}, "fails its own tests (0 of 1 pass"),
        (
            {"tests/test_core.py": "import nowhere_to_be\n\ndef test_a():\n    pass\n"},
            "import nowhere_to_be, which",
        ),
        ({"tests/test_core.py": OFFLINE}, "need the network"),
        (
            {"pyproject.toml": "[project]\nname = 't'\ndependencies = ['no-such-dependency-x']\n"},
            "has no wheel for",
        ),
        (
            {"tests/test_core.py": "import time\n\ndef test_a():\n    time.sleep(60)\n"},
            "takes longer than 2 s",
        ),
        ({"pyproject.toml": "[[[broken"}, "pyproject.toml is damaged"),
        ({"tinysum/__init__.py": "raise ImportError\n", "tinysum/fast.c": "int x;"}, "compiled"),
    ],
)
async def test_what_does_not_run_is_one_sentence(
    tmp_path: Path,
    home: Path,
    images: ImageStore,
    sandboxes: SandboxProvider,
    change: dict[str, str],
    words: str,
) -> None:
    history = history_of(tmp_path, tiny() | change)
    with pytest.raises(BuildError) as caught:
        await build(history, home, sandboxes, images, config=BuildConfig(file_timeout_s=2))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert not (home / "builds").exists()


async def test_flaky_tests_are_told_apart(
    tmp_path: Path, home: Path, images: ImageStore, sandboxes: SandboxProvider
) -> None:
    # The second run is traced: a test that looks for that has two outcomes, as a flaky one has.
    flaky = "\n\ndef test_flaky():\n    import sys\n    assert not (sys.gettrace() or sys.getprofile())\n"
    history = history_of(tmp_path, tiny(tests=TESTS + flaky))
    suite = (await build(history, home, sandboxes, images)).suite
    assert suite.flaky == ("tests/test_core.py::test_flaky",)
    assert "tests/test_core.py::test_flaky" not in suite.statuses
    assert len(suite.passing) == 6
