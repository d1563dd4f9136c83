"""Every runner for real: its toolchain in an image, its suite judged in a sandbox without network."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from catalog.models import TestStatus
from sandbox.base import SandboxProvider
from sandbox.builder import build
from sandbox.recipe import Recipe
from tests.verifiers.suites import SUITES, task_of

pytestmark = [
    pytest.mark.services,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]
RECIPES = {
    "jest": Recipe(node=("jest@29",)),
    "vitest": Recipe(node=("vitest@3",)),
    "django": Recipe(python=("django>=5.2,<5.3",)),
}
OUTSIDE_USR = {"maven": ("/etc/maven", "/etc/java-*")}
"""What a tool of the host's /usr has outside of it."""
PATH = "/usr/local/bin:/usr/bin:/bin"


@pytest.fixture(scope="module")
def toolchain(sandboxes, images, tmp_path_factory):
    """The digest of an image with what a suite's tool needs."""
    store = images.store

    async def make(name: str) -> str:
        if name in RECIPES:
            return (await build(RECIPES[name], store, sandboxes)).digest
        image = images.environment
        for pattern in OUTSIDE_USR.get(name, ()):
            for folder in Path("/").glob(pattern[1:]):
                image = store.add_layer(
                    image, readable(folder, tmp_path_factory), at=f"{folder}", owner="root"
                )
        if name == "cargo":
            image = store.add_layer(
                image,
                rust(tmp_path_factory),
                at="/opt/rust",
                owner="root",
                env={"PATH": f"/opt/rust/bin:{PATH}"},
            )
        return image

    return make


def readable(folder: Path, folders: pytest.TempPathFactory) -> Path:
    """A copy without what only root may read."""
    copy = folders.mktemp("etc") / "copy"
    private = shutil.ignore_patterns("security.jks", "cacerts")
    shutil.copytree(folder, copy, symlinks=True, ignore=private)
    return copy


def rust(folders: pytest.TempPathFactory) -> Path:
    """The parts of the host's Rust that compile and test; links to its files, which are large."""
    asked = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True, check=True)
    sysroot, copy = Path(asked.stdout.strip()), folders.mktemp("rust")
    wanted = ["bin/cargo", "bin/rustc", "bin/rustdoc"]
    wanted += [f"lib/{file.name}" for file in (sysroot / "lib").glob("*.so*")]
    wanted += [
        f"{file.relative_to(sysroot)}"
        for file in (sysroot / "lib/rustlib").glob("*-linux-gnu/**/*")
        if file.is_file()
    ]
    for name in wanted:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(sysroot / name, copy / name)
        except OSError:
            shutil.copyfile(sysroot / name, copy / name)
            shutil.copymode(sysroot / name, copy / name)
    return copy


async def workspace(
    store, sandboxes: SandboxProvider, image: str, files: Mapping[str, str], tree: Path
) -> str:
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text, encoding="utf-8")
    return store.add_layer(image, tree, at="/workspace")


@pytest.mark.parametrize("name", sorted(SUITES))
async def test_a_suite_is_judged_with_its_own_runner(
    name, grader, toolchain, images, sandboxes, blobs, tmp_path
):
    suite = SUITES[name]
    image = await workspace(images.store, sandboxes, await toolchain(name), suite.files, tmp_path / "tree")
    task = task_of(suite, image, blobs)
    fixed = {path: text.encode() for path, text in suite.fixed.items()}
    good = await grader.grade_files(task, fixed)
    assert good.reward == 1.0, good
    assert good.tests == suite.expected
    bad = await grader.grade_files(task, {})
    assert bad.reward == 0.0, bad
    for wanted in suite.fail_to_pass:
        assert bad.tests[wanted] is TestStatus.FAILED
    source = next(iter(suite.fixed))
    for text in ("(;", *suite.hostile):
        hostile = await grader.grade_files(task, {source: text.encode()})
        assert hostile.reward != 1.0, hostile
