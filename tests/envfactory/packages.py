"""Tiny packages that tests make: as trees, as source distributions in a simple index, as git repositories."""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import io
import os
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

CORE = '''\
"""Small sums."""


def add(a, b):
    """Return the sum of a and b."""
    return a + b


def clamp(value, low, high):
    """Return value, but at least low and at most high.

    >>> clamp(7, 0, 5)
    5
    """
    return max(low, min(value, high))
'''

TESTS = """\
import pytest

from tinysum import core

LIMITS = (0, 5)


@pytest.fixture
def limits():
    return LIMITS


# one sum
def test_add():
    assert core.add(1, 2) == 3


def test_clamp(limits):
    assert core.clamp(7, *limits) == 5


class TestClamp:
    def helper(self):
        return LIMITS

    def test_low(self):
        assert core.clamp(-1, *self.helper()) == 0

    @pytest.mark.parametrize("value", [0, 3, 5])
    def test_inside(self, value):
        assert core.clamp(value, *self.helper()) == value
"""

PYPROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "tinysum"
version = "VERSION"
license = "MIT"
requires-python = ">=3.8"
"""


def tiny(version: str = "1.0", core: str = CORE, tests: str = TESTS, **more: str) -> dict[str, str]:
    """Files of the package `tinysum`; `more` maps paths (`__` for `/`) to contents."""
    files = {
        "pyproject.toml": PYPROJECT.replace("VERSION", version),
        "tinysum/__init__.py": f'__version__ = "{version}"\n',
        "tinysum/core.py": core,
        "tests/test_core.py": tests,
        "README.md": "# tinysum\n",
        "PKG-INFO": f"Metadata-Version: 2.1\nName: tinysum\nVersion: {version}\n",
    }
    return files | more


def sdist(name: str, version: str, files: Mapping[str, str]) -> bytes:
    """A source distribution as bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, text in sorted(files.items()):
            info = tarfile.TarInfo(f"{name}-{version}/{path}")
            data = text.encode()
            info.size, info.mtime = len(data), 1_000_000_000
            tar.addfile(info, io.BytesIO(data))
    return gzip.compress(buffer.getvalue(), mtime=0)


def simple_index(
    root: Path, releases: Mapping[str, Sequence[tuple[str, bytes]]], attributes: str = ""
) -> str:
    """A PEP 503 index on disk; `releases`: package to (file name, content). Its file:// address."""
    for package, files in releases.items():
        folder = root / "simple" / package
        folder.mkdir(parents=True, exist_ok=True)
        rows: list[str] = []
        for name, data in files:
            (folder / name).write_bytes(data)
            rows.append(f'<a href="{name}#sha256={hashlib.sha256(data).hexdigest()}"{attributes}>{name}</a>')
        (folder / "index.html").write_text("<!doctype html><html><body>" + "\n".join(rows) + "</body></html>")
    return (root / "simple").as_uri()


def repository(folder: Path, states: Sequence[tuple[Mapping[str, str | bytes], str]]) -> Path:
    """A git repository with one commit for each (files, message)."""
    folder.mkdir(parents=True)
    env = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for role in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{role}_NAME": "t", f"GIT_{role}_EMAIL": "t@t", f"GIT_{role}_DATE": "1000000000 +0000"}

    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=folder, env=env, check=True, capture_output=True)

    git("init", "-q", "-b", "trunk")
    for files, message in states:
        for place in sorted(folder.rglob("*"), reverse=True):
            if place.is_file() and ".git" not in place.parts:
                place.unlink()
        for path, text in files.items():
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(text if isinstance(text, bytes) else text.encode())
        git("add", "-A")
        git("commit", "-q", "-m", message)
    return folder


def local_wheels(
    root: Path, names: Sequence[str] = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
) -> str:
    """A simple index of wheels, zipped from packages of the running interpreter. Its file:// address."""
    releases: dict[str, list[tuple[str, bytes]]] = {}
    for name in names:
        distribution = importlib.metadata.distribution(name)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for file in distribution.files or []:
                if file.parts[0] != ".." and file.suffix != ".pyc":
                    archive.writestr(zipfile.ZipInfo(file.as_posix()), file.locate().read_bytes())
        releases[name] = [(f"{name}-{distribution.version}-py3-none-any.whl", buffer.getvalue())]
    return simple_index(root, releases)
