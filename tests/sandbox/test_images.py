from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from sandbox.base import SandboxSpec, SandboxUnavailable
from sandbox.images import ImageStore
from sandbox.namespace import NamespaceProvider
from sandbox.node import syscalls as sc


def grow(root: Path, text: str) -> Path:
    (root / "bin").mkdir(parents=True)
    (root / "bin/tool").write_text(f"#!/bin/sh\necho {text}\n")
    (root / "bin/tool").chmod(0o755)
    return root


async def test_layers_stack_and_carry_their_environment(provider: NamespaceProvider, tmp_path: Path) -> None:
    images = provider.images
    base = images.host_base()
    env = images.add_layer(
        base, grow(tmp_path / "a", "lower"), at="/opt/env", env={"WHO": "layer"}, note="tools"
    )
    task = images.add_layer(env, grow(tmp_path / "b", "upper"), at="/workspace/deep")
    assert images.exists(task)
    assert images.manifest(task).layers[:1] == images.manifest(env).layers
    assert images.manifest(task).notes == ("tools", "")
    async with await provider.create(SandboxSpec(image=task, env={"EXTRA": "1"})) as box:
        result = await box.exec("tool; deep/bin/tool; echo $WHO$EXTRA; stat -c %U /opt/env/bin deep")
        assert result.text == "lower\nupper\nlayer1\nagent\nagent\n"
        assert (await box.exec("echo x > deep/bin/tool; rm /opt/env/bin/tool")).ok
    assert (images.layer_path(images.manifest(env).layers[0]) / "opt/env/bin/tool").exists()


async def test_root_layers_are_closed_to_the_agent(provider: NamespaceProvider, tmp_path: Path) -> None:
    images = provider.images
    image = images.add_layer(images.host_base(), grow(tmp_path / "a", "x"), at="/opt/env", owner="root")
    async with await provider.create(SandboxSpec(image=image)) as box:
        assert not (await box.exec("touch /opt/env/new || echo x >> /opt/env/bin/tool")).ok
        assert (await box.exec("tool")).stdout == b"x\n"


async def test_fifty_layers_mount(provider: NamespaceProvider, tmp_path: Path) -> None:
    images = provider.images
    image = images.host_base()
    for number in range(45):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / f"f{number}").write_text(str(number))
        image = images.add_layer(image, folder, at="/workspace")
    async with await provider.create(SandboxSpec(image=image)) as box:
        assert len((await box.exec("ls")).stdout.split()) == 45


def test_same_tree_same_digest(tmp_path: Path) -> None:
    digests: set[str] = set()
    for number in range(2):
        images = ImageStore(tmp_path / f"store{number}")
        tree = grow(tmp_path / f"tree{number}", "same")
        os.utime(tree / "bin/tool", (number, number))
        digests.add(images.add_layer(images.host_base(), tree, at="/x", note=str(number)))
    assert len(digests) == 1
    (tmp_path / "tree1/bin/tool").write_text("other")
    assert images.add_layer(images.host_base(), tmp_path / "tree1", at="/x") not in digests


def build(store: Path, tree: Path) -> str:
    images = ImageStore(store)
    return images.add_layer(images.host_base(), tree, at="/workspace")


def test_processes_share_a_store(tmp_path: Path) -> None:
    tree = grow(tmp_path / "tree", "x")
    for number in range(200):
        (tree / f"file{number}").write_text(str(number))
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        digests = pool.starmap(build, [(tmp_path / "store", tree)] * 8)
    assert len(set(digests)) == 1
    assert len(list((tmp_path / "store/layers").iterdir())) == 1
    assert list((tmp_path / "store").rglob(".new-*")) == []


def test_errors_say_what_is_wrong(tmp_path: Path) -> None:
    images = ImageStore(tmp_path / "store")
    with pytest.raises(KeyError, match="no image sha256:0000"):
        images.manifest("sha256:" + "0" * 64)
    with pytest.raises(KeyError, match="no digest"):
        images.manifest("../../etc/passwd")
    with pytest.raises(NotADirectoryError, match="missing is not a folder"):
        images.add_layer(images.host_base(), tmp_path / "missing")


async def test_snapshot_of_a_snapshot_restores_deletions(provider: NamespaceProvider, tmp_path: Path) -> None:
    images = provider.images
    image = images.add_layer(images.host_base(), grow(tmp_path / "a", "x"), at="/workspace")
    async with await provider.create(SandboxSpec(image=image)) as box:
        await box.exec(
            "rm -r bin; mkdir bin; echo new > bin/new; rm -f /etc/hostname; touch /root/r", user="root"
        )
        second = await box.snapshot()
    async with await provider.create(SandboxSpec(image=second)) as box:
        seen = await box.exec("ls bin; stat -c %U bin/new; ls /etc/hostname")
        assert seen.stdout == b"new\nroot\n"
        assert images.manifest(second).layers[:1] == images.manifest(image).layers


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    tree = grow(tmp_path / "tree", "x")
    (tree / "big").write_bytes(os.urandom(6 << 20))
    disk = tmp_path / "disk"
    disk.mkdir()
    sc.mount("tmpfs", str(disk), "tmpfs", 0, "size=8m")
    try:
        images = ImageStore(disk)
        base = images.host_base()
        with pytest.raises(SandboxUnavailable, match="free some disk"):
            images.add_layer(base, tree)
        assert list((disk / "layers").iterdir()) == []
        assert images.exists(base)
    finally:
        sc.umount(str(disk))
