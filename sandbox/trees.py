"""Folder trees as deterministic tars: the same tree gives the same bytes on every machine.

A tar here has sorted names, one fixed time, owners root or agent and normalised modes. `sandbox.oci.layers`
unpacks.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

AGENT = 1000
"""Uid and gid of the agent inside sandboxes."""
FIXED_TIME = 946_684_800
"""2000-01-01 in seconds: the time of every entry (zip files cannot hold times before 1980)."""


def walk(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """(relative path, lstat) of all that lies beneath `root`, sorted; raises OSError if unreadable."""
    found: list[tuple[str, os.stat_result]] = []
    stack = [""]
    while stack:
        folder = stack.pop()
        with os.scandir(root / folder) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                info = entry.stat(follow_symlinks=False)
                found.append((name, info))
                if stat.S_ISDIR(info.st_mode):
                    stack.append(name)
    yield from sorted(found)


def tree_digest(root: Path) -> str:
    """`sha256:...` over sorted (path, executable bit, content or link target), not times and owners."""
    total = hashlib.sha256()
    for name, info in walk(root):
        if stat.S_ISLNK(info.st_mode):
            kind, content = "l", hashlib.sha256(os.fsencode(os.readlink(root / name))).hexdigest()
        elif stat.S_ISREG(info.st_mode):
            kind, content = ("x" if info.st_mode & 0o100 else "f"), _file_digest(root / name)
        elif stat.S_ISDIR(info.st_mode):
            kind, content = "d", ""
        else:
            continue
        total.update(f"{kind} {content} ".encode() + os.fsencode(name) + b"\0")
    return f"sha256:{total.hexdigest()}"


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pack(root: Path, out: IO[bytes], *, at: str = "/", uid: int = AGENT) -> None:
    """Write the tree beneath `root` as a tar whose names start at `at`, owned by `uid` below `at`.

    Devices, fifos and sockets are left out.
    """
    prefix = at.strip("/")
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        parts = prefix.split("/") if prefix else []
        for depth in range(1, len(parts) + 1):
            member = tarfile.TarInfo("/".join(parts[:depth]))
            member.type, member.mode, member.mtime = tarfile.DIRTYPE, 0o755, FIXED_TIME
            member.uid = member.gid = uid if depth == len(parts) else 0
            tar.addfile(member)
        for name, info in walk(root):
            _add(tar, root / name, f"{prefix}/{name}" if prefix else name, info, uid)


def _add(tar: tarfile.TarFile, path: Path, name: str, info: os.stat_result, uid: int) -> None:
    member = tarfile.TarInfo(name)
    member.mtime = FIXED_TIME
    member.uid = member.gid = uid
    if stat.S_ISDIR(info.st_mode):
        member.type, member.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(member)
    elif stat.S_ISLNK(info.st_mode):
        member.type, member.mode, member.linkname = tarfile.SYMTYPE, 0o777, os.readlink(path)
        tar.addfile(member)
    elif stat.S_ISREG(info.st_mode):
        member.mode = 0o755 if info.st_mode & 0o111 else 0o644
        with path.open("rb") as file:
            member.size = os.fstat(file.fileno()).st_size
            tar.addfile(member, file)


def pack_bytes(root: Path) -> bytes:
    """The tar of `pack` in memory, for `Sandbox.put_tree`."""
    buffer = io.BytesIO()
    pack(root, buffer)
    return buffer.getvalue()


def pack_files(files: Mapping[str, bytes], *, executable: frozenset[str] = frozenset()) -> bytes:
    """A tar of the given relative paths and contents, for `Sandbox.put_tree`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(files[name]), FIXED_TIME
            member.mode = 0o755 if name in executable else 0o644
            member.uid = member.gid = AGENT
            tar.addfile(member, io.BytesIO(files[name]))
    return buffer.getvalue()
