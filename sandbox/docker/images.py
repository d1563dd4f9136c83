"""Images of the store as images of the engine: loaded once, layers shared.

The archive is what every engine loads (Docker's manifest.json, a configuration, layer tars). Its layers are
the store's own blobs over one that is made from the base's skeleton (mount points, /etc), so the engine keeps
each but once, and what it has already is not sent again. The image's environment stays out: it is the
sandbox's business, and PID 1 must not start in it.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import stat
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from sandbox.base import SandboxUnavailable
from sandbox.docker.engine import Engine
from sandbox.images import ImageStore
from sandbox.oci import documents
from sandbox.trees import AGENT, FIXED_TIME, walk

REPOSITORY = "posttrain/image"
STORE = "posttrain.store"
"""Label of images in the engine: the store that they came from."""


def reference(digest: str) -> str:
    """The engine's name for the store's image."""
    return f"{REPOSITORY}:{digest.removeprefix('sha256:')}"


class Loader:
    """Brings images of a store into an engine, each at most once at a time."""

    def __init__(self, images: ImageStore, engine: Engine) -> None:
        self._images = images
        self._engine = engine
        self._known: set[str] = set()
        self._loading = asyncio.Lock()

    async def ensure(self, digest: str) -> str:
        """The engine's reference of that image, loaded if need be. KeyError for an unknown image."""
        name = reference(digest)
        if name not in self._known:
            async with self._loading:
                await self._engine.call("load an image", lambda: self._load(digest, name))
            self._known.add(name)
        return name

    def forget(self, digest: str) -> None:
        """The engine turned out not to have it."""
        self._known.discard(reference(digest))

    async def collect(self) -> int:
        """Remove from the engine what came from this store and is no longer in it; how many images."""
        found = await self._engine.call(
            "list images", lambda: self._engine.images({STORE: str(self._images.root)})
        )
        names = [name for name in found if name.startswith(f"{REPOSITORY}:")]
        gone = [name for name in names if not self._images.exists(f"sha256:{name.partition(':')[2]}")]
        removed = [
            await self._engine.call("remove an image", lambda n=name: self._engine.untag(n)) for name in gone
        ]
        self._known.difference_update(gone)
        return sum(removed)

    def _load(self, digest: str, name: str) -> None:
        if self._engine.has_image(name):
            return
        manifest = self._images.manifest(digest)
        stored = documents.manifest_of(self._images.blobs.read(digest), digest)
        with ExitStack() as stack:
            skeleton = stack.enter_context(tempfile.TemporaryFile())
            write_tree(self._images.base_path(manifest.base_digest), skeleton)
            tars: list[IO[bytes]] = [skeleton]
            for layer in stored.layers:
                tars.append(stack.enter_context(self._images.blobs.path(layer.digest).open("rb")))
            below = hashlib.file_digest(_rewound(skeleton), "sha256").hexdigest()
            layers = (f"sha256:{below}", *manifest.layers)
            present = self._present(layers)
            try:
                self._send(name, layers, tars, present)
            except SandboxUnavailable:
                if not present:
                    raise
                self._send(name, layers, tars, 0)  # an engine that wants all layers every time

    def _send(self, name: str, layers: Sequence[str], tars: Sequence[IO[bytes]], present: int) -> None:
        with tempfile.TemporaryFile(dir=self._images.root) as archive:
            write_archive(name, layers, tars, present, str(self._images.root), archive)
            self._engine.load(_rewound(archive))

    def _present(self, layers: Sequence[str]) -> int:
        """How many of the lowest layers some image of ours has brought into the engine."""
        best = 0
        for other in self._engine.image_layers(REPOSITORY):
            same = 0
            while same < min(len(other), len(layers)) and other[same] == layers[same]:
                same += 1
            best = max(best, same)
        return best


def write_archive(
    name: str, layers: Sequence[str], tars: Sequence[IO[bytes]], present: int, store: str, out: IO[bytes]
) -> None:
    """The archive of an image with these layers (digests of their uncompressed tars), lowest first.

    `tars` are the layers' files, plain or gzip; those of the first `present` layers are left out.
    """
    config = documents.write_config(tuple(layers), {}, {STORE: store}, "/")
    files = [f"{layer.removeprefix('sha256:')}.tar" for layer in layers]
    config_name = f"{documents.digest_of(config).removeprefix('sha256:')}.json"
    saved: list[dict[str, Any]] = [{"Config": config_name, "RepoTags": [name], "Layers": files}]
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for position in range(present, len(layers)):
            if files[position] not in files[present:position]:
                size = tars[position].seek(0, os.SEEK_END)
                _add_file(archive, files[position], _rewound(tars[position]), size)
        for file, data in ((config_name, config), ("manifest.json", json.dumps(saved).encode())):
            _add_file(archive, file, io.BytesIO(data), len(data))


def write_tree(folder: Path, out: IO[bytes]) -> None:
    """A deterministic tar of a skeleton: owners root or agent, modes as they are."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, info in walk(folder):
            member = tarfile.TarInfo(name)
            member.mtime = FIXED_TIME
            member.mode = stat.S_IMODE(info.st_mode)
            member.uid = member.gid = 0 if info.st_uid == 0 else AGENT
            if stat.S_ISDIR(info.st_mode):
                member.type = tarfile.DIRTYPE
                tar.addfile(member)
            elif stat.S_ISLNK(info.st_mode):
                member.type, member.linkname = tarfile.SYMTYPE, os.readlink(folder / name)
                tar.addfile(member)
            elif stat.S_ISREG(info.st_mode):
                member.size = info.st_size
                with (folder / name).open("rb") as file:
                    tar.addfile(member, file)


def _add_file(archive: tarfile.TarFile, name: str, source: IO[bytes], size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime = size, FIXED_TIME
    archive.addfile(member, source)


def _rewound(file: IO[bytes]) -> Any:
    file.seek(0)
    return file
