"""Names of images: the layout's index.json, where other tools look for them."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from sandbox.oci import documents
from sandbox.oci.blobs import write_file
from sandbox.oci.documents import ImageError, Index

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,254}")


@contextmanager
def locked(path: Path, kind: int) -> Generator[None]:
    """flock(2) on a file, for as long as the context lasts; it ends with the process, however that ends."""
    with path.open("ab") as file:
        fcntl.flock(file, kind)
        yield


class Names:
    """Name to (digest, size, media type). Any number of processes may change them."""

    def __init__(self, layout: Path) -> None:
        self._path = layout / "index.json"
        self._lock = layout / "index.lock"

    def all(self) -> dict[str, str]:
        """Digest by name, sorted."""
        found = {
            descriptor.annotations[documents.REF_NAME]: descriptor.digest
            for descriptor in self._read().manifests
            if descriptor.annotations and documents.REF_NAME in descriptor.annotations
        }
        return dict(sorted(found.items()))

    def put(self, name: str, digest: str, size: int, media_type: str = documents.MANIFEST) -> None:
        """Let `name` mean this image from now on. Raises ImageError for a name that other tools refuse."""
        if not _NAME.fullmatch(name) or name.startswith("sha256:"):
            raise ImageError(f"{name[:100]!r} is no name: letters, digits and . _ / : @ + - are")
        with locked(self._lock, fcntl.LOCK_EX):
            names = self.all()
            self._write({**names, name: digest}, {digest: (size, media_type)})

    def remove(self, name: str) -> None:
        """Raises ImageError if there is no such name."""
        with locked(self._lock, fcntl.LOCK_EX):
            names = self.all()
            if names.pop(name, None) is None:
                raise ImageError(f"no image is named {name!r}")
            self._write(names, {})

    def _read(self) -> Index:
        try:
            return documents.parse(Index, self._path.read_bytes(), str(self._path))
        except FileNotFoundError:
            return Index()

    def _write(self, names: dict[str, str], fresh: dict[str, tuple[int, str]]) -> None:
        known = {entry.digest: (entry.size, entry.mediaType) for entry in self._read().manifests} | fresh
        entries: list[tuple[str, int, str | None, str]] = [
            (digest, known[digest][0], name, known[digest][1]) for name, digest in sorted(names.items())
        ]
        write_file(self._path, documents.write_index(entries))
