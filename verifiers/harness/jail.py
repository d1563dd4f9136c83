"""A jail: namespaces, a private writable workspace, and no rights. Linux, through ctypes, no dependency.

`enter` runs in a process that is the first of a new pid namespace, as root of the sandbox; afterwards the
process sees a read-only system, an own writable copy of the workspace, own temporary folders and an own
read-only /proc, and nothing of the harness. `drop` then gives up every right for good.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import shutil
import socket
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

libc = ctypes.CDLL(None, use_errno=True)
# PyDLL keeps the interpreter lock: a clone between release and reacquisition would lose its owner.
locked_libc = ctypes.PyDLL(None, use_errno=True)

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 1 << 17, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30
AGENT = 1000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
MNT_DETACH = 2
SYS_CLONE = 56 if os.uname().machine == "x86_64" else 220
SYS_MOUNT_SETATTR = 442
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = -100, 0x8000, 1
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 4, 24, 38, 47
SIGKILL, SIGCHLD = 9, 17

FOLDER = "/run/verifier"
"""The harness's own place; jails see an empty read-only folder there."""
BASE = FOLDER + "/base"
"""The clean workspace, never written after the start."""
SCRATCH = FOLDER + "/scratch"


@dataclass(frozen=True)
class Limits:
    """Of one jail."""

    memory_mb: int
    processes: int
    disk_mb: int
    cpu_s: int


def check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    check(libc.unshare(flags), "unshare")


def fork_into(flags: int) -> int:
    """fork(2) into new namespaces: 0 in the child, the child's pid in the parent.

    (`unshare` would hold for later children too, and the way back leads into a namespace that is not ours.)
    """
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(locked_libc.syscall(SYS_CLONE, ctypes.c_ulong(flags | SIGCHLD), 0, 0, 0, 0))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    number = ctypes.get_errno()
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, f"clone: {os.strerror(number)}")
    return pid


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    done = libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode() or None
    )
    check(done, f"mount {kind} at {target}")


def prctl(option: int, *arguments: int) -> int:
    padded = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    return int(libc.prctl(option, *padded))


def tmpfs(target: str, size_mb: int, mode: str = "1777") -> None:
    mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size_mb}m,nr_inodes=65536,mode={mode}")


def read_only() -> None:
    """Every present mount becomes read-only (devices stay writable, as devices)."""
    attributes = struct.pack("<4Q", MOUNT_ATTR_RDONLY, 0, 0, 0)
    done = libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, len(attributes))
    check(done, "mount_setattr (Linux 5.12 or newer is needed)")


