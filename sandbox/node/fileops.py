"""Reading and writing files for the client, done inside the sandbox.

The host never follows a path of the sandbox: bytes and tars travel through pipes, and a symlink that an
agent planted leads nowhere but into its own sandbox.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tarfile
from typing import Any, BinaryIO

from sandbox.node import privileges, wire


class FileError(Exception):
    """A refusal with a reason (kind "refused")."""


def run(
    spec: dict[str, Any], request: dict[str, Any], status: socket.socket, pipes: list[int], upper: int
) -> None:
    """Serve read, write, get_tree, put_tree or snapshot; the last pipe carries the bytes."""
    os.umask(0o022)
    agent = 0 if spec["single_id"] else privileges.AGENT
    operation: str = request["op"]
    reply: dict[str, Any]
    try:
        if operation == "read":
            reply = _read(request, pipes[0])
        elif operation == "write":
            reply = _write(request, pipes[0], agent)
        elif operation == "get_tree":
            reply = _get_tree(request, pipes[0])
        elif operation == "put_tree":
            reply = _put_tree(request, pipes[0], agent)
        elif operation == "snapshot":
            reply = _snapshot(spec, pipes[0], upper, agent)
        else:
            reply = {"error": f"unknown operation {operation}", "kind": "refused"}
    except FileError as error:
        reply = {"error": str(error), "kind": "refused"}
    except tarfile.TarError as error:
        reply = {"error": f"not a readable tar: {error}", "kind": "refused"}
    except OSError as error:
        reply = {"error": error.strerror or str(error), "errno": error.errno or 0, "kind": "os",
                 "path": os.fsdecode(error.filename or request.get("path", ""))}  # fmt: skip
    for fd in pipes:
        os.close(fd)
    with contextlib.suppress(OSError):
        wire.send(status, reply)


def _read(request: dict[str, Any], out: int) -> dict[str, Any]:
    fd = os.open(request["path"], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    info = os.fstat(fd)
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(21, "Is a directory", request["path"])
    if not stat.S_ISREG(info.st_mode):
        raise FileError(f"{request['path']} is not a regular file")
    limit: int = request["max_bytes"]
    total = 0
    while chunk := os.read(fd, 1 << 18):
        total += len(chunk)
        if total > limit:
            raise FileError(f"{request['path']} is larger than max_bytes={limit}")
        _write_all(out, chunk)
    return {"ok": True, "bytes": total}


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def make_parents(path: str, agent: int) -> None:
    """Make the missing folders above `path`, owned by the agent."""
    parent = os.path.dirname(path)
    if parent and not os.path.isdir(parent):
        make_parents(parent, agent)
        os.mkdir(parent, 0o755)
        os.chown(parent, agent, agent)


def _write(request: dict[str, Any], source: int, agent: int) -> dict[str, Any]:
    path: str = os.path.join("/", request["path"])
    make_parents(path, agent)
    if os.path.isdir(path):
        raise IsADirectoryError(21, "Is a directory", path)
    if os.path.lexists(path) and not os.path.isfile(path):
        os.unlink(path)  # a fifo or a dangling link would block or lead astray
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    total = 0
    while chunk := os.read(source, 1 << 18):
        _write_all(fd, chunk)
        total += len(chunk)
    os.fchown(fd, agent, agent)
    os.fchmod(fd, request["mode"])
    os.close(fd)
    return {"ok": True, "bytes": total}


def _get_tree(request: dict[str, Any], out: int) -> dict[str, Any]:
    """Tar of regular files, folders and symlinks below `path`, sorted by name."""
    top: str = request["path"]
    if not os.path.isdir(top):
        raise NotADirectoryError(20, "Not a directory", top)
    limit: int = request["max_bytes"]
    total = 0
    with os.fdopen(os.dup(out), "wb") as raw, tarfile.open(fileobj=raw, mode="w|") as tar:
        for path, info in _walk(top):
            name = os.path.relpath(path, top)
            total += info.st_size if stat.S_ISREG(info.st_mode) else 0
            if total > limit:
                raise FileError(f"{top} is larger than max_bytes={limit}")
            _add(tar, path, name, info)
    return {"ok": True}


def _walk(top: str) -> list[tuple[str, os.stat_result]]:
    found: list[tuple[str, os.stat_result]] = []
    stack = [top]
    while stack:
        folder = stack.pop()
        for entry in os.scandir(folder):
            info = entry.stat(follow_symlinks=False)
            found.append((entry.path, info))
            if stat.S_ISDIR(info.st_mode):
                stack.append(entry.path)
    return sorted(found)


def _add(tar: tarfile.TarFile, path: str, name: str, info: os.stat_result, *, owner: bool = False) -> None:
    """Add one entry; devices, fifos and sockets are left out."""
    member = tarfile.TarInfo(name)
    member.mode = stat.S_IMODE(info.st_mode)
    member.mtime = 0 if owner else int(info.st_mtime)
    member.uid = member.gid = info.st_uid if owner else 0
    if stat.S_ISDIR(info.st_mode):
        member.type = tarfile.DIRTYPE
        tar.addfile(member)
    elif stat.S_ISLNK(info.st_mode):
        member.type = tarfile.SYMTYPE
        member.linkname = os.readlink(path)
        tar.addfile(member)
    elif stat.S_ISREG(info.st_mode):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            member.size = os.fstat(fd).st_size
            tar.addfile(member, file)


def _put_tree(request: dict[str, Any], source: int, agent: int) -> dict[str, Any]:
    top: str = os.path.join("/", request["path"])
    make_parents(os.path.join(top, "x"), agent)
    base = os.path.realpath(top)
    count = 0
    with os.fdopen(os.dup(source), "rb") as raw, tarfile.open(fileobj=raw, mode="r|*") as tar:
        for member in tar:
            _extract(tar, member, base, agent)
            count += 1
        while raw.read(1 << 18):  # what follows the end mark, so that the writer never blocks
            pass
    return {"ok": True, "entries": count}


def _beneath(base: str, name: str) -> str:
    """The place of entry `name` below `base`, refusing to leave it through names or existing links."""
    if name.startswith("/") or ".." in name.split("/"):
        raise FileError(f"tar entry {name!r} would leave {base}")
    path = os.path.normpath(os.path.join(base, name))
    parent = os.path.realpath(os.path.dirname(path)) if path != base else base
    if parent != base and not parent.startswith(base.rstrip("/") + "/"):
        raise FileError(f"tar entry {name!r} would leave {base} through a symbolic link")
    return path if path == base else os.path.join(parent, os.path.basename(path))


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, base: str, agent: int) -> None:
    path = _beneath(base, member.name)
    if member.isdir():
        if os.path.islink(path) or not os.path.isdir(path):
            if os.path.lexists(path):
                os.unlink(path)
            make_parents(path, agent)
            os.mkdir(path, 0o755)
            os.chown(path, agent, agent)
        if path != base:
            os.chmod(path, member.mode & 0o777 | 0o700)
        return
    if not (member.isreg() or member.issym() or member.islnk()):
        raise FileError(f"tar entry {member.name!r} is a device or fifo")
    make_parents(path, agent)
    if os.path.lexists(path):
        if os.path.isdir(path) and not os.path.islink(path):
            raise IsADirectoryError(21, "Is a directory", path)
        os.unlink(path)
    if member.issym():
        os.symlink(member.linkname, path)
        os.chown(path, agent, agent, follow_symlinks=False)
    elif member.islnk():
        os.link(_beneath(base, member.linkname), path, follow_symlinks=False)
    else:
        reader: Any = tar.extractfile(member)
        _store(reader, path, member, agent)


def _store(reader: BinaryIO, path: str, member: tarfile.TarInfo, agent: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    while chunk := reader.read(1 << 18):
        _write_all(fd, chunk)
    os.fchown(fd, agent, agent)
    os.fchmod(fd, member.mode & 0o777)
    os.utime(fd, (member.mtime, member.mtime))
    os.close(fd)


def _snapshot(spec: dict[str, Any], out: int, upper: int, agent: int) -> dict[str, Any]:
    """Tar of the overlay's upper folder in OCI form (whiteouts as .wh. files)."""
    os.fchdir(upper)
    skip = {f".{target}" for _, target in (*spec["binds"], *spec["etc_binds"])}
    count = 0
    with os.fdopen(os.dup(out), "wb") as raw, tarfile.open(fileobj=raw, mode="w|") as tar:
        for path, info in _walk("."):
            if path in skip:
                continue
            name = path[2:]
            count += 1
            if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
                _marker(tar, os.path.join(os.path.dirname(name), f".wh.{os.path.basename(name)}"))
                continue
            _add(tar, path, name, info, owner=True)
            if stat.S_ISDIR(info.st_mode) and _opaque(path):
                _marker(tar, f"{name}/.wh..wh..opq")
    return {"ok": True, "entries": count}


def _marker(tar: tarfile.TarFile, name: str) -> None:
    tar.addfile(tarfile.TarInfo(name))


def _opaque(path: str) -> bool:
    for name in ("user.overlay.opaque", "trusted.overlay.opaque"):
        with contextlib.suppress(OSError):
            if os.getxattr(path, name) in (b"y", b"x"):
                return True
    return False
