"""EROFS over a tar: the kernel shows what unpacking would, and sandboxes run on it."""

from __future__ import annotations

import io
import os
import random
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from sandbox.base import SandboxSpec
from sandbox.images import ImageStore
from sandbox.namespace import NamespaceProvider
from sandbox.oci import archives, collect, erofs, layers
from tests.sandbox.test_archives import DIR, LOWER, UPPER, tar_of

pytestmark = pytest.mark.skipif(
    not erofs.supported(), reason="this kernel mounts no files as EROFS, or not for this user"
)

MOUNT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from sandbox.node import syscalls as sc
from tests.sandbox.test_erofs import listing
sc.unshare(sc.CLONE_NEWNS)
sc.mount(None, "/", None, sc.MS_REC | sc.MS_PRIVATE)
sc.mount(sys.argv[1], sys.argv[3], "erofs", sc.MS_RDONLY, f"device={sys.argv[2]}")
print(listing(Path(sys.argv[3])))
"""


def listing(root: Path) -> str:
    """Everything that stat, readlink and read tell of what lies below a folder."""
    lines: list[str] = []
    numbers: dict[int, str] = {}
    for folder, folders, files in os.walk(root):
        for name in sorted([*folders, *files]):
            path = Path(folder) / name
            info = path.lstat()
            known = numbers.setdefault(info.st_ino, str(path.relative_to(root)))
            facts: list[Any] = [
                os.fsencode(path.relative_to(root)),
                oct(info.st_mode),
                info.st_uid,
                info.st_gid,
            ]
            if path.is_symlink():
                facts += [path.readlink()]
            elif stat.S_ISDIR(info.st_mode):
                facts += [sorted(os.listdir(path)), sorted(os.listxattr(path))]
            else:
                facts += [info.st_size, info.st_nlink, info.st_rdev]
                facts += [known if info.st_nlink > 1 else "", int(info.st_mtime) if info.st_size else 0]
                facts += [{key: os.getxattr(path, key) for key in os.listxattr(path)}]
                facts += [hash_of(path)] if path.is_file() else []
            lines.append(repr(facts))
    return "\n".join(sorted(lines))


def hash_of(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


def mounted(tar: io.BytesIO, folder: Path) -> str:
    """The listing of a tar through the kernel, in a mount namespace of another process."""
    folder.mkdir()
    (folder / "at").mkdir()
    (folder / "tar").write_bytes(tar.getvalue())
    with (folder / "tar").open("rb") as source, (folder / "index").open("wb") as out:
        erofs.write_index(source, out, "0" * 64)
    here = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", MOUNT, *(str(folder / name) for name in ("index", "tar", "at")), here]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip("\n")


def unpacked(tar: io.BytesIO, folder: Path) -> str:
    folder.mkdir()
    layers.unpack(tar, folder)
    return listing(folder)


def many(seed: int) -> list[tuple[str, str | bytes, dict[str, Any]]]:
    """Folders of every size around a block's end, long names, long links, files of odd sizes."""
    dice = random.Random(seed)
    entries: list[tuple[str, str | bytes, dict[str, Any]]] = []
    for number in range(12):
        folder = f"d{number}/" + "x" * dice.randrange(1, 200)
        for each in range(dice.choice((0, 1, 2, 30, 300))):
            name = f"{folder}/{each}" + "é" * dice.randrange(100)
            kind = dice.randrange(10)
            if kind == 0:
                link = "../" * dice.randrange(1, 300) + "t"
                entries.append((name, "", {"type": tarfile.SYMTYPE, "linkname": link}))
            elif kind == 1:
                entries.append((name, "", {**DIR, "mode": 0o750, "uid": 70000, "gid": 5}))
            else:
                size = dice.choice((0, 1, 511, 512, 513, 4096, 10000))
                mode = {
                    "mode": dice.choice((0o644, 0o755, 0o4711, 0)),
                    "uid": dice.randrange(65536),
                    "mtime": each,
                }
                entries.append((name, dice.randbytes(size), mode))
    dice.shuffle(entries)
    return entries


@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_shows_what_unpacking_gives(tmp_path: Path, seed: int) -> None:
    tar = tar_of(*many(seed))
    assert mounted(tar, tmp_path / "m") == unpacked(tar, tmp_path / "u")


def test_whiteouts_links_and_attributes(tmp_path: Path) -> None:
    for number, entries in enumerate((LOWER, UPPER, [(".wh.top", "", {}), (".wh..wh..opq", "", {})], [])):
        tar = tar_of(*entries)
        assert mounted(tar, tmp_path / f"m{number}") == unpacked(tar, tmp_path / f"u{number}")


@pytest.mark.parametrize("compressed", [False, True])
async def test_sandboxes_run_on_layers_that_were_never_unpacked(
    store: Path, tmp_path: Path, compressed: bool
) -> None:
    """Also when the layer came compressed; whoever needs a folder gets one."""
    source = ImageStore(tmp_path / "source")
    image = source.host_base()
    for entries in (LOWER, UPPER):
        image = source.stack(image, source.import_layer(tar_of(*entries, ("which", str(compressed), {}))))
    archives.write(source, image, tmp_path / "layout", name="tool:1", host_base=True)
    if compressed:
        compress(tmp_path / "layout")
    async with NamespaceProvider(tmp_path / "target") as provider:
        ((_, digest),) = archives.read(provider.images, tmp_path / "layout")
        for _ in range(2):
            async with await provider.create(SandboxSpec(image=digest)) as box:
                seen = await box.exec(
                    "ls /dir; ls /etc/gone 2>&1; /tools/link; cat /which; echo x >> /tools/tool"
                )
                assert seen.stdout.startswith(b"shown\nls: cannot access"), seen.text
                assert f"tool\n{compressed}" in seen.text
                assert await box.snapshot()
        assert list((tmp_path / "target/layers").iterdir()) != []  # the snapshot's alone
        lowest = provider.images.manifest(digest).layers[0]
        assert not (tmp_path / "target/layers" / lowest[7:]).exists()
        assert (provider.images.layer_path(lowest) / "tools/tool").read_text().startswith("#!/bin/sh")
        provider.images.names.remove("tool:1")
    collect.collect(ImageStore(tmp_path / "target"), grace_s=-1)
    for name in ("erofs", "lower", "layers", "blobs/sha256"):
        assert list((tmp_path / "target" / name).iterdir()) == []


def compress(layout: Path) -> None:
    """Turn the layout's layers into gzip, as registries have them."""
    import gzip
    import json

    from sandbox.oci import documents
    from sandbox.oci.layout import Layout

    target = Layout(layout)
    ((name, digest),) = target.names.all().items()
    manifest = json.loads(target.blobs.read(digest))
    for layer in manifest["layers"]:
        packed = gzip.compress(target.blobs.read(layer["digest"]))
        layer.update(mediaType=f"{documents.LAYER}+gzip", digest=target.blobs.put(packed), size=len(packed))
    body = json.dumps(manifest).encode()
    target.names.put(name, target.blobs.put(body), len(body))