def loopback_up() -> bool:
    """127.0.0.1 works inside; False where the sandbox lacks the right."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            fcntl.ioctl(probe, 0x8914, struct.pack("16sh14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
        except PermissionError:
            return False
    return True


def overlay(workdir: str, uid: int, gid: int) -> None:
    """A private writable view of BASE at `workdir`, its changes in SCRATCH; a copy where overlays fail."""
    for name in ("upper", "work"):
        os.mkdir(f"{SCRATCH}/{name}", 0o755)
        os.chown(f"{SCRATCH}/{name}", uid, gid)
    data = f"lowerdir={BASE},upperdir={SCRATCH}/upper,workdir={SCRATCH}/work"
    for extra in ("", ",userxattr"):
        try:
            mount("overlay", workdir, "overlay", MS_NOSUID | MS_NODEV, data + extra)
            return
        except OSError:
            continue
    copy_tree(BASE, f"{SCRATCH}/upper", uid, gid)
    mount(f"{SCRATCH}/upper", workdir, "none", MS_BIND)


def copy_tree(source: str, target: str, uid: int, gid: int) -> None:
    """Copy files, folders and links, owned by the agent; anything else is left out."""
    with os.scandir(source) as entries:
        for entry in entries:
            goal = f"{target}/{entry.name}"
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), goal)
            elif entry.is_dir():
                os.mkdir(goal, 0o755)
                copy_tree(entry.path, goal, uid, gid)
            elif entry.is_file():
                shutil.copyfile(entry.path, goal)
                os.chmod(goal, 0o755 if entry.stat().st_mode & stat.S_IXUSR else 0o644)
            else:
                continue
            os.chown(goal, uid, gid, follow_symlinks=False)


def protect(root: str, paths: Iterable[str]) -> None:
    """Make files below `root` unchangeable for the agent, who may still add others beside them.

    The files and every folder above them belong to root, and those folders are sticky: there, a user can
    neither write, rename nor remove what belongs to somebody else.
    """
    folders: set[str] = set()
    for path in paths:
        full = f"{root}/{path}"
        try:
            owner = os.lstat(full).st_uid
        except (FileNotFoundError, NotADirectoryError):
            continue
        if owner != 0:  # a change would copy the file up into the overlay
            os.chown(full, 0, 0, follow_symlinks=False)
        while full != root:
            full = os.path.dirname(full)
            folders.add(full)
    for folder in folders:
        if os.lstat(folder).st_uid != 0:
            os.chown(folder, 0, 0)
            os.chmod(folder, 0o1777)


def enter(
    workdir: str,
    home: str,
    uid: int,
    gid: int,
    disk_mb: int,
    trusted: Mapping[str, bytes | None],
    protected: Iterable[str],
) -> None:
    """New mount, ipc, net and uts namespaces around the calling process; see the module's docstring.

    `trusted` files are laid over the workspace; those of `protected` that are not yet, become unchangeable.
    """
    prctl(PR_SET_PDEATHSIG, SIGKILL)
    unshare(NEWNS | NEWIPC | NEWNET | NEWUTS)
    mount("none", "/", "none", MS_REC | MS_PRIVATE)
    read_only()
    tmpfs(SCRATCH, disk_mb, "755")
    overlay(workdir, uid, gid)
    lay(workdir, trusted, frozenset(), (uid, gid))
    protect(workdir, protected)
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):
        if os.path.isdir(folder):
            tmpfs(folder, disk_mb)
    if os.path.isdir(home):
        tmpfs(home, disk_mb, "755")
        os.chown(home, uid, gid)
    mount("proc", "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    check(libc.umount2(SCRATCH.encode(), MNT_DETACH), "umount")
    mount("tmpfs", FOLDER, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "size=4k,mode=555")
    socket.sethostname("jail")
    loopback_up()


def one_id() -> bool:
    """Whether this user namespace knows a single user, so that root and the agent are the same to files."""
    with open("/proc/self/uid_map") as file:
        rows = file.read().split("\n")
    return len(rows) <= 2 and rows[0].split()[2] == "1"


def become_other(uid: int, proc: int) -> None:
    """Where only one user exists: be `uid` in a user namespace of one's own, beneath the jail's.

    `proc`: descriptor of the /proc outside of the jail, whose own is read-only.
    """
    unshare(NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} 0 1"), ("gid_map", f"{uid} 0 1")):
        fd = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(fd, text.encode())
        os.close(fd)


def drop(uid: int, gid: int) -> None:
    """Give up all capabilities; with a `uid` other than 0 also become that user. There is no way back."""
    prctl(PR_CAP_AMBIENT, 4)  # PR_CAP_AMBIENT_CLEAR_ALL
    for capability in range(64):
        if prctl(PR_CAPBSET_DROP, capability) < 0:
            break
    if not uid:
        prctl(PR_SET_DUMPABLE, 0)  # nobody reads this process's memory
    elif os.getuid() != uid:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        prctl(PR_SET_DUMPABLE, 1)  # an ordinary process may read its own /proc/self
    header, none = struct.pack("<Ii", 0x20080522, 0), bytes(24)
    check(libc.capset(header, none), "capset")
    check(prctl(PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")


def limit(limits: Limits) -> None:
    """Per-process limits of the test process and its children."""
    for kind, value in (
        (resource.RLIMIT_AS, limits.memory_mb << 20),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_NPROC, limits.processes),
        (resource.RLIMIT_FSIZE, limits.disk_mb << 20),
        (resource.RLIMIT_NOFILE, 1024),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))


def lay(
    workdir: str,
    files: Mapping[str, bytes | None],
    executable: frozenset[str],
    owner: tuple[int, int] | None = None,
) -> None:
    """Write or delete files below `workdir`; a path that exists keeps its execute bit.

    Run as the agent, or as root with `owner`, who then gets the files and new folders.
    """
    for name, content in files.items():
        path = f"{workdir}/{name}"
        try:
            mode = os.lstat(path).st_mode
            if stat.S_ISDIR(mode):
                shutil.rmtree(path)
                mode = 0
            else:
                os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            mode = 0
        if content is None:
            continue
        make_folders(os.path.dirname(path), owner)
        bits = 0o755 if name in executable or mode & stat.S_IXUSR else 0o644
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, bits)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            if owner:
                os.fchown(fd, *owner)


def make_folders(path: str, owner: tuple[int, int] | None) -> None:
    """A folder and those above it, as far as they are missing."""
    if not os.path.isdir(path):
        make_folders(os.path.dirname(path), owner)
        os.mkdir(path)
        if owner:
            os.chown(path, *owner)
