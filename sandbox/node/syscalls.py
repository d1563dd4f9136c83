"""The Linux calls that Python 3.11 has no name for, through ctypes. Errors are OSError."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_MOVE = 8192
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MNT_DETACH = 2

MOUNT_ATTR_RDONLY = 1
MOUNT_ATTR_NOSUID = 2
MOUNT_ATTR_NODEV = 4
AT_RECURSIVE = 0x8000

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_NAME = 15
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
PR_CAP_AMBIENT_CLEAR_ALL = 4
PR_SET_SECCOMP = 22

CAP_CHOWN = 0
CAP_DAC_OVERRIDE = 1
CAP_FOWNER = 3
CAP_FSETID = 4
CAP_KILL = 5
CAP_SETGID = 6
CAP_SETUID = 7
CAP_SETPCAP = 8
CAP_NET_ADMIN = 12
CAP_SYS_CHROOT = 18
CAP_SYS_ADMIN = 21
CAP_SETFCAP = 31
CAP_LAST = 40

_X86 = os.uname().machine == "x86_64"
NR_CLONE = 56 if _X86 else 220
NR_CAPSET = 126 if _X86 else 91
NR_PIVOT_ROOT = 155 if _X86 else 41
NR_MOUNT_SETATTR = 442

# PyDLL keeps the interpreter lock: a clone between release and reacquisition would lose its owner.
_libc: Any = ctypes.PyDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else os.fsencode(text)


def mount(
    source: str | None, target: str, kind: str | None = None, flags: int = 0, data: str | None = None
) -> None:
    """mount(2)."""
    result = _libc.mount(_bytes(source), _bytes(target), _bytes(kind), ctypes.c_ulong(flags), _bytes(data))
    _check(result, f"mount {kind or source} on {target}")


def umount(target: str, flags: int = 0) -> None:
    """umount2(2)."""
    _check(_libc.umount2(os.fsencode(target), flags), f"umount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    """pivot_root(2)."""
    result = _libc.syscall(NR_PIVOT_ROOT, os.fsencode(new_root), os.fsencode(put_old))
    _check(result, "pivot_root")


def restrict_mount(target: str, attributes: int) -> None:
    """mount_setattr(2), recursively (Linux 5.12); before that the top mount alone is remounted."""
    attr = struct.pack("QQQQ", attributes, 0, 0, 0)
    result = _libc.syscall(
        NR_MOUNT_SETATTR, -100, os.fsencode(target), AT_RECURSIVE, attr, ctypes.c_size_t(len(attr))
    )
    if result < 0:
        flags = MS_REMOUNT | MS_BIND
        for attribute, flag in (
            (MOUNT_ATTR_RDONLY, MS_RDONLY),
            (MOUNT_ATTR_NOSUID, MS_NOSUID),
            (MOUNT_ATTR_NODEV, MS_NODEV),
        ):
            if attributes & attribute:
                flags |= flag
        mount(None, target, None, flags)


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """setns(2)."""
    _check(_libc.setns(fd, kind), "setns")


def clone(flags: int) -> int:
    """fork(2) into new namespaces: 0 in the child, the child's pid in the parent."""
    api: Any = ctypes.pythonapi
    api.PyOS_BeforeFork()
    pid = _libc.syscall(NR_CLONE, ctypes.c_ulong(flags | signal.SIGCHLD), 0, 0, 0, 0)
    number = ctypes.get_errno()
    if pid == 0:
        api.PyOS_AfterFork_Child()
        return 0
    api.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, f"clone: {os.strerror(number)}")
    return pid


def prctl(option: int, *arguments: int) -> int:
    """prctl(2)."""
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)][:4]
    return _check(_libc.prctl(option, *padded), f"prctl {option}")


def bound_capabilities(keep: int, *, of: int = (1 << CAP_LAST + 1) - 1) -> None:
    """Drop from the bounding set every capability of the bit mask `of` that is not in `keep`."""
    for cap in range(CAP_LAST + 1):
        if of >> cap & 1 and not keep >> cap & 1:
            try:
                prctl(PR_CAPBSET_DROP, cap)
            except OSError:
                if cap <= CAP_SYS_ADMIN:  # newer ones may be unknown to this kernel
                    raise


def set_capabilities(mask: int) -> None:
    """capset(2): effective, permitted and inheritable are exactly `mask`."""
    header = struct.pack("Ii", 0x20080522, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = struct.pack("IIIIII", low, low, low, high, high, high)
    _check(_libc.syscall(NR_CAPSET, header, data), "capset")


def seccomp(program: bytes) -> None:
    """Install a BPF filter (no_new_privs must be set)."""
    buffer = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    holder = ctypes.create_string_buffer(fprog, len(fprog))
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(holder))


def set_title(title: str) -> None:
    """Overwrite this process's command line, which would show host paths inside the sandbox."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, proc(5) fields 48 and 49
    if 0 < start < end:
        text = os.fsencode(title)[: end - start - 1]
        ctypes.memmove(start, text + b"\0" * (end - start - len(text)), end - start)
    prctl(PR_SET_NAME, ctypes.cast(ctypes.c_char_p(os.fsencode(title)[:15]), ctypes.c_void_p).value or 0)


def punch_hole(fd: int, start: int, size: int) -> None:
    """fallocate(2): give back the blocks of a part of a file, whose length stays."""
    mode = 0x01 | 0x02  # KEEP_SIZE, PUNCH_HOLE
    _check(_libc.fallocate(fd, mode, ctypes.c_long(start), ctypes.c_long(size)), "fallocate")
