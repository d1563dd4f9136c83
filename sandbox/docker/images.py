"""Images of the store as images of the engine: loaded once, layers shared.

The archive is what `docker save` writes (format 1.2: manifest.json, a configuration, layer tars), which every
engine loads. Layer tars are made from the store's folders in a fixed order with fixed times, so an image has
the same layers whoever loads it, and the engine keeps each but once. The image's environment stays out: it
is the sandbox's business, and PID 1 must not start in it.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import platform
import stat
import tarfile
import tempfile
from pathlib import Path
from typing import IO

from sandbox.docker.engine import Engine
from sandbox.images import ImageStore
from sandbox.trees import AGENT, FIXED_TIME, walk

REPOSITORY = "posttrain/image"
_CREATED = "2000-01-01T00:00:00Z"


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

    def _load(self, digest: str, name: str) -> None:
        if self._engine.has_image(name):
            return
        manifest = self._images.manifest(digest)
        folders = [self._images.base_path(manifest.base_digest)]
        folders += [self._images.layer_path(layer) for layer in manifest.layers]
        with tempfile.TemporaryFile(dir=self._images.root) as archive:
            write_archive(folders, name, archive)
            archive.seek(0)
            self._engine.load(archive)

    def forget(self, digest: str) -> None:
        """The engine turned out not to have it."""
        self._known.discard(reference(digest))


def write_archive(folders: list[Path], name: str, out: IO[bytes]) -> None:
    """The archive of an image whose layers lie unpacked in `folders`, lowest first."""
    digests: list[str] = []
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for folder in folders:
            with tempfile.TemporaryFile() as layer:
                write_layer(folder, layer)
                size = layer.tell()
                layer.seek(0)
                digest = hashlib.file_digest(layer, "sha256").hexdigest()
                if digest not in digests:
                    layer.seek(0)
                    member = tarfile.TarInfo(f"{digest}.tar")
                    member.size, member.mtime = size, FIXED_TIME
                    archive.addfile(member, layer)
                digests.append(digest)
        config = json.dumps(
            {
                "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(
                    platform.machine(), platform.machine()
                ),
                "os": "linux",
                "created": _CREATED,
                "config": {},
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
                "history": [{"created": _CREATED} for _ in digests],
            },
            sort_keys=True,
        ).encode()
        config_name = f"{hashlib.sha256(config).hexdigest()}.json"
        manifest = [
            {
                "Config": config_name,
                "RepoTags": [name],
                "Layers": [f"{digest}.tar" for digest in digests],
            }
        ]
        for file, data in ((config_name, config), ("manifest.json", json.dumps(manifest).encode())):
            member = tarfile.TarInfo(file)
            member.size, member.mtime = len(data), FIXED_TIME
            archive.addfile(member, io.BytesIO(data))


def write_layer(folder: Path, out: IO[bytes]) -> None:
    """The tar of an unpacked layer: owners root or agent, modes as they are, whiteouts in OCI form."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, info in walk(folder):
            _add(tar, folder / name, name, info)


def _add(tar: tarfile.TarFile, path: Path, name: str, info: os.stat_result) -> None:
    member = tarfile.TarInfo(name)
    member.mtime = FIXED_TIME
    member.mode = stat.S_IMODE(info.st_mode)
    member.uid = member.gid = 0 if info.st_uid == 0 else AGENT
    if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
        tar.addfile(_marker(os.path.join(os.path.dirname(name), f".wh.{path.name}")))
    elif stat.S_ISDIR(info.st_mode):
        member.type = tarfile.DIRTYPE
        tar.addfile(member)
        if _is_opaque(path):
            tar.addfile(_marker(f"{name}/.wh..wh..opq"))
    elif stat.S_ISLNK(info.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
        tar.addfile(member)
    elif stat.S_ISREG(info.st_mode):
        with path.open("rb") as file:
            member.size = os.fstat(file.fileno()).st_size
            tar.addfile(member, file)


def _marker(name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.mtime = FIXED_TIME
    return member


def _is_opaque(path: Path) -> bool:
    try:
        return os.getxattr(path, "user.overlay.opaque") in (b"y", b"x")
    except OSError:
        return False
