"""Disk work of the image store: folders that appear whole, full disks as sentences, gunzip with a limit."""

from __future__ import annotations

import ctypes
import errno
import gzip
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from sandbox.base import SandboxUnavailable
from sandbox.oci.blobs import BLOCK, TEMPORARY
from sandbox.oci.documents import ImageError

MAX_LAYER = 64 << 30
"""Bytes of an uncompressed layer; a compressed one that claims more is an attack or a mistake."""


@contextmanager
def room(root: Path) -> Generator[None]:
    """A full or closed disk is one sentence for people."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SandboxUnavailable(
                f"no room for images in {root}: free some disk or set POSTTRAIN_HOME to a larger one"
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES) and not os.access(root, os.W_OK):
            raise SandboxUnavailable(
                f"cannot write images to {root}: make it writable or set POSTTRAIN_HOME to another folder"
            ) from error
        raise


def publish(place: Path, fill: Callable[[Path], None]) -> None:
    """Fill a temporary folder, sync it and give it its name, unless another process was first."""
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=place.parent))
    try:
        folder.chmod(0o755)
        fill(folder)
        _sync(folder)
        try:
            os.rename(folder, place)
        except OSError:
            if not place.exists():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _sync(place.parent)


def inflate(source: IO[bytes], target: IO[bytes], what: str) -> None:
    """gunzip, up to MAX_LAYER bytes. Raises ImageError."""
    total = 0
    try:
        with gzip.open(source) as plain:
            while block := plain.read(BLOCK):
                total += len(block)
                if total > MAX_LAYER:
                    raise ImageError(f"layer {what} unpacks to more than {MAX_LAYER >> 30} GiB")
                target.write(block)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ImageError(f"layer {what} is damaged: {error}") from None
    target.flush()


def _sync(folder: Path) -> None:
    """syncfs(2): one call for all files of a layer, where an fsync each would take minutes."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(fd)
