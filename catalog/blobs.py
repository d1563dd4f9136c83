"""Files by content: `sha256:...` in, the same bytes out, or an error.

Any fsspec address holds the store: a folder (default), `memory://` in tests, an object store with the
matching fsspec extra. A blob is never changed and never half there: on a local disk it is written under
a temporary name, synced and renamed; object stores make a PUT visible only when it is complete.

Left out: deletion. Nothing here knows who still refers to a blob.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, cast

import fsspec  # pyright: ignore[reportMissingTypeStubs]

from catalog.atomic import write_atomic

_REF = re.compile(r"sha256:[0-9a-f]{64}")


class BlobMissing(LookupError):
    """No blob has this digest."""


class BlobCorrupt(ValueError):
    """The stored bytes do not have the digest that they are filed under."""


def blob_ref(data: bytes) -> str:
    """The name of these bytes: `sha256:` and 64 hexadecimal digits."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


class Blobs:
    """A content-addressed store at a folder or an fsspec URL. Safe to share between processes."""

    def __init__(self, root: Path | str) -> None:
        self.url = str(root)
        self._fs, path = cast(Any, fsspec).url_to_fs(self.url)
        self._root = str(path).rstrip("/")
        self._local = "file" in _protocols(self._fs)

    def put(self, data: bytes) -> str:
        """Store bytes and return their name. Storing the same bytes again writes nothing."""
        ref = blob_ref(data)
        path = self._path(ref)
        if self._fs.exists(path) and self._fs.size(path) == len(data):
            return ref
        if self._local:
            write_atomic(Path(path), data, mode=0o444)
        else:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(path, data)
        return ref

    def get(self, ref: str) -> bytes:
        """The bytes of that name. Raises BlobMissing, or BlobCorrupt when the disk lied."""
        try:
            data: bytes = self._fs.cat_file(self._path(ref))
        except FileNotFoundError:
            raise BlobMissing(f"{ref} is not in {self.url}") from None
        if blob_ref(data) != ref:
            raise BlobCorrupt(f"{ref} in {self.url} holds other bytes; delete that file and make it again")
        return data

    def exists(self, ref: str) -> bool:
        return bool(self._fs.exists(self._path(ref)))

    def _path(self, ref: str) -> str:
        if not _REF.fullmatch(ref):
            raise ValueError(f"{ref!r} is not a blob name (sha256: and 64 hexadecimal digits)")
        digest = ref.removeprefix("sha256:")
        return f"{self._root}/{digest[:2]}/{digest}"


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
