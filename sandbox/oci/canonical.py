"""A layer tar made canonical: sorted names, one fixed time, no user names, nothing that changes by itself."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from typing import IO

from sandbox.oci.tars import OPAQUE, WHITEOUT, XATTR, Member, TarReader
from sandbox.trees import FIXED_TIME


def rewrite(source: IO[bytes], out: IO[bytes], *, keep: Callable[[str], bool], devices: bool = False) -> None:
    """Write the tar `source` (a seekable file) canonically to `out`.

    `keep` says of every name whether it stays; what lies below a folder is asked for by itself. Owners,
    modes, hard links, whiteouts and extended attributes are kept. With `devices` they are left out instead
    of refused. Raises UnsafeTar.
    """
    with TarReader(source, devices=devices) as reader:
        members = {_tar_name(member): member for member in reader if keep(member.name)}
        first: dict[str, str] = {}
        """Name of a file -> the name in its group of hard links that sorts first and carries the data."""
        for name, member in members.items():
            if member.kind in ("file", "hardlink"):
                file = _file(members, member)
                first[file] = min(name, first.get(file, name))
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar:
            for name in sorted(members, key=os.fsencode):
                member = members[name]
                if member.kind in ("file", "hardlink"):
                    file = _file(members, member)
                    if name == first[file]:
                        with reader.data(members[file]) as data:
                            tar.addfile(_entry(name, members[file]), data)
                    else:
                        link = _entry(name, member)
                        link.type, link.linkname = tarfile.LNKTYPE, first[file]
                        tar.addfile(link)
                else:
                    tar.addfile(_entry(name, member))


def _tar_name(member: Member) -> str:
    folder, _, last = member.name.rpartition("/")
    if member.kind == "opaque":
        return f"{member.name}/{OPAQUE}"
    if member.kind == "whiteout":
        return f"{folder}/{WHITEOUT}{last}" if folder else f"{WHITEOUT}{last}"
    return member.name


def _file(members: dict[str, Member], member: Member) -> str:
    while member.kind == "hardlink":
        member = members[member.link]
    return member.name


def _entry(name: str, member: Member) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.mtime = FIXED_TIME
    if member.kind in ("opaque", "whiteout"):
        return entry
    entry.mode = member.info.mode & 0o7777
    entry.uid, entry.gid = member.info.uid, member.info.gid
    entry.pax_headers = {
        key: value for key, value in sorted(member.info.pax_headers.items()) if key.startswith(XATTR)
    }
    if member.kind == "folder":
        entry.type = tarfile.DIRTYPE
    elif member.kind == "symlink":
        entry.type, entry.linkname = tarfile.SYMTYPE, member.link
    else:
        entry.size = member.info.size
    return entry
