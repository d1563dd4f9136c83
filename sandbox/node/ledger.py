"""What the living sandboxes of all nodelets of one image store were promised, and whether one more fits.

    STORE/node/PID.load     sandboxes and bytes of memory promised by that nodelet, locked while it lives

The check and the promise happen under one lock, so several clients never admit more than the limits together.
The load of a killed nodelet counts no more: nobody holds its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Generator
from typing import Any

_LOAD = struct.Struct("=QQ")


class Refused(Exception):
    """A sandbox does not fit; `limit` names what is full."""

    def __init__(self, message: str, limit: str) -> None:
        super().__init__(message)
        self.limit = limit


class Ledger:
    """This nodelet's promises, and those of the others."""

    def __init__(self, folder: str, ceiling: int | None, name: str = "") -> None:
        """`ceiling` is the memory limit in bytes of the group that all sandboxes are in, if it has one.
        `name` tells several ledgers of one process apart."""
        os.makedirs(folder, exist_ok=True)
        self._folder = folder
        self._name = f"{os.getpid()}{name}.load"
        self._lock = os.open(f"{folder}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._own = os.open(f"{folder}/{self._name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._own, fcntl.LOCK_EX)
        self._sandboxes = self._memory = 0
        self._write()
        total = memory_facts()["MemTotal"]
        self.total = min(total, ceiling) if ceiling else total
        """Bytes of memory that sandboxes may use together."""

    def admit(self, memory: int, limits: dict[str, Any]) -> None:
        """Promise one more sandbox of `memory` bytes. Raises Refused, and promises nothing, if it does not
        fit."""
        with self._locked():
            sandboxes, promised = self._others()
            sandboxes, promised = sandboxes + self._sandboxes, promised + self._memory
            available, floor = memory_facts()["MemAvailable"], limits["available"]
            if limits["sandboxes"] is not None and sandboxes >= limits["sandboxes"]:
                raise Refused(
                    f"{sandboxes} sandboxes live here already; the limit is {limits['sandboxes']}",
                    "sandboxes",
                )
            most = None if limits["overcommit"] is None else int(limits["overcommit"] * self.total)
            if most is not None and promised + memory > most:
                raise Refused(
                    f"sandboxes were promised {promised >> 20} MiB of memory; {memory >> 20} more exceed"
                    f" {most >> 20} (overcommit {limits['overcommit']:g})",
                    "memory",
                )
            if available < floor:
                text = f"only {available >> 20} MiB of memory are available; {floor >> 20} must stay"
                raise Refused(text, "available_memory")
            self._sandboxes += 1
            self._memory += memory
            self._write()

    def release(self, memory: int) -> None:
        """One of ours is gone."""
        self._sandboxes -= 1
        self._memory -= memory
        self._write()

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _write(self) -> None:
        os.pwrite(self._own, _LOAD.pack(self._sandboxes, self._memory), 0)

    def _others(self) -> tuple[int, int]:
        """(sandboxes, bytes promised) of the other living nodelets; what dead ones left is removed."""
        sandboxes = promised = 0
        for name in os.listdir(self._folder):
            if not name.endswith(".load") or name == self._name:
                continue
            path = f"{self._folder}/{name}"
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            except BlockingIOError:
                data = os.pread(fd, _LOAD.size, 0)
                if len(data) == _LOAD.size:
                    count, size = _LOAD.unpack(data)
                    sandboxes, promised = sandboxes + count, promised + size
            finally:
                os.close(fd)
        return sandboxes, promised

    def close(self) -> None:
        """Withdraw; nothing of ours lives any more."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._folder}/{self._name}")
        os.close(self._own)
        os.close(self._lock)


def memory_facts() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    found: dict[str, int] = {}
    with open("/proc/meminfo") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                found[name] = int(rest.split()[0]) << 10
    return found
