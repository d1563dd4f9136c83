"""File trees as gzipped tars: our own, and those of strangers."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib

from envfactory.formats.fields import FormatError
from envfactory.trees import File, Tree, link_stays_inside, safe_path, tar_of

MAX_TREE = 512 << 20
"""Bytes of an unpacked tree."""
MAX_FILES = 50_000


def pack_tree(tree: Tree) -> bytes:
    """A gzipped tar whose bytes depend on the tree alone."""
    return gzip.compress(tar_of(tree), 6, mtime=0)


def unpack_tree(data: bytes, place: str) -> dict[str, File]:
    """The inverse of `pack_tree`, for archives of strangers; a `.git` folder in it is left out."""
    tree: dict[str, File] = {}
    total = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            for member in archive:
                if member.isdir() or ".git" in member.name.split("/"):
                    continue
                name = safe_path(member.name)
                if name is None:
                    raise FormatError(f"{place}: the archive holds {member.name[:80]!r}, which leaves it")
                total += member.size
                if total > MAX_TREE or len(tree) >= MAX_FILES:
                    raise FormatError(f"{place}: the archive unpacks to more than {MAX_TREE >> 20} MiB")
                tree[name] = _entry(archive, member, name, place)
    except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error) as error:
        raise FormatError(f"{place}: the archive is damaged ({str(error)[:80]}): get it again") from error
    return tree


def _entry(archive: tarfile.TarFile, member: tarfile.TarInfo, name: str, place: str) -> File:
    if member.issym():
        if not link_stays_inside(name, member.linkname):
            raise FormatError(f"{place}: the link {name[:80]!r} in the archive points out of it")
        return File(member.linkname.encode("utf-8", "surrogateescape"), link=True)
    handle = archive.extractfile(member) if member.isreg() else None
    if handle is None:
        raise FormatError(f"{place}: {name[:80]!r} in the archive is neither a file nor a link")
    return File(handle.read(), executable=bool(member.mode & 0o111))


def tar_tree(data: bytes) -> dict[str, File]:
    """The files of a tar that we wrote ourselves (`trees.tar_of`)."""
    return unpack_tree(gzip.compress(data, 1), "the protected tar")
