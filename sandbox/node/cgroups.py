"""Memory and process limits, and idle groups, through control groups of version 1 or 2, as far as writable.

Every value is read back after it was written: a limit that did not take is not a limit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from typing import Any

ROOT = "posttrain"


def _read(path: str) -> str:
    with open(path) as file:
        return file.read().strip()


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


class Group:
    """One sandbox's folders, one per hierarchy. (No dataclass: that module alone costs a container's init a
    fifth of its start.)"""

    def __init__(
        self, folders: list[str] | None = None, memory: str | None = None, pids: str | None = None
    ) -> None:
        self.folders = folders or []
        self.memory = memory
        self.pids = pids

    def add(self, pid: int) -> None:
        for folder in self.folders:
            _write(f"{folder}/cgroup.procs", str(pid))

    def watch(self) -> dict[str, tuple[int, str]]:
        """Open the counters of hit limits: name -> (descriptor, key of the line that counts)."""
        found: dict[str, tuple[int, str]] = {}
        for name, folder, files, key in (
            ("oom", self.memory, ("memory.events", "memory.oom_control"), "oom_kill"),
            ("pids", self.pids, ("pids.events",), "max"),
        ):
            for file in files:
                if folder and os.path.exists(f"{folder}/{file}"):
                    found[name] = (os.open(f"{folder}/{file}", os.O_RDONLY | os.O_CLOEXEC), key)
                    break
        return found

    def killed_for_memory(self) -> bool:
        """Whether the memory limit ever killed something here."""
        counters = self.watch()
        killed = "oom" in counters and count(*counters["oom"]) > 0
        for fd, _ in counters.values():
            os.close(fd)
        return killed

    def remove(self) -> None:
        """Remove the folders; what was in them is already dead, but its exit may lag a little."""
        for folder in self.folders:
            for attempt in range(200):
                try:
                    os.rmdir(folder)
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.001 * min(attempt + 1, 10))
                else:
                    break


class Groups:
    """What this host offers: a parent folder per controller, or the reason why there is none."""

    def __init__(
        self,
        version: int,
        memory: str | None,
        pids: str | None,
        reasons: dict[str, str],
        cpu: str | None = None,
    ) -> None:
        self.version = version
        self.cpu = cpu
        """Where sandboxes of the class batch are idle."""
        self.memory = memory
        self.pids = pids
        self.reasons = reasons

    @classmethod
    def probe(cls) -> Groups:
        own = _own_paths()
        reasons: dict[str, str] = {}
        parents: dict[str, str | None] = {}
        version = 0
        for controller in ("memory", "pids"):
            parents[controller] = None
            mount = _v1_mount(controller)
            try:
                if mount is not None:
                    version = version or 1
                    parents[controller] = _prepare_v1(mount, own.get(controller, "/"))
                else:
                    parents[controller] = _prepare_v2(own.get("", "/"), controller)
                    version = 2
                if not os.access(parents[controller] or "", os.W_OK):
                    raise PermissionError(errno.EACCES, "belongs to another user", parents[controller])
            except OSError as error:
                parents[controller] = None
                reasons[controller] = f"{error.strerror or error} ({error.filename or 'cgroup'})"
        cpu = None
        try:
            cpu = _prepare_cpu(own.get("cpu", "/"), parents["memory"])
        except OSError as error:
            reasons["cpu"] = f"{error.strerror or error} ({error.filename or 'cgroup'})"
        return cls(version, parents["memory"], parents["pids"], reasons, cpu)

    def describe(self) -> dict[str, Any]:
        return {
            "version": self.version, "memory": self.memory, "pids": self.pids, "cpu": self.cpu,
            "reasons": self.reasons,
        }  # fmt: skip

    def memory_ceiling(self) -> int | None:
        """The memory limit in bytes of the nearest group around all sandboxes that has one."""
        folder, lowest = self.memory, None
        while folder and os.path.exists(f"{folder}/cgroup.procs"):
            for name in ("memory.max", "memory.limit_in_bytes"):
                with contextlib.suppress(OSError):
                    text = _read(f"{folder}/{name}")
                    if text.isdigit():
                        lowest = min(lowest or int(text), int(text))
            folder = folder.rpartition("/")[0]
        return lowest

    def make(self, name: str, memory_bytes: int, pids: int, *, batch: bool = False) -> Group:
        """Folders for one sandbox with verified limits."""
        group = Group()
        try:
            if self.memory:
                group.memory = self._folder(group, self.memory, name)
                self._limit_memory(group.memory, memory_bytes)
            if self.pids:
                group.pids = self._folder(group, self.pids, name)
                _limit(group.pids, "pids.max", pids)
            if batch and self.cpu:
                _idle(self._folder(group, self.cpu, name))
        except OSError:
            group.remove()
            raise
        return group

    def _folder(self, group: Group, parent: str, name: str) -> str:
        folder = f"{parent}/{name}"
        if folder not in group.folders:
            os.mkdir(folder)
            group.folders.append(folder)
        return folder

    def _limit_memory(self, folder: str, size: int) -> None:
        if self.version == 1:
            _limit(folder, "memory.limit_in_bytes", size)
            with contextlib.suppress(OSError):
                _write(f"{folder}/memory.swappiness", "0")
            if os.path.exists(f"{folder}/memory.memsw.limit_in_bytes"):
                _limit(folder, "memory.memsw.limit_in_bytes", size)
        else:
            _limit(folder, "memory.max", size)
            if os.path.exists(f"{folder}/memory.swap.max"):
                _limit(folder, "memory.swap.max", 0)
            with contextlib.suppress(OSError):
                _write(f"{folder}/memory.oom.group", "0")


def sweep(folders: list[str]) -> None:
    """Kill what still lives in the given folders of dead sandboxes and remove them."""
    for folder in folders:
        try:
            pids = _read(f"{folder}/cgroup.procs").split()
        except OSError:
            continue
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        Group([folder]).remove()


def count(fd: int, key: str) -> int:
    """The number behind `key` in an open counter file."""
    for line in os.pread(fd, 4096, 0).decode().splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _limit(folder: str, name: str, value: int) -> None:
    path = f"{folder}/{name}"
    _write(path, str(value))
    effective = _read(path)
    if not effective.isdigit() or int(effective) > value:
        raise OSError(0, f"limit did not take: wrote {value}, reads {effective}", path)


def _idle(folder: str) -> None:
    """Whatever is in the group runs when its siblings do not want to."""
    for name, value in (("cpu.idle", 1), ("cpu.weight", 1), ("cpu.shares", 2)):
        if os.path.exists(f"{folder}/{name}"):
            _limit(folder, name, value)
            return
    raise FileNotFoundError(errno.ENOENT, "has no weight", folder)


def _prepare_cpu(own: str, memory: str | None) -> str:
    """A parent for idle groups. In version 1 it holds nothing else, and is idle itself; in version 2 a
    process has one group for everything, so it is that of the memory limits."""
    mount = _v1_mount("cpu")
    if mount is not None:
        parent = _prepare_v1(mount, own)
        _idle(parent)
        return parent
    if memory is None or not os.path.exists(f"{memory}/cgroup.controllers"):
        raise FileNotFoundError(errno.ENOENT, "no control groups of version 2 for sandboxes", "cpu")
    if "cpu" not in _read(f"{memory}/cgroup.subtree_control").split():
        _write(f"{memory}/cgroup.subtree_control", "+cpu")
    return memory


def _own_paths() -> dict[str, str]:
    """This process's group in every hierarchy ("" is version 2)."""
    found: dict[str, str] = {}
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            found[controller] = path
    return found


