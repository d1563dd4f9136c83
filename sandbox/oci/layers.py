"""One layer of an image: its tar unpacked for overlayfs, and trees made into canonical tars.

Whiteouts travel in OCI form (`.wh.NAME`, `.wh..wh..opq`) and lie on disk in overlayfs' own: a 0:0 character
device, and the attribute `user.overlay.opaque`. Owners are kept where the caller is root. File
capabilities and setuid bits stay in the tar (exports have them); unpacked they would be without effect, since
sandboxes mount nosuid, and on the host they would be a danger.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tarfile
from pathlib import Path
from typing import IO

from sandbox.oci.tars import Member, TarReader

MAX_ID = 65535
"""Ids above are shown as nobody: the user namespaces of sandboxes map no more."""
_NOBODY = 65534
_BLOCK = 1 << 20


def unpack(tar: IO[bytes], root: Path) -> None:
    """Unpack an uncompressed tar (a seekable file) into the empty folder `root`, which nobody else writes.

    Raises UnsafeTar (see `sandbox.oci.tars`); `root` is then half filled.
    """
    folders: list[tuple[Path, Member]] = []
    with TarReader(tar) as reader:
        for member in reader:
            path = root / member.name
            if member.kind == "opaque":
                path.mkdir(parents=True, exist_ok=True)
                os.setxattr(path, "user.overlay.opaque", b"y")
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if member.kind == "whiteout":
                os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(0, 0))
                continue
            if member.kind == "hardlink":
                os.link(root / member.link, path, follow_symlinks=False)
                continue
            if member.kind == "symlink":
                path.symlink_to(member.link)
            elif member.kind == "folder":
                path.mkdir(exist_ok=True)
                folders.append((path, member))
            else:
                with path.open("xb") as file:
                    shutil.copyfileobj(reader.data(member), file, _BLOCK)
            _own(path, member)
    for path, member in reversed(folders):
        os.utime(path, (member.info.mtime, member.info.mtime))


def shown_ids(info: tarfile.TarInfo) -> tuple[int, int]:
    """Owner and group of an entry as sandboxes see them."""
    uid, gid = (id if 0 <= id <= MAX_ID else _NOBODY for id in (info.uid, info.gid))
    return uid, gid


def permissions(member: Member) -> int:
    """Mode bits of an entry as sandboxes see them: no setuid; folders open to their owner, who is to be able
    to enter and remove them."""
    if member.kind == "folder":
        return member.info.mode & 0o1777 | 0o700
    return member.info.mode & 0o777


def _own(path: Path, member: Member) -> None:
    info = member.info
    if os.geteuid() == 0:
        os.chown(path, *shown_ids(info), follow_symlinks=False)
    if member.kind == "symlink":
        return
    path.chmod(permissions(member))
    for name, value in member.xattrs.items():
        if name.startswith("user."):
            with contextlib.suppress(OSError):  # a file system without attributes, or without room for them
                os.setxattr(path, name, value)
    if member.kind == "file":
        os.utime(path, (info.mtime, info.mtime))
