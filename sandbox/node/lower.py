"""Layers that the kernel mounts as they are (EROFS over a tar), in the nodelet's own mount namespace.

Sandboxes inherit the mounts; they end with the nodelet and its last sandbox, whoever is killed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence

from sandbox.node import syscalls as sc


def possible() -> bool:
    """Whether this process may mount, and the kernel knows files as EROFS devices (Linux 6.12)."""
    release = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    if os.geteuid() != 0 or release < (6, 12):
        return False
    with contextlib.suppress(OSError), open("/proc/filesystems") as file:
        if "\terofs\n" in file.read():
            return _may_unshare()
    return False


def _may_unshare() -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            sc.unshare(sc.CLONE_NEWNS)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


class Lower:
    """What is mounted already."""

    def __init__(self) -> None:
        self._private = False
        self._mounted: set[str] = set()

    def mount(self, layers: Sequence[dict[str, str]]) -> None:
        """Mount what is not yet. OSError where the kernel or the rights for it are missing."""
        for layer in layers:
            if layer["target"] in self._mounted:
                continue
            if not self._private:
                sc.unshare(sc.CLONE_NEWNS)
                sc.mount(None, "/", None, sc.MS_REC | sc.MS_PRIVATE)
                self._private = True
            flags = sc.MS_RDONLY | sc.MS_NOSUID | sc.MS_NODEV
            sc.mount(layer["index"], layer["target"], "erofs", flags, f"device={layer['tar']}")
            self._mounted.add(layer["target"])