def _v1_mount(controller: str) -> str | None:
    for line in _read("/proc/self/mounts").splitlines():
        _, target, kind, options, *_ = line.split()
        if kind == "cgroup" and controller in options.split(","):
            return target
    return None


def _v2_mount() -> str:
    for line in _read("/proc/self/mounts").splitlines():
        _, target, kind, *_ = line.split()
        if kind == "cgroup2":
            return target
    raise FileNotFoundError(2, "no control groups are mounted", "/sys/fs/cgroup")


def _prepare_v1(mount: str, own: str) -> str:
    """A parent below our own group, so that an outer limit holds for sandboxes too."""
    base = mount + own.rstrip("/")
    if not os.path.isdir(base):
        base = mount
    parent = f"{base}/{ROOT}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(parent)
    if os.path.exists(f"{parent}/memory.use_hierarchy"):
        with contextlib.suppress(OSError):
            _write(f"{parent}/memory.use_hierarchy", "1")
    return parent


def _prepare_v2(own: str, controller: str) -> str:
    """The nearest ancestor that hands the controller down and lets us make a folder."""
    mount = _v2_mount()
    path = own.rstrip("/")
    failure = OSError(0, f"controller {controller} is not delegated to this user", mount + own)
    while True:
        base = mount + path
        try:
            if controller in _read(f"{base}/cgroup.subtree_control").split():
                parent = f"{base}/{ROOT}"
                with contextlib.suppress(FileExistsError):
                    os.mkdir(parent)
                if controller not in _read(f"{parent}/cgroup.subtree_control").split():
                    _write(f"{parent}/cgroup.subtree_control", f"+{controller}")
                return parent
            if not path:
                _hand_down(base, controller)
                continue
        except OSError as error:
            failure = error
        if not path:
            raise failure
        path = path.rpartition("/")[0]


def _hand_down(base: str, controller: str) -> None:
    """Enable a controller for the children of the topmost group that we see.

    In a container that group has processes in it, and then may have no controllers for children; they move
    into a child of their own first, as init systems do.
    """
    try:
        _write(f"{base}/cgroup.subtree_control", f"+{controller}")
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        rest = f"{base}/{ROOT}.rest"
        with contextlib.suppress(FileExistsError):
            os.mkdir(rest)
        for pid in _read(f"{base}/cgroup.procs").split():
            with contextlib.suppress(ProcessLookupError):
                _write(f"{rest}/cgroup.procs", pid)
        _write(f"{base}/cgroup.subtree_control", f"+{controller}")
