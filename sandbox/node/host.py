"""Makes the nodelet's surroundings fit where it runs as root in a bare chroot.

A chroot forbids user namespaces and pivot_root, and often shows neither /proc nor control groups. The
nodelet therefore takes a mount namespace of its own whose root is that folder, and mounts there what is
missing. Nothing of this is visible outside the nodelet, and it ends with it.
"""

from __future__ import annotations

import contextlib
import os

from sandbox.node import syscalls as sc

CGROUP_PLACE = "/sys/fs/cgroup"


def settle() -> None:
    """Called once at the nodelet's start; does nothing for ordinary users and ordinary roots."""
    if os.geteuid() != 0:
        return
    bare = not os.path.exists("/proc/self/ns")
    if not bare and not _chrooted() and os.path.isdir("/sys/fs/cgroup"):
        return
    try:
        sc.unshare(sc.CLONE_NEWNS)
        if bare:
            os.makedirs("/proc", exist_ok=True)
            sc.mount("proc", "/proc", "proc", sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC)
        if _chrooted():
            _take_root()
        if not os.path.isdir("/sys/fs/cgroup"):
            _mount_groups()
    except OSError:
        return  # what could not be had shows in the probes that follow


def _chrooted() -> bool:
    """Does a child in this root get EPERM for a user namespace although it is root?"""
    pid = os.fork()
    if pid == 0:
        try:
            sc.unshare(sc.CLONE_NEWUSER)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] != 0


def _take_root() -> None:
    """Make the current root folder the root of our mount namespace."""
    namespace = os.open("/proc/self/ns/mnt", os.O_RDONLY)
    root = os.open("/", os.O_PATH | os.O_DIRECTORY)
    sc.setns(namespace, sc.CLONE_NEWNS)  # resets our root to the namespace's
    os.close(namespace)
    sc.mount(None, "/", None, sc.MS_REC | sc.MS_PRIVATE)
    os.fchdir(root)
    path = os.getcwd()
    sc.mount(path, path, None, sc.MS_BIND | sc.MS_REC)
    os.chdir(path)  # now the bind, no longer the folder below it
    os.close(root)
    sc.pivot_root(".", ".")
    sc.umount(".", sc.MNT_DETACH)
    os.chdir("/")


def _mount_groups() -> None:
    """Mount the memory and pids controllers, of whichever version the host uses."""
    os.makedirs("/sys", exist_ok=True)
    sc.mount("tmpfs", "/sys", "tmpfs", sc.MS_NOSUID | sc.MS_NODEV, "size=64k,mode=755")
    with open("/proc/cgroups") as file:
        rows = [line.split() for line in file if not line.startswith("#")]
    hierarchies = {row[0]: row[1] for row in rows}
    for controller in ("memory", "pids"):
        if hierarchies.get(controller, "0") != "0":
            place = f"{CGROUP_PLACE}/{controller}"
            os.makedirs(place)
            with contextlib.suppress(OSError):
                sc.mount("cgroup", place, "cgroup", 0, controller)
    if not os.path.isdir(CGROUP_PLACE):
        os.makedirs(CGROUP_PLACE)
        sc.mount("cgroup2", CGROUP_PLACE, "cgroup2")
