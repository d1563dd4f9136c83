"""The image store: an OCI layout that any tool can read, with every layer ready to be mounted beside it.

    store/oci-layout, index.json, blobs/sha256/HEX    the layout: names, manifests, configurations, layer tars
    store/layers/HEX      a layer unpacked, by the digest of its uncompressed tar (`diff_id`); read-only
    store/erofs/HEX.index, HEX.tar    instead of that, what the kernel mounts as it is (`sandbox.oci.erofs`)
    store/base/HEX        skeleton under the layers (mount points, a synthetic /etc)
    store/leases, notes, steps, run, mnt              what holds images, says where they came from, uses them

An image's digest is that of its OCI manifest. Layers of ours are deterministic, uncompressed tars, so the
same tree gives the same digests on every machine. Writers fill a temporary name, sync, then rename; whoever
comes second throws his copy away. So any number of processes may share a store, and a kill leaves at most
temporary files, which `sandbox.oci.collect` removes with the images that nothing refers to.

Most images stand on the base "host": this machine's /usr, which is no layer. They run here and on machines
that are the same; only images whose layers hold everything can be exported.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from pydantic import BaseModel, ConfigDict

from sandbox import hostbase, trees
from sandbox.oci import documents, erofs, layers
from sandbox.oci.blobs import BLOCK, write_file
from sandbox.oci.disk import inflate, publish, room
from sandbox.oci.documents import Config, Descriptor, ImageError
from sandbox.oci.layout import Layout
from sandbox.oci.names import locked

LABEL_BASE = "posttrain.base"
LABEL_BASE_DIGEST = "posttrain.base-digest"
_FOLDERS = ("layers", "erofs", "lower", "base", "leases", "notes", "steps", "mnt", "run")


class ImageManifest(BaseModel):
    """What the sandboxes need to know of an image."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: Literal["host", "layers"]
    """`host`: the host's /usr, read-only, below the layers. `layers`: the layers hold everything."""
    base_digest: str
    """Digest of what identifies the base (Python version, distribution), or of the bare skeleton."""
    layers: tuple[str, ...] = ()
    """Digests of the layers' uncompressed tars, lowest first."""
    env: Mapping[str, str] = {}
    """Environment of every command, before that of the sandbox and of the command."""
    workdir: str = ""
    notes: tuple[str, ...] = ()
    """One line per layer: where it came from. Kept beside the image: they do not change its digest."""


