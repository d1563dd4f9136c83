"""Waking a poll loop when children die, and collecting them."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any


def _noted(number: int, frame: object) -> None:
    """A handler must exist for the wakeup descriptor to be written."""


def wake_fd() -> int:
    """A descriptor that becomes readable after SIGCHLD; one per process."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _noted)
    return read_end


def drain(fd: int) -> None:
    """Empty the wakeup descriptor."""
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


def reap_all() -> list[tuple[int, int, Any]]:
    """Collect every dead child: (pid, status, usage)."""
    dead: list[tuple[int, int, Any]] = []
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return dead
        if pid == 0:
            return dead
        dead.append((pid, status, usage))
