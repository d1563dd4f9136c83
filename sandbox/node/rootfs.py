"""The file system of one sandbox, built by its init inside the new mount namespace.

One size-limited tmpfs holds everything that the sandbox writes (overlay upper, /tmp, /dev/shm), so one
number limits its disk. Host folders are read-only binds; nothing else of the host is reachable.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from sandbox.node import syscalls as sc

MOUNT_POINTS = ("/dev", "/proc", "/run", "/tmp")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# Files through which root inside could reach the whole kernel; agents could not open most of them anyway.
MASKED_FILES = ("kcore", "keys", "key-users", "kmsg", "kallsyms", "kpagecount", "kpageflags", "kpagecgroup",
                "sched_debug", "sysrq-trigger", "timer_list", "latency_stats", "config.gz", "slabinfo",
                "vmallocinfo", "pagetypeinfo", "mtrr", "interrupts", "swaps", "modules", "diskstats",
                "partitions", "cmdline", "cgroups")  # fmt: skip
MASKED_FOLDERS = ("acpi", "scsi", "asound", "driver", "dynamic_debug", "pressure")
READ_ONLY = ("sys", "bus", "fs", "irq", "tty")


def build(spec: dict[str, Any]) -> int:
    """Make and enter the root of `spec`; returns a descriptor of the overlay's upper folder."""
    scratch: str = spec["scratch"]
    sc.mount(None, "/", None, sc.MS_REC | sc.MS_PRIVATE)
    options = f"size={spec['disk_bytes']},nr_inodes={spec['inodes']},mode=755"
    sc.mount("tmpfs", scratch, "tmpfs", sc.MS_NOSUID | sc.MS_NODEV, options)
    for name, mode in (("upper", 0o755), ("work", 0o755), ("tmp", 0o1777), ("shm", 0o1777), ("root", 0o755)):
        os.mkdir(f"{scratch}/{name}")
        os.chmod(f"{scratch}/{name}", mode)
    _overlay(spec, scratch)
    root = f"{scratch}/root"
    _check_mount_points(root, [target for _, target in (*spec["binds"], *spec["etc_binds"])])
    for source, target in spec["binds"]:
        _bind_read_only(source, root + target)
    _own_tmpfs(scratch, root)
    _devices(root)
    _proc(root, nested=spec["nested"])
    for source, name in spec["run_binds"]:
        target = f"{root}/run/{name}"
        if os.path.isdir(source):
            os.makedirs(target)
        else:
            _touch(target)
        _bind_read_only(source, target)
    for source, target in spec["etc_binds"]:
        _bind_read_only(source, root + target)
    if spec.get("show_groups"):
        _groups(root, spec["groups"])
    upper = os.open(f"{scratch}/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _enter(root)
    os.umask(0o022)
    return upper


def _overlay(spec: dict[str, Any], scratch: str) -> None:
    """Layers, topmost first, over the base skeleton. Relative names keep the option string short."""
    os.chdir(spec["layers_dir"])
    lower = ":".join([*reversed(spec["layers"]), spec["base"]])
    upper = _escape(scratch)
    options = f"lowerdir={lower},upperdir={upper}/upper,workdir={upper}/work"
    if len(options) > 3800:
        raise OSError(errno.E2BIG, f"image has {len(spec['layers'])} layers; flatten it below 50")
    for extra in (",userxattr", ""):
        try:
            sc.mount("overlay", f"{scratch}/root", "overlay", sc.MS_NOSUID | sc.MS_NODEV, options + extra)
            return
        except OSError as error:
            if error.errno != errno.EINVAL or not extra:
                raise


def _escape(path: str) -> str:
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


def _check_mount_points(root: str, targets: list[str]) -> None:
    """An image may not lead what is mounted to another place: links would be followed on the host's side."""
    for target in (*MOUNT_POINTS, *targets):
        path = root
        for part in target.strip("/").split("/"):
            path += f"/{part}"
            if os.path.islink(path):
                raise OSError(errno.ELOOP, f"the image's {target} leads through a symbolic link")


def _bind_read_only(source: str, target: str) -> None:
    sc.mount(source, target, None, sc.MS_BIND | sc.MS_REC)
    sc.restrict_mount(target, sc.MOUNT_ATTR_RDONLY | sc.MOUNT_ATTR_NOSUID | sc.MOUNT_ATTR_NODEV)


def _touch(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def _own_tmpfs(scratch: str, root: str) -> None:
    """/tmp and /dev/shm share the writable budget; /run is a small one of its own."""
    sc.mount(f"{scratch}/tmp", f"{root}/tmp", None, sc.MS_BIND)
    sc.mount("tmpfs", f"{root}/dev", "tmpfs", sc.MS_NOSUID | sc.MS_NOEXEC, "size=64k,mode=755")
    sc.mount("tmpfs", f"{root}/run", "tmpfs", sc.MS_NOSUID | sc.MS_NODEV, "size=256k,mode=755")


def _devices(root: str) -> None:
    dev = f"{root}/dev"
    for name in DEVICES:
        _touch(f"{dev}/{name}")
        sc.mount(f"/dev/{name}", f"{dev}/{name}", None, sc.MS_BIND)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1"),
                         ("stderr", "/proc/self/fd/2"), ("ptmx", "pts/ptmx")):  # fmt: skip
        os.symlink(target, f"{dev}/{name}")
    os.mkdir(f"{dev}/pts")
    os.mkdir(f"{dev}/shm")
    sc.mount(
        "devpts", f"{dev}/pts", "devpts", sc.MS_NOSUID | sc.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620"
    )
    sc.mount(f"{os.path.dirname(root)}/shm", f"{dev}/shm", None, sc.MS_BIND)
    sc.mount(None, dev, None, sc.MS_REMOUNT | sc.MS_BIND | sc.MS_RDONLY | sc.MS_NOSUID | sc.MS_NOEXEC)


def _proc(root: str, *, nested: bool) -> None:
    """A fresh /proc, masked.

    Where only a masked one exists, jails may mount none of their own; a whole one that is read-only lets them
    mount such ones. It lies beneath the masked one, where no path leads.
    """
    proc = f"{root}/proc"
    flags = sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC
    if nested:
        sc.mount("tmpfs", proc, "tmpfs", flags, "size=4k,mode=700")
        os.mkdir(f"{proc}/whole")
        sc.mount("proc", f"{proc}/whole", "proc", flags | sc.MS_RDONLY)
    sc.mount("proc", proc, "proc", flags)
    for name in MASKED_FILES:
        if os.path.exists(f"{proc}/{name}"):
            sc.mount(f"{root}/dev/null", f"{proc}/{name}", None, sc.MS_BIND)
    for name in MASKED_FOLDERS:
        if os.path.isdir(f"{proc}/{name}"):
            sc.mount("tmpfs", f"{proc}/{name}", "tmpfs", sc.MS_RDONLY, "size=0,mode=555")
    for name in READ_ONLY:
        if os.path.isdir(f"{proc}/{name}"):
            sc.mount(f"{proc}/{name}", f"{proc}/{name}", None, sc.MS_BIND | sc.MS_REC)
            sc.restrict_mount(f"{proc}/{name}", sc.MOUNT_ATTR_RDONLY)


def _groups(root: str, groups: dict[str, str | None]) -> None:
    """The sandbox's own control groups, read-only, where container runtimes show them."""
    sc.mount("tmpfs", f"{root}/sys", "tmpfs", sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC, "size=64k,mode=755")
    together = groups["memory"] == groups["pids"]
    for name, folder in groups.items():
        if folder is not None:
            target = f"{root}/sys/fs/cgroup" if together else f"{root}/sys/fs/cgroup/{name}"
            os.makedirs(target, exist_ok=True)
            _bind_read_only(folder, target)
    sc.mount(
        None, f"{root}/sys", None, sc.MS_REMOUNT | sc.MS_BIND | sc.MS_RDONLY | sc.MS_NOSUID | sc.MS_NOEXEC
    )


def _enter(root: str) -> None:
    """Make `root` the root. Inside a chroot pivot_root is refused; then the mount is moved over `/`."""
    os.chdir(root)
    try:
        sc.pivot_root(".", ".")
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EPERM):
            raise
        sc.mount(root, "/", None, sc.MS_MOVE)
        os.chroot(".")
    else:
        sc.umount(".", sc.MNT_DETACH)
    os.chdir("/")
