"""A second pair of namespaces, in which what init has mounted can be neither undone nor made writable.

Root of a nested sandbox keeps CAP_SYS_ADMIN, and where the host's root made the sandbox it is the host's
uid 0, which may write sysctls without any capability. The kernel locks what a mount namespace inherits from
one of another user namespace: no mount of it goes away, and none that is read-only becomes writable
(mount_namespaces(7)). It also lets nobody there mount a /proc with fewer restrictions than one that is there
already, which `rootfs` has seen to.
"""

from __future__ import annotations

import errno
import os

from sandbox.node import syscalls as sc

MAPS = ("uid_map", "gid_map")


def enter() -> None:
    """Move the calling process, which has one thread and every right, into them; ids stay what they are."""
    maps = {name: identity(name) for name in MAPS}
    moved, tell = os.pipe()
    sc.prctl(sc.PR_SET_DUMPABLE, 1)  # or our files in /proc would belong to the host's root
    pid = os.fork()
    if pid == 0:
        _write_maps(os.getppid(), maps, moved, tell)
    os.close(moved)
    try:
        sc.unshare(sc.CLONE_NEWUSER | sc.CLONE_NEWNS)
        os.write(tell, b"m")
    finally:
        os.close(tell)
        _, status = os.waitpid(pid, 0)
        sc.prctl(sc.PR_SET_DUMPABLE, 0)
    if status:
        raise OSError(errno.EPERM, "the ids of a nested sandbox could not be mapped")


def identity(name: str) -> str:
    """The map that gives a child namespace every id which this one has."""
    with open(f"/proc/self/{name}") as file:
        rows = [line.split() for line in file]
    return "\n".join(f"{first} {first} {count}" for first, _, count in rows)


def _write_maps(parent: int, maps: dict[str, str], moved: int, tell: int) -> None:
    """Of a child that stays behind: only from there can more than one id be mapped. Never returns."""
    code = 1
    try:
        os.close(tell)
        if os.read(moved, 1):
            for name, text in maps.items():
                fd = os.open(f"/proc/{parent}/{name}", os.O_WRONLY | os.O_CLOEXEC)
                os.write(fd, text.encode())  # the kernel takes a map in one write
            code = 0
    finally:
        os._exit(code)
