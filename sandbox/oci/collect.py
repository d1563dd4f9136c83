"""What the store holds, and which of it nothing needs any more.

An image is held by a name, by a lease, by a sandbox that runs from it, or by whoever calls `collect` (a
catalog's tasks). Everything else goes, if it is older than a grace period that covers images which were made
but not written down yet. A collection that is killed can be run again: manifests go first, so no image is
left without its layers.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from sandbox import hostbase
from sandbox.images import ImageStore
from sandbox.oci import documents
from sandbox.oci.blobs import TEMPORARY, write_file
from sandbox.oci.documents import ImageError, Manifest
from sandbox.oci.names import locked

GRACE_S = 24 * 3600.0
_OLD = ".old-"


class ImageInfo(BaseModel):
    """One image of the store."""

    model_config = ConfigDict(frozen=True)

    name: str | None
    digest: str
    base: str
    layers: int
    bytes: int
    """Of its layer blobs; images share them."""


class Collected(BaseModel):
    """What a collection removed, or would."""

    model_config = ConfigDict(frozen=True)

    images: int = 0
    layers: int = 0
    bytes: int = 0
    """Of blobs and unpacked layers."""
    kept: int = 0
    """Images that something holds, or that are young."""


def images(store: ImageStore, *, unnamed: bool = False) -> list[ImageInfo]:
    """Images by name, then those without one."""
    found: list[ImageInfo] = []
    named = store.names.all()
    pairs: list[tuple[str | None, str]] = [*named.items()]
    if unnamed:
        pairs += [(None, digest) for digest, _ in manifests(store) if digest not in named.values()]
    for name, digest in pairs:
        view = store.manifest(digest)
        stored = documents.manifest_of(store.blobs.read(digest), digest)
        size = sum(layer.size for layer in stored.layers)
        found.append(ImageInfo(name=name, digest=digest, base=view.base, layers=len(view.layers), bytes=size))
    return found


def manifests(store: ImageStore) -> Iterator[tuple[str, Manifest]]:
    """(digest, manifest) of every image in the store, in order of digests."""
    with os.scandir(store.blobs.folder) as entries:
        names = sorted(
            entry.name
            for entry in entries
            if not entry.name.startswith(".") and entry.stat().st_size <= documents.MAX_DOCUMENT
        )
    for name in names:
        digest = f"sha256:{name}"
        with contextlib.suppress(FileNotFoundError, ImageError):
            with store.blobs.path(digest).open("rb") as file:
                if file.read(1) != b"{":
                    continue
                data = b"{" + file.read()
            yield digest, documents.manifest_of(data, digest)


@contextmanager
def lease(store: ImageStore, digest: str, *, seconds: float, note: str = "") -> Generator[Path]:
    """Hold an image for as long as the context lasts, and at most `seconds` if this process is killed."""
    store.manifest(digest)
    path = store.root / "leases" / f"{secrets.token_hex(8)}.json"
    record: dict[str, Any] = {"image": digest, "until": time.time() + seconds, "note": note}
    write_file(path, json.dumps(record).encode())
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def holders(store: ImageStore) -> dict[str, str]:
    """Digest of every image that the store itself knows to be held, and by what."""
    found = {digest: f"name {name}" for name, digest in store.names.all().items()}
    for path in (store.root / "leases").glob("*.json"):
        record = _record(path)
        if record.get("until", 0) > time.time():
            found.setdefault(record["image"], f"lease {record['note']}")
        else:
            path.unlink(missing_ok=True)
    for path in (store.root / "run").glob("*.json"):
        record = _record(path)
        if "image" in record:
            found.setdefault(record["image"], f"sandbox {record['id']}")
    return found


def _record(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def collect(
    store: ImageStore, *, keep: Collection[str] = (), grace_s: float = GRACE_S, dry_run: bool = False
) -> Collected:
    """Remove images that nothing holds, and layers and blobs that no image needs.

    `keep`: digests that the caller knows to be needed (of tasks and builds in a catalog). Nothing younger
    than `grace_s` seconds goes. Waits for writers that are at it.
    """
    with locked(store.root / "lock", fcntl.LOCK_EX):
        return _Collection(store, {*keep, *holders(store)}, time.time() - grace_s, dry_run).run()


class _Collection:
    def __init__(self, store: ImageStore, held: set[str], before: float, dry_run: bool) -> None:
        self._store = store
        self._held = held
        self._before = before
        self._dry_run = dry_run
        self._bytes = 0

    def run(self) -> Collected:
        blobs = self._store.blobs
        gone: list[str] = []
        needed: set[str] = set()
        unpacked: set[str] = {hostbase.digest(), hostbase.BARE}
        kept = 0
        for digest, manifest in manifests(self._store):
            if digest not in self._held and self._is_old(blobs.path(digest)):
                gone.append(digest)
                continue
            kept += 1
            view = self._store.manifest(digest)
            needed |= {digest, manifest.config.digest, *(layer.digest for layer in manifest.layers)}
            unpacked |= {*view.layers, view.base_digest}
        for digest in gone:
            self._remove(blobs.path(digest))
            self._remove(self._store.root / "notes" / f"{digest[7:]}.json")
        for path in [*blobs.folder.iterdir()]:
            digest = f"sha256:{path.name}"
            if digest in gone:
                continue
            if self._is_stray(path) or (digest not in needed and self._is_old(path)):
                self._remove(path)
        self._caches()
        layers = 0
        for folder in ("layers", "base", "erofs", "lower"):
            for path in [*(self._store.root / folder).iterdir()]:
                if self._is_stray(path):
                    self._remove(path)
                elif f"sha256:{path.stem}" not in unpacked and self._is_old(path):
                    layers += 1
                    self._remove(path)
        return Collected(images=len(gone), layers=layers, bytes=self._bytes, kept=kept)

    def _caches(self) -> None:
        """What can be had again: files of package indexes that nobody asked for lately, and the memory of
        steps whose image is gone."""
        index = self._store.root / "index"
        for path in [*index.iterdir()] if index.is_dir() else []:
            if self._is_old(path):
                self._remove(path)
        for path in [*(self._store.root / "steps").iterdir()]:
            image = _record(path).get("image", "")
            if self._is_old(path) and not (image and self._store.exists(image)):
                self._remove(path)

    def _is_old(self, path: Path) -> bool:
        try:
            return path.lstat().st_mtime < self._before
        except FileNotFoundError:
            return False

    def _is_stray(self, path: Path) -> bool:
        """A temporary of a writer that was killed: the lock says that none is at work."""
        return path.name.startswith((TEMPORARY, _OLD))

    def _remove(self, path: Path) -> None:
        self._bytes += _bytes(path)
        if self._dry_run:
            return
        if path.is_dir() and not path.is_symlink():
            aside = path if self._is_stray(path) else path.with_name(f"{_OLD}{path.name}")
            if aside != path:
                path.rename(aside)  # a kill in the middle leaves no half layer under its digest
            shutil.rmtree(aside)
        else:
            path.unlink(missing_ok=True)


def _bytes(path: Path) -> int:
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_blocks * 512 if path.exists() else 0
    return sum(
        os.lstat(os.path.join(folder, name)).st_blocks * 512
        for folder, _, names in os.walk(path)
        for name in names
    )
