"""Images as files: what we write is read by us and others, and what is hostile is refused in a sentence."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox.base import SandboxSpec, SandboxUnavailable
from sandbox.docker.private import PrivateEngine
from sandbox.images import ImageStore
from sandbox.namespace import NamespaceProvider
from sandbox.oci import archives, documents
from sandbox.oci.documents import ImageError
from sandbox.oci.tars import UnsafeTar


def tar_of(*entries: tuple[str, str | bytes, dict[str, Any]]) -> io.BytesIO:
    """A layer of (name, content, TarInfo fields)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content, fields in entries:
            data = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(name)
            member.size = len(data)
            for field, value in fields.items():
                setattr(member, field, value)
            tar.addfile(member, io.BytesIO(data))
    buffer.seek(0)
    return buffer


DIR = {"type": tarfile.DIRTYPE, "mode": 0o755}
LOWER = (
    ("etc", "", DIR),
    ("etc/gone", "old", {}),
    ("dir", "", DIR),
    ("dir/hidden", "old", {}),
    ("tools", "", DIR),
    ("tools/tool", "#!/bin/sh\necho tool\n", {"mode": 0o4755, "uid": 1234, "gid": 99}),
    ("tools/same", "", {"type": tarfile.LNKTYPE, "linkname": "tools/tool"}),
    ("tools/link", "", {"type": tarfile.SYMTYPE, "linkname": "/tools/tool"}),
    ("noted", "x", {"pax_headers": {"SCHILY.xattr.user.note": "héllo"}}),
)
UPPER = (
    ("etc", "", DIR),
    ("etc/.wh.gone", "", {}),
    ("dir", "", DIR),
    ("dir/.wh..wh..opq", "", {}),
    ("dir/shown", "new", {}),
)


def make(store: ImageStore) -> str:
    """An image of two layers that hold everything."""
    below = store.stack(None, store.import_layer(tar_of(*LOWER)), env={"WHO": "image"})
    return store.stack(below, store.import_layer(tar_of(*UPPER)))


def test_tar_and_layout_come_back_with_the_same_digest(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "one")
    image = make(store)
    for out in (tmp_path / "image.tar", tmp_path / "layout"):
        archives.write(store, image, out, name="tool:1")
        other = ImageStore(tmp_path / f"two-{out.name}")
        assert archives.read(other, out) == [("tool:1", image)]
        assert other.manifest(image) == store.manifest(image)
        assert other.resolve("tool:1") == image
    archives.write(store, image, tmp_path / "again.tar", name="tool:1")
    assert (tmp_path / "again.tar").read_bytes() == (tmp_path / "image.tar").read_bytes()
    packed = tmp_path / "image.tar.gz"
    packed.write_bytes(gzip.compress((tmp_path / "image.tar").read_bytes()))
    assert archives.read(ImageStore(tmp_path / "three"), packed, name="mine") == [("mine", image)]


def test_docker_save_of_old_engines_is_read(tmp_path: Path) -> None:
    """Folders by id, shared layers as symbolic links, no layout."""
    store = ImageStore(tmp_path / "one")
    view = store.manifest(image := make(store))
    config = store.blobs.read(documents.manifest_of(store.blobs.read(image), "").config.digest)
    first, second = (store.blobs.read(layer) for layer in view.layers)
    saved = [{"Config": "c.json", "RepoTags": ["old:1", "old:2"], "Layers": ["a/layer.tar", "b/layer.tar"]}]
    entries = [
        ("a", "", DIR), ("a/layer.tar", "", {"type": tarfile.SYMTYPE, "linkname": "../x/layer.tar"}),
        ("b", "", DIR), ("b/layer.tar", second, {}), ("x", "", DIR), ("x/layer.tar", first, {}),
        ("c.json", config, {}), ("manifest.json", json.dumps(saved), {}),
    ]  # fmt: skip
    (tmp_path / "saved.tar").write_bytes(tar_of(*entries).getvalue())
    other = ImageStore(tmp_path / "two")
    assert archives.read(other, tmp_path / "saved.tar") == [("old:1", image), ("old:2", image)]


async def test_unpacked_layers_mount_as_the_image_says(provider: NamespaceProvider, tmp_path: Path) -> None:
    """Whiteouts, opaque folders, hard links, owners and attributes; setuid bits only in the tar."""
    image = make(provider.images)
    lower, upper = (provider.images.layer_path(layer) for layer in provider.images.manifest(image).layers)
    assert (lower / "tools/tool").stat().st_mode & 0o7777 == 0o755
    assert (lower / "tools/tool").stat().st_ino == (lower / "tools/same").stat().st_ino
    assert (upper / "etc/gone").is_char_device()
    # The bare image has no shell; over the host's base the same two layers show what they do.
    stacked = provider.images.host_base()
    for layer in provider.images.manifest(image).layers:
        stacked = provider.images.stack(stacked, layer)
    async with await provider.create(SandboxSpec(image=stacked, workdir="/workspace")) as box:
        seen = await box.exec("ls /dir; ls /etc/gone 2>/dev/null; stat -c %u:%g /tools/tool; /tools/link")
        assert seen.stdout == b"shown\n1234:99\ntool\n"