def default_store() -> Path:
    """`$POSTTRAIN_HOME/images`, or below the user's cache folder."""
    home = os.environ.get("POSTTRAIN_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "posttrain") / "images"


class ImageStore:
    """Images and layers in one folder. SandboxUnavailable where its disk is full or not writable."""

    def __init__(self, root: Path, *, unpack: bool | None = None) -> None:
        """`unpack`: whether layers of foreign images are unpacked when they come. None: only where the kernel
        cannot mount them as they are."""
        self.root = root.absolute()
        self._unpack_foreign = unpack
        with room(self.root):
            for name in _FOLDERS:
                (self.root / name).mkdir(parents=True, exist_ok=True)
            layout = Layout(self.root)
        self.blobs = layout.blobs
        self.names = layout.names
        self._known: dict[str, ImageManifest] = {}

    # ---- making images

    def host_base(self) -> str:
        """The image of this host's /usr and Python, without layers."""
        digest = hostbase.digest()
        self._skeleton(digest, hostbase.build)
        return self._save("host", digest, (), {}, "", ())

    def add_layer(
        self,
        parent: str | None,
        tree: Path,
        *,
        at: str = "/",
        env: Mapping[str, str] | None = None,
        note: str = "",
        owner: Literal["agent", "root"] = "agent",
    ) -> str:
        """A new image: `parent` plus the content of the folder `tree` placed at the absolute path `at`.

        Files belong to `owner` inside; modes are 755 or 644; times are fixed, so compiled Python files
        must be of the unchecked-hash kind. Returns the image's digest. Raises KeyError for an unknown
        parent, NotADirectoryError if `tree` is none.
        """
        if not tree.is_dir():
            raise NotADirectoryError(f"{tree} is not a folder")
        with self.writing(), self.blobs.temporary() as file:
            trees.pack(tree, file, at=at, uid=trees.AGENT if owner == "agent" else 0)
            layer = self._adopt(file)
        return self.stack(parent, layer, env=env, note=note)

    def import_layer(self, tar: IO[bytes]) -> str:
        """Store an uncompressed layer tar (whiteouts in OCI form); returns its digest."""
        with self.writing(), self.blobs.temporary() as file:
            tar.seek(0)
            shutil.copyfileobj(tar, file, BLOCK)
            return self._adopt(file)

    def stack(
        self, parent: str | None, layer: str, *, env: Mapping[str, str] | None = None, note: str = ""
    ) -> str:
        """The image of `parent` (None: nothing) with one stored, uncompressed layer more."""
        with self.writing():
            if parent is None:
                bare = self._skeleton(hostbase.BARE, hostbase.build_bare)
                return self._save("layers", bare, (self._descriptor(layer),), env or {}, "", (note,))
            below = self.manifest(parent)
            stored = documents.manifest_of(self.blobs.read(parent), parent)
            return self._save(
                below.base,
                below.base_digest,
                (*stored.layers, self._descriptor(layer)),
                {**below.env, **(env or {})},
                below.workdir,
                (*below.notes, note),
                below.layers,
            )

    def adopt_image(self, manifest: bytes) -> str:
        """Take in a foreign image whose blobs are stored: check them and unpack its layers.

        Raises ImageError or UnsafeTar with one sentence; then the image does not exist.
        """
        with self.writing():
            digest = documents.digest_of(manifest)
            parsed = documents.manifest_of(manifest, digest)
            config = documents.parse(Config, self.blobs.read(parsed.config.digest), "the configuration")
            if config.os != "linux" or config.architecture != documents.architecture():
                raise ImageError(
                    f"the image is for {config.os}/{config.architecture}, "
                    f"this machine is linux/{documents.architecture()}"
                )
            if len(config.rootfs.diff_ids) != len(parsed.layers):
                raise ImageError("the image's configuration and manifest list different layers")
            self._check_base(config)
            for layer, diff_id in zip(parsed.layers, config.rootfs.diff_ids, strict=True):
                self._unpack_blob(layer, documents.check_digest(diff_id))
            return self.blobs.put(manifest)

    # ---- reading images

    def manifest(self, digest: str) -> ImageManifest:
        """Raises KeyError if the store has no such image."""
        known = self._known.get(digest)
        if known is None or not self.exists(digest):
            if not self.exists(digest):
                raise KeyError(f"no image {digest} in {self.root}")
            known = self._known[digest] = self._view(digest)
        return known

    def exists(self, digest: str) -> bool:
        """Whether the store has a blob of that digest; a digest comes from this store's own calls."""
        return (self.blobs.folder / _hex(digest)).exists()

    def resolve(self, name: str) -> str:
        """The digest that a name or a digest means. Raises ImageError if there is no such image."""
        digest = documents.check_digest(name) if name.startswith("sha256:") else self.names.all().get(name)
        if digest is None or not self.exists(digest):
            raise ImageError(f"no image {name}: `posttrain images list` shows what there is")
        return digest

    def tag(self, name: str, digest: str) -> None:
        """Name an image; a named image is never collected."""
        self.manifest(digest)
        self.names.put(name, digest, self.blobs.size(digest), self.media_type(digest))

    def media_type(self, digest: str) -> str:
        """Media type of an image's manifest."""
        return documents.manifest_of(self.blobs.read(digest), digest).mediaType

    def layer_path(self, digest: str) -> Path:
        """The layer's folder, unpacked now if it is not yet; host code only reads it."""
        place = self._layer_place(digest)
        if not place.exists() and (tar := self._layer_tar(digest)).exists():
            with self.writing(), tar.open("rb") as file:
                publish(place, lambda folder: layers.unpack(file, folder))
        return place

    def lowers(self, layers: Sequence[str], *, can_mount: bool) -> tuple[list[str], list[dict[str, str]]]:
        """Where layers lie for overlayfs, as paths below the store, lowest first; and what has to be mounted
        there before: `index` and `tar` of a layer that is not unpacked, and its `target`."""
        places: list[str] = []
        mounts: list[dict[str, str]] = []
        for digest in layers:
            name = _hex(digest)
            index = self.root / "erofs" / f"{name}.index"
            if can_mount and index.exists() and not self._layer_place(digest).exists():
                target = self.root / "lower" / name
                target.mkdir(exist_ok=True)
                tar = self._layer_tar(digest)
                mounts.append({"index": str(index), "tar": str(tar), "target": str(target)})
                places.append(f"lower/{name}")
            else:
                self.layer_path(digest)
                places.append(f"layers/{name}")
        return places, mounts

    def _layer_place(self, digest: str) -> Path:
        return self.root / "layers" / _hex(digest)

    def _layer_tar(self, digest: str) -> Path:
        """The uncompressed tar: the blob itself, or what a compressed one was inflated to."""
        plain = self.root / "erofs" / f"{_hex(digest)}.tar"
        return plain if plain.exists() else self.blobs.path(digest)

    def base_path(self, digest: str) -> Path:
        return self.root / "base" / _hex(digest)

    @contextmanager
    def writing(self) -> Generator[None]:
        """Hold off collections while blobs are stored that no image refers to yet."""
        with room(self.root), locked(self.root / "lock", fcntl.LOCK_SH):
            yield

    # ---- parts

    def _view(self, digest: str) -> ImageManifest:
        stored = documents.manifest_of(self.blobs.read(digest), digest)
        config = documents.parse(Config, self.blobs.read(stored.config.digest), "the configuration")
        settings = config.config or documents.Settings()
        labels = settings.Labels or {}
        notes = self.root / "notes" / f"{_hex(digest)}.json"
        host = labels.get(LABEL_BASE) == "host"
        return ImageManifest(
            base="host" if host else "layers",
            base_digest=labels[LABEL_BASE_DIGEST] if host else hostbase.BARE,
            layers=config.rootfs.diff_ids,
            env=dict(entry.split("=", 1) for entry in settings.Env or () if "=" in entry),
            workdir=settings.WorkingDir or "",
            notes=json.loads(notes.read_text()) if notes.exists() else ("",) * len(stored.layers),
        )

    def _check_base(self, config: Config) -> None:
        labels = (config.config.Labels if config.config else None) or {}
        if labels.get(LABEL_BASE) != "host":
            self._skeleton(hostbase.BARE, hostbase.build_bare)
        elif labels.get(LABEL_BASE_DIGEST) == hostbase.digest():
            self._skeleton(hostbase.digest(), hostbase.build)
        else:
            raise ImageError("the image stands on another host's /usr: build it there from a base of its own")

    def _save(
        self,
        base: Literal["host", "layers"],
        base_digest: str,
        stored: tuple[Descriptor, ...],
        env: Mapping[str, str],
        workdir: str,
        notes: tuple[str, ...],
        below: tuple[str, ...] = (),
    ) -> str:
        """`stored`: descriptors of all layers, of which the first have the diff_ids `below`."""
        labels = {LABEL_BASE: base, LABEL_BASE_DIGEST: base_digest} if base == "host" else {}
        fresh = tuple(descriptor.digest for descriptor in stored[len(below) :])
        config = documents.write_config((*below, *fresh), env, labels, workdir)
        manifest = documents.write_manifest(config, stored)
        digest = documents.digest_of(manifest)
        if not self.blobs.touch(digest):
            for layer in stored:
                self.blobs.touch(layer.digest)
            path = self.root / "notes" / f"{_hex(digest)}.json"
            if any(notes) and not path.exists():
                write_file(path, json.dumps(notes).encode())
            self.blobs.put(config)
            self.blobs.put(manifest)
        return digest

    def _descriptor(self, layer: str) -> Descriptor:
        return Descriptor(mediaType=documents.LAYER, digest=layer, size=self.blobs.size(layer))

    def _adopt(self, file: IO[bytes]) -> str:
        """Unpack a temporary file of `blobs` and keep it as a blob."""
        digest = self.blobs.digest(file)
        self._unpack(file, digest)
        return self.blobs.keep(file, digest)

    def _unpack(self, tar: IO[bytes], diff_id: str) -> None:
        place = self._layer_place(diff_id)
        if place.exists():
            os.utime(place)  # young again: no collection takes it now
        else:
            publish(place, lambda folder: layers.unpack(tar, folder))

    def _unpack_blob(self, layer: Descriptor, diff_id: str) -> None:
        """Make a stored layer mountable; its uncompressed tar must have the digest `diff_id`."""
        index = self.root / "erofs" / f"{_hex(diff_id)}.index"
        for ready in (self._layer_place(diff_id), index):
            if ready.exists() and self.blobs.touch(layer.digest):
                os.utime(ready)
                return
        compressed = documents.COMPRESSED[layer.mediaType] == "gzip"
        with self.blobs.path(layer.digest).open("rb") as blob, self.blobs.temporary() as plain:
            tar: IO[bytes] = blob
            if compressed:
                inflate(blob, plain, layer.digest)
                tar = plain
            if (found := self.blobs.digest(tar)) != diff_id:
                raise ImageError(f"layer {layer.digest} unpacks to {found}, not to {diff_id}")
            if self._unpack_foreign or not erofs.supported():
                self._unpack(tar, diff_id)
                return
            with self.blobs.temporary() as out:
                erofs.write_index(tar, out, diff_id[7:])
                if compressed:
                    self.blobs.move(plain, index.with_suffix(".tar"))
                self.blobs.move(out, index)

    def _skeleton(self, digest: str, build: Callable[[Path], None]) -> str:
        place = self.base_path(digest)
        if not place.exists():
            publish(place, build)
        return digest


def _hex(digest: str) -> str:
    try:
        return documents.check_digest(digest)[7:]
    except ImageError as error:
        raise KeyError(str(error)) from None
