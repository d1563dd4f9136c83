"""Source distributions unpacked into memory: no script runs, nothing reaches the disk.

Limits guard against archives that grow without end; entries that would leave the tree, devices and
links out of it are dropped or refused.
"""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator

from envfactory.errors import SourceError
from envfactory.trees import File, link_stays_inside, safe_path

MAX_FILES = 20_000
MAX_BYTES = 512 << 20
_DROPPED_PARTS = (".egg-info", ".dist-info")


def unpack(name: str, data: bytes) -> tuple[dict[str, File], int]:
    """The tree of a source distribution, its top folder stripped, and the newest time found inside (s).

    Generated metadata folders (`*.egg-info`) are left out; `PKG-INFO` stays, it names the dependencies.
    Raises SourceError for an archive that is damaged, too large or not a source distribution.
    """
    entries = _zip(data) if name.endswith(".zip") else _tar(data)
    tree: dict[str, File] = {}
    newest = 0
    total = 0
    try:
        for raw, file, time in entries:
            path = safe_path(raw.partition("/")[2])
            if safe_path(raw) is None:
                raise SourceError(
                    f"{name} holds the path {raw[:80]!r}, which leaves it: do not use this package"
                )
            if path is None or any(part.endswith(_DROPPED_PARTS) for part in path.split("/")):
                continue
            if file.link and not link_stays_inside(path, file.data.decode("utf-8", "surrogateescape")):
                continue
            total += len(file.data)
            if len(tree) >= MAX_FILES or total > MAX_BYTES:
                raise SourceError(
                    f"{name} unpacks to over {MAX_FILES} files or {MAX_BYTES >> 20} MiB: choose a smaller one"
                )
            tree[path] = file
            newest = max(newest, time)
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        EOFError,
        zlib.error,
        gzip.BadGzipFile,
        lzma.LZMAError,
    ) as error:
        raise SourceError(f"{name} is damaged ({error}): try again, or name another version") from error
    if not tree:
        raise SourceError(f"{name} is empty: name another version")
    return _without_parents(tree), newest


def _tar(data: bytes) -> Iterator[tuple[str, File, int]]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r|*") as tar:
        for member in tar:
            if member.isreg():
                if member.size > MAX_BYTES:
                    raise SourceError(
                        f"an entry of {member.size >> 20} MiB is too large: choose a smaller package"
                    )
                source = tar.extractfile(member)
                content = source.read() if source else b""
                yield member.name, File(content, executable=bool(member.mode & 0o100)), int(member.mtime)
            elif member.issym():
                yield member.name, File(member.linkname.encode("utf-8", "surrogateescape"), link=True), 0


def _zip(data: bytes) -> Iterator[tuple[str, File, int]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            if info.file_size > MAX_BYTES:
                raise SourceError(
                    f"an entry of {info.file_size >> 20} MiB is too large: choose a smaller package"
                )
            executable = bool((info.external_attr >> 16) & 0o100)
            yield info.filename, File(archive.read(info), executable=executable), 0


def _without_parents(tree: dict[str, File]) -> dict[str, File]:
    """Drop a file whose path is also a folder of another one (a broken archive may hold both)."""
    folders = {path.rsplit("/", i)[0] for path in tree for i in range(1, path.count("/") + 1)}
    return {path: file for path, file in tree.items() if path not in folders}