@pytest.mark.parametrize("place", ["dev", "proc", "run", "tmp"])
async def test_an_image_cannot_lead_mounts_elsewhere(provider: NamespaceProvider, place: str) -> None:
    store = provider.images
    link = (place, "", {"type": tarfile.SYMTYPE, "linkname": "/etc"})
    image = store.stack(store.host_base(), store.import_layer(tar_of(link)))
    with pytest.raises(SandboxUnavailable, match=f"the image's /{place} leads through a symbolic link"):
        await provider.create(SandboxSpec(image=image))


SPARSE = {"pax_headers": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "s",
                          "GNU.sparse.realsize": "1099511627776"}}  # fmt: skip


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ([("../out", "x", {})], "would leave its folder"),
        ([("/etc/passwd", "x", {})], "would leave its folder"),
        ([("a/../../out", "x", {})], "would leave its folder"),
        ([("l", "", {"type": tarfile.SYMTYPE, "linkname": "/tmp"}), ("l/x", "x", {})], "symbolic link"),
        ([("a/b", "x", {}), ("a", "", {"type": tarfile.SYMTYPE, "linkname": "/"})], "comes twice"),
        ([("a", "1", {}), ("a", "2", {})], "comes twice"),
        ([("a", "1", {}), ("./a", "2", {})], "comes twice"),
        ([("a", "1", {}), (".wh.a", "", {})], "comes twice"),
        ([("a", "1", {}), ("a/b", "2", {})], "no folder"),
        ([("d", "", {"type": tarfile.CHRTYPE})], "device or fifo"),
        ([("d", "", {"type": tarfile.BLKTYPE})], "device or fifo"),
        ([("p", "", {"type": tarfile.FIFOTYPE})], "device or fifo"),
        ([("h", "", {"type": tarfile.LNKTYPE, "linkname": "../../etc/shadow"})], "leave its folder"),
        ([("h", "", {"type": tarfile.LNKTYPE, "linkname": "later"}), ("later", "x", {})], "hard link"),
        (
            [
                ("l", "", {"type": tarfile.SYMTYPE, "linkname": "/etc/shadow"}),
                ("h", "", {"type": tarfile.LNKTYPE, "linkname": "l"}),
            ],
            "hard link",
        ),
        ([("s", b"1\n0\n1\n" + bytes(506), SPARSE)], "sparse"),
        ([("s", "", {"type": tarfile.GNUTYPE_SPARSE})], "sparse"),
        ([(".wh..wh.aufs", "", {})], "reserve"),
        ([("d/.wh...", "", {})], "deletes nothing"),
        ([("x", "", {"pax_headers": {"SCHILY.xattr.user.overlay.redirect": "/etc"}})], "attribute"),
        ([("x", "", {"pax_headers": {"SCHILY.xattr.trusted.overlay.opaque": "y"}})], "attribute"),
        ([("x" * 300, "", {})], "too long"),
        ([("big", "", {"pax_headers": {"comment": "y" * (2 << 20)}})], "header of"),
    ],
)
def test_hostile_layers_are_refused_and_leave_nothing(
    tmp_path: Path, entries: list[tuple[str, str | bytes, dict[str, Any]]], sentence: str
) -> None:
    store = ImageStore(tmp_path / "store")
    with pytest.raises(UnsafeTar, match=sentence):
        store.import_layer(tar_of(*entries))
    assert list((tmp_path / "store/layers").iterdir()) == []
    assert list((tmp_path / "store/blobs/sha256").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


def cut(data: bytes) -> bytes:
    return data[:700]


def rubbish(data: bytes) -> bytes:
    return data[:1024] + b"rubbish!" * 64 + data[1536:]


@pytest.mark.parametrize(
    "spoil",
    [cut, rubbish, lambda _: b"", lambda _: b"no tar at all" * 99],
    ids=["cut", "rubbish", "empty", "no-tar"],
)
def test_damaged_tars_are_refused(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    store = ImageStore(tmp_path / "store")
    whole = tar_of(("a", "x" * 300, {}), ("b", "y", {})).getvalue()
    with pytest.raises(UnsafeTar, match="tar"):
        store.import_layer(io.BytesIO(spoil(whole)))


def test_archives_that_lie_are_refused(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "one")
    image = make(store)
    layout = tmp_path / "layout"
    archives.write(store, image, layout, name="tool:1")
    layer = layout / "blobs/sha256" / store.manifest(image).layers[0][7:]
    good = layer.read_bytes()
    other = ImageStore(tmp_path / "two")
    for bad, sentence in ((good[:-1] + b"x", "another content"), (good + b"x", "longer"), (b"", "0 bytes")):
        layer.write_bytes(bad)
        with pytest.raises(ImageError, match=sentence):
            archives.read(other, layout)
    layer.unlink()
    layer.symlink_to("/etc/hostname")
    with pytest.raises(ImageError, match="cannot be read"):
        archives.read(other, layout)
    layer.unlink()
    with pytest.raises(ImageError, match="is missing"):
        archives.read(other, layout)
    assert not other.exists(image)
    assert other.names.all() == {}
    (layout / "index.json").write_text('{"schemaVersion": 2, "manifests": [{"digest": 7}]}')
    with pytest.raises(ImageError, match=r"index\.json is no index: manifests\.0"):
        archives.read(other, layout)
    with pytest.raises(ImageError, match="neither an OCI layout nor"):
        archives.read(other, tmp_path)


def test_another_machine_s_images_are_refused(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    layer = store.import_layer(tar_of(("a", "x", {})))
    size = store.blobs.size(layer)
    descriptors = (documents.Descriptor(mediaType=documents.LAYER, digest=layer, size=size),)
    whole = documents.write_config((layer,), {}, {}, "")
    for old, new, sentence in (
        (documents.architecture(), "s390x", "the image is for linux/s390x"),
        ("linux", "windows", "the image is for windows/"),
        (layer, "sha256:" + "0" * 64, "unpacks to sha256:"),
        ('"Labels":{}', '"Labels":{"posttrain.base":"host"}', "another host's /usr"),
    ):
        config = whole.replace(old.encode(), new.encode())
        assert config != whole
        store.blobs.put(config)
        with pytest.raises(ImageError, match=sentence):
            store.adopt_image(documents.write_manifest(config, descriptors))
    with pytest.raises(ImageError, match="stands on this host's /usr"):
        archives.write(store, store.host_base(), tmp_path / "x.tar", name="x")


@pytest.mark.services
def test_skopeo_and_umoci_read_what_we_write(tmp_path: Path) -> None:
    """Two readers of other hands, and what skopeo writes comes back with the same digest."""
    store = ImageStore(tmp_path / "one")
    image = make(store)
    store.tag("tool:1", image)
    archives.write(store, image, tmp_path / "image.tar", name="tool:1")
    archives.write(store, image, tmp_path / "layout", name="tool:1")

    def run(*command: str) -> bytes:
        done = subprocess.run(command, capture_output=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    for source in ("oci-archive:image.tar:tool:1", "oci:layout:tool:1", f"oci:{store.root}:tool:1"):
        assert json.loads(run("skopeo", "inspect", source))["Digest"] == image
    inspected = json.loads(run("skopeo", "inspect", "--config", "docker-archive:image.tar"))
    assert inspected["rootfs"]["diff_ids"] == list(store.manifest(image).layers)
    run("skopeo", "copy", "--preserve-digests", "oci:layout:tool:1", "oci-archive:copied.tar:copied")
    assert archives.read(ImageStore(tmp_path / "two"), tmp_path / "copied.tar") == [("copied", image)]
    run("skopeo", "copy", "oci:layout:tool:1", "docker-archive:saved.tar:saved:1")
    ((name, saved),) = archives.read(other := ImageStore(tmp_path / "three"), tmp_path / "saved.tar")
    assert name.endswith("saved:1")
    assert other.manifest(saved).layers == store.manifest(image).layers
    run("skopeo", "copy", "--dest-compress", "oci:layout:tool:1", "oci:packed:p")
    ((_, packed),) = archives.read(other := ImageStore(tmp_path / "four"), tmp_path / "packed")
    assert packed != image
    assert other.manifest(packed).layers == store.manifest(image).layers
    run("umoci", "unpack", "--image", "layout:tool:1", "bundle")
    assert (tmp_path / "bundle/rootfs/dir/shown").read_text() == "new"
    assert not (tmp_path / "bundle/rootfs/dir/hidden").exists()
    assert not (tmp_path / "bundle/rootfs/etc/gone").exists()


@pytest.mark.services
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a docker engine")
def test_a_docker_engine_loads_what_we_write_and_we_read_what_it_saves(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import docker

    store = ImageStore(tmp_path / "one")
    image = make(store)
    archives.write(store, image, tmp_path / "image.tar", name="posttrain/tool:1")
    with PrivateEngine(Path(tempfile.mkdtemp(dir=tmp_path_factory.getbasetemp()))) as engine:
        client = docker.DockerClient(base_url=engine.url)
        with (tmp_path / "image.tar").open("rb") as file:
            (loaded,) = client.images.load(file)
        assert loaded.tags == ["posttrain/tool:1"]
        assert loaded.attrs["RootFS"]["Layers"] == list(store.manifest(image).layers)
        assert loaded.attrs["Config"]["Env"] == ["WHO=image"]
        with (tmp_path / "saved.tar").open("wb") as out:
            out.writelines(loaded.save(named=True))
        client.close()
    other = ImageStore(tmp_path / "two")
    ((name, saved),) = archives.read(other, tmp_path / "saved.tar")
    assert name == "posttrain/tool:1"
    assert other.manifest(saved).layers == store.manifest(image).layers
    assert other.manifest(saved).env == {"WHO": "image"}
