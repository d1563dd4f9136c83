"""Collection: what is held stays whole, what is not goes, whatever kills it in between."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from sandbox.images import ImageStore
from sandbox.oci import collect
from sandbox.oci.documents import ImageError
from tests.sandbox.test_images import grow


def family(store: ImageStore, tmp_path: Path, names: str) -> dict[str, str]:
    """Images that share their lowest layer."""
    parent = store.add_layer(store.host_base(), grow(tmp_path / "shared", "shared"), at="/opt/env")
    return {
        name: store.add_layer(parent, grow(tmp_path / name, name), at="/workspace", note=name)
        for name in names
    }


def whole(store: ImageStore, digest: str) -> bool:
    """Whether the image and all that it needs is there."""
    fresh = ImageStore(store.root)
    if not fresh.exists(digest):
        return False
    view = fresh.manifest(digest)
    assert all(fresh.layer_path(layer).is_dir() and layer in fresh.blobs for layer in view.layers)
    assert fresh.base_path(view.base_digest).is_dir()
    return True


def test_names_leases_and_the_caller_hold_images(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    made = family(store, tmp_path, "abcd")
    store.tag("mine", made["a"])
    with collect.lease(store, made["b"], seconds=60):
        assert collect.collect(store, grace_s=3600).images == 0
        dry = collect.collect(store, keep={made["c"]}, grace_s=-1, dry_run=True)
        assert whole(store, made["d"])
        done = collect.collect(store, keep={made["c"]}, grace_s=-1)
        assert done == dry
        assert (done.layers, done.kept) == (1, 3)
        assert done.bytes > 0
        assert [whole(store, made[name]) for name in "abcd"] == [True, True, True, False]
    with pytest.raises(KeyError):
        store.manifest(made["d"])
    store.names.remove("mine")
    collect.collect(store, grace_s=-1)
    assert not any(whole(store, image) for image in made.values())
    assert list((store.root / "layers").iterdir()) == []
    assert list(store.blobs.folder.iterdir()) == []
    assert list((store.root / "notes").iterdir()) == []
    again = family(store, tmp_path / "again", "abcd")
    assert again == made
    assert whole(store, again["a"])


def test_caches_go_when_nobody_uses_them(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    held = family(store, tmp_path, "a")["a"]
    (store.root / "index").mkdir()
    for name in ("old", "young"):
        (store.root / "index" / name).write_bytes(b"wheel")
    os.utime(store.root / "index/old", (1, 1))
    for name, image in (("kept", held), ("gone", "sha256:" + "0" * 64)):
        (store.root / "steps" / f"{name}.json").write_text(f'{{"image": "{image}"}}')
        os.utime(store.root / "steps" / f"{name}.json", (1, 1))
    collect.collect(store, keep={held}, grace_s=60)
    assert [path.name for path in (store.root / "index").iterdir()] == ["young"]
    assert [path.name for path in (store.root / "steps").iterdir()] == ["kept.json"]


def test_a_running_sandbox_and_a_lease_that_ran_out(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    made = family(store, tmp_path, "ab")
    (store.root / "run/1.json").write_text(f'{{"id": "1", "image": "{made["a"]}"}}')
    with collect.lease(store, made["b"], seconds=-1):
        collect.collect(store, grace_s=-1)
    assert whole(store, made["a"])
    assert not whole(store, made["b"])


def test_reuse_makes_an_image_young(tmp_path: Path) -> None:
    """An old image that someone makes again now is not taken before he writes it down."""
    store = ImageStore(tmp_path / "store")
    old = family(store, tmp_path, "a")["a"]
    for path in [*store.blobs.folder.iterdir(), *(store.root / "layers").iterdir()]:
        os.utime(path, (1, 1))
    assert collect.collect(store, grace_s=3600, dry_run=True).images == 3
    assert family(store, tmp_path / "again", "a")["a"] == old
    assert collect.collect(store, grace_s=3600).images == 0
    assert whole(store, old)


def keep_collecting(root: Path, held: str) -> None:
    store = ImageStore(root)
    while True:
        collect.collect(store, keep={held}, grace_s=-1)


def keep_building(root: Path, trees: Path) -> None:
    store = ImageStore(root)
    while True:
        for tree in sorted(trees.iterdir()):
            store.add_layer(store.host_base(), tree, at="/workspace")


def test_killed_builds_and_collections_leave_no_half_image(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    held = family(store, tmp_path, "a")["a"]
    for number in range(4):
        grow(tmp_path / f"trees/{number}", str(number))
    context = multiprocessing.get_context("spawn")
    dice = random.Random(0)
    for _ in range(4):
        workers = [
            context.Process(target=keep_collecting, args=(store.root, held)),
            context.Process(target=keep_building, args=(store.root, tmp_path / "trees")),
        ]
        for worker in workers:
            worker.start()
        time.sleep(0.8 + dice.random() * 0.4)
        for worker in workers:
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
        assert whole(store, held)
        for info in collect.images(ImageStore(store.root), unnamed=True):
            assert whole(store, info.digest)
    collect.collect(store, keep={held}, grace_s=-1)
    assert [info.digest for info in collect.images(store, unnamed=True)] == [held]
    assert list(store.root.rglob(".new-*")) == list(store.root.rglob(".old-*")) == []


def test_names_say_what_is_wrong(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    for name in ("", "../x", "sha256:" + "0" * 64, "a b", "-x"):
        with pytest.raises(ImageError, match="is no name"):
            store.tag(name, store.host_base())
    with pytest.raises(ImageError, match="no image is named 'x'"):
        store.names.remove("x")
    with pytest.raises(ImageError, match="images list"):
        store.resolve("x")
