"""Files by digest, in the folder `blobs/sha256` of an OCI layout.

A writer fills a temporary file, syncs it and gives it its name; whoever comes second throws his copy away. So
any number of processes may share the folder, and a kill leaves at most a temporary file, which
`sandbox.oci.collect` removes.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from sandbox.oci.documents import ImageError, check_digest

BLOCK = 1 << 20
TEMPORARY = ".new-"


class Blobs:
    """The blobs of one layout."""

    def __init__(self, layout: Path) -> None:
        self.folder = layout / "blobs" / "sha256"

    def path(self, digest: str) -> Path:
        """Where the blob lies, or would lie."""
        return self.folder / check_digest(digest)[7:]

    def __contains__(self, digest: str) -> bool:
        return self.path(digest).exists()

    def size(self, digest: str) -> int:
        """In bytes; raises KeyError if there is no such blob."""
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            raise KeyError(f"no blob {digest} in {self.folder}") from None

    def read(self, digest: str) -> bytes:
        """A small blob; raises KeyError if there is none."""
        try:
            return self.path(digest).read_bytes()
        except FileNotFoundError:
            raise KeyError(f"no blob {digest} in {self.folder}") from None

    def put(self, data: bytes) -> str:
        """Store bytes; returns their digest."""
        with self.temporary() as file:
            file.write(data)
            return self.keep(file)

    def put_stream(self, chunks: Iterable[bytes], digest: str, size: int | None) -> None:
        """Store a stream that must have this digest and, unless None, this size. Raises ImageError."""
        hasher, total = hashlib.sha256(), 0
        with self.temporary() as file:
            for chunk in chunks:
                total += len(chunk)
                if size is not None and total > size:
                    raise ImageError(f"blob {digest} is longer than the {size} bytes that it should have")
                hasher.update(chunk)
                file.write(chunk)
            if size is not None and total != size:
                raise ImageError(f"blob {digest} has {total} bytes, not {size}")
            if f"sha256:{hasher.hexdigest()}" != digest:
                raise ImageError(f"blob {digest} has another content: sha256:{hasher.hexdigest()}")
            self.keep(file, digest)

    @contextmanager
    def temporary(self) -> Generator[IO[bytes]]:
        """A file in this folder that vanishes unless `keep` is called with it."""
        with tempfile.NamedTemporaryFile(prefix=TEMPORARY, dir=self.folder, delete=False) as file:
            try:
                yield file
            finally:
                Path(file.name).unlink(missing_ok=True)

    def digest(self, file: IO[bytes]) -> str:
        """Digest of a seekable file's content."""
        file.flush()
        file.seek(0)
        return f"sha256:{hashlib.file_digest(cast(Any, file), 'sha256').hexdigest()}"

    def keep(self, file: IO[bytes], digest: str | None = None) -> str:
        """Give a temporary file its name. A blob that is there already is only touched."""
        file.flush()
        digest = digest or self.digest(file)
        if not self.touch(digest):
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
            os.rename(file.name, self.path(digest))
            sync_folder(self.folder)
        return digest

    def move(self, file: IO[bytes], place: Path) -> None:
        """Give a temporary file a name outside the blobs, on the same disk."""
        file.flush()
        os.fsync(file.fileno())
        os.fchmod(file.fileno(), 0o644)
        os.rename(file.name, place)
        sync_folder(place.parent)

    def touch(self, digest: str) -> bool:
        """Whether the blob exists; makes it young, so that no collection takes it from who uses it now."""
        try:
            os.utime(self.path(digest))
        except FileNotFoundError:
            return False
        return True


def sync_folder(folder: Path) -> None:
    """fsync of a folder: its renames survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Replace a file as a whole: temporary file, fsync, rename."""
    with tempfile.NamedTemporaryFile(prefix=TEMPORARY, dir=path.parent, delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
            os.rename(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    sync_folder(path.parent)
