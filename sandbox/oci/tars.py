"""A tar of unknown origin, entry by entry, each checked before anything is done with it.

Python's `tarfile` reads the headers; what it forgives is refused here, each with one sentence: names that
leave the folder or run through a link, entries twice, devices and fifos, sparse files (a few bytes that
claim terabytes), headers of a size that only an attack has, links to what is not there, rubbish behind the
last entry.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Literal, Self, cast

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
XATTR = "SCHILY.xattr."
"""Prefix of pax keywords that hold extended attributes."""
MAX_HEADER = 1 << 20
_NAME, _PATH = 255, 4095
_EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME,
             tarfile.GNUTYPE_LONGLINK)  # fmt: skip

Kind = Literal["file", "folder", "symlink", "hardlink", "whiteout", "opaque"]


class UnsafeTar(ValueError):
    """A tar that would leave its folder, that cannot be read, or that holds what no image may contain."""


class _Header(tarfile.TarInfo):
    """Refuses extended headers that would be read into memory whole, however large they claim to be."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        info = super().frombuf(buf, encoding, errors)
        if info.type in _EXTENDED and info.size > MAX_HEADER:
            raise UnsafeTar(f"the tar has an extended header of {info.size} bytes")
        if info.type == tarfile.GNUTYPE_SPARSE:
            raise UnsafeTar(f"tar entry {info.name!r} is sparse")
        if info.size < 0:
            raise UnsafeTar(f"tar entry {info.name!r} has a negative size")
        return info


@dataclass(frozen=True, slots=True)
class Member:
    """One entry. `name` is relative and clean; of a whiteout, the name that it deletes."""

    kind: Kind
    name: str
    link: str
    """Target of a symlink as written, or of a hard link as a clean name."""
    info: tarfile.TarInfo

    @property
    def xattrs(self) -> dict[str, bytes]:
        """Extended attributes by name."""
        return {
            key.removeprefix(XATTR): value.encode("utf-8", "surrogateescape")
            for key, value in self.info.pax_headers.items()
            if key.startswith(XATTR)
        }


class TarReader:
    """The members of an uncompressed tar in a seekable file, in order. Use as a context manager."""

    def __init__(self, file: IO[bytes], *, devices: bool = False) -> None:
        """`devices`: skip device nodes and fifos (a base system's /dev) where they are refused otherwise."""
        self._file = file
        self._devices = devices
        self._seen: dict[str, Kind] = {}
        self._tar: tarfile.TarFile | None = None
        self._length = 0

    def __enter__(self) -> Self:
        self._length = self._file.seek(0, os.SEEK_END)
        self._file.seek(0)
        try:
            self._tar = tarfile.open(fileobj=self._file, mode="r:", tarinfo=_Header, encoding="utf-8")
        except tarfile.TarError as error:
            raise UnsafeTar(f"not a tar: {error}") from None
        return self

    def __exit__(self, *exc: object) -> None:
        if self._tar is not None:
            self._tar.close()

    def __iter__(self) -> Iterator[Member]:
        assert self._tar is not None
        while True:
            try:
                info = self._tar.next()
            except (tarfile.TarError, ValueError, OverflowError, UnicodeError) as error:
                if isinstance(error, UnsafeTar):
                    raise
                raise UnsafeTar(f"the tar is damaged: {error}") from None
            cast(Any, self._tar).members.clear()  # or a tar of millions of entries would stay in memory
            if info is None:
                break
            member = self._member(info)
            if member is not None:
                yield member
        self._end()

    def data(self, member: Member) -> IO[bytes]:
        """The content of a file; read it before the next entry is asked for."""
        assert self._tar is not None
        reader = self._tar.extractfile(member.info)
        assert reader is not None
        return reader

    def _end(self) -> None:
        """tarfile stops at the first block that is no header; what follows must be the end's zeros."""
        assert self._tar is not None
        self._file.seek(self._tar.offset)
        while block := self._file.read(1 << 20):
            if block.strip(b"\0"):
                raise UnsafeTar("the tar is damaged: something that is no entry follows its entries")

    def _member(self, info: tarfile.TarInfo) -> Member | None:
        name = clean(info.name)
        if not name:
            if info.isdir():
                return None
            raise UnsafeTar(f"tar entry {info.name!r} has no name")
        if info.issparse() or any(key.startswith("GNU.sparse.") for key in info.pax_headers):
            raise UnsafeTar(f"tar entry {name!r} is sparse")
        for key in info.pax_headers:
            if key.startswith((f"{XATTR}trusted.overlay.", f"{XATTR}user.overlay.")):
                raise UnsafeTar(f"tar entry {name!r} carries overlayfs' own attribute {key[len(XATTR) :]}")
        if info.isdev() and self._devices:
            return None
        kind, name, link = self._classify(info, name)
        self._place(name, kind)
        return Member(kind, name, link, info)

    def _classify(self, info: tarfile.TarInfo, name: str) -> tuple[Kind, str, str]:
        folder, _, last = name.rpartition("/")
        if last == OPAQUE:
            return "opaque", folder, ""
        if last.startswith(f"{WHITEOUT}{WHITEOUT}"):
            raise UnsafeTar(f"tar entry {name!r} has a name that layers reserve")
        if last.startswith(WHITEOUT):
            gone = last.removeprefix(WHITEOUT)
            if gone in ("", ".", ".."):
                raise UnsafeTar(f"tar entry {name!r} deletes nothing that a folder can hold")
            return "whiteout", f"{folder}/{gone}" if folder else gone, ""
        if info.isdir():
            return "folder", name, ""
        if info.issym():
            if not info.linkname or "\0" in info.linkname or len(info.linkname) > _PATH:
                raise UnsafeTar(f"tar entry {name!r} is a link to nowhere")
            return "symlink", name, info.linkname
        if info.islnk():
            target = clean(info.linkname)
            if self._seen.get(target) not in ("file", "hardlink"):
                raise UnsafeTar(f"tar entry {name!r} is a hard link to {info.linkname!r}, no file before it")
            return "hardlink", name, target
        if info.isreg():
            if info.offset_data + info.size > self._length:
                raise UnsafeTar(f"the tar is damaged: it ends within {name!r}")
            return "file", name, ""
        raise UnsafeTar(f"tar entry {name!r} is a device or fifo")

    def _place(self, name: str, kind: Kind) -> None:
        """Every parent is a folder of this tar, or becomes one; nothing comes twice but folders."""
        if kind == "opaque":
            parents = name
        else:
            before = self._seen.get(name)
            if before is not None and not (before == kind == "folder"):
                raise UnsafeTar(f"tar entry {name!r} comes twice")
            self._seen[name] = kind
            parents = name.rpartition("/")[0]
        while parents:
            above = self._seen.get(parents)
            if above is None:
                self._seen[parents] = "folder"
            elif above == "symlink":
                raise UnsafeTar(f"tar entry {name!r} goes through a symbolic link")
            elif above != "folder":
                raise UnsafeTar(f"tar entry {name!r} lies in what is no folder")
            else:
                return
            parents = parents.rpartition("/")[0]


def clean(name: str) -> str:
    """`./a//b/` as `a/b`; UnsafeTar for absolute names, `..`, NUL and names that no folder can hold."""
    if name.startswith("/") or "\0" in name:
        raise UnsafeTar(f"tar entry {name[:200]!r} would leave its folder")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise UnsafeTar(f"tar entry {name[:200]!r} would leave its folder")
    if len(name) > _PATH or any(len(part.encode("utf-8", "surrogateescape")) > _NAME for part in parts):
        raise UnsafeTar(f"tar entry {name[:60]!r}... has a name that is too long")
    return "/".join(parts)
