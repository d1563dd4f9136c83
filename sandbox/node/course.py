"""The course of a command whose monitor holds its streams, so that it can go on without its client."""

from __future__ import annotations

import os
import select
import socket
import time
from typing import Any

from sandbox.node import children, monitor, wire

DRAIN_SECONDS = 0.1
"""Silence after the direct child's end that counts as complete although a background process holds the
pipe."""
DRAIN_MAX_SECONDS = 2.0
BLOCK = 1 << 16
UNUSED = 3
"""Exit code of a monitor whose command never ran or was cancelled: its name is free again."""


class Course:
    """One loop over child, streams and clients. Subclasses say what becomes of output and of clients."""

    def __init__(
        self, child: int, outputs: dict[int, str], timeout: float | None, wake: int, door: socket.socket
    ) -> None:
        self.child = child
        self.outputs = outputs
        """Read ends of the command's output: descriptor -> stream."""
        self.wake = wake
        self.door = door
        self.began = time.monotonic()
        self.done = False
        """The direct child has ended."""
        self.ended: tuple[int, Any] | None = None
        """Its wait status and usage, as far as they are known."""
        self.reason = ""
        """Why everything was killed, if it was."""
        self._deadline = None if timeout is None else self.began + timeout
        self._ended_at = self._last_data = 0.0

    # ---- what subclasses say

    def took(self, stream: str, data: bytes) -> None:
        """Output arrived."""

    def room(self) -> bool:
        """Whether output may be read now."""
        return True

    def interests(self) -> dict[int, int]:
        """Further descriptors to wait for: descriptor -> poll events."""
        return {}

    def event(self, fd: int) -> None:
        """One of `interests` is ready."""

    def joined(self, message: dict[str, Any], fds: list[int]) -> None:
        """A client came through the door."""

    # ---- the loop

    def run(self) -> None:
        """Until the direct child has ended and its output is in."""
        while not self._over():
            self.step(self._patience())
            if not self.done and self._deadline is not None and time.monotonic() >= self._deadline:
                self.kill("timeout")

    def kill(self, reason: str) -> None:
        """Kill the command and everything below it."""
        if self.done:
            return
        self.reason = reason
        gone = monitor.kill_tree()
        self._end(next(((code, usage) for pid, code, usage in gone if pid == self.child), None))

    def step(self, seconds: float | None) -> None:
        """Wait once, and handle what is ready."""
        wanted = self.interests()
        readable = [self.wake, self.door.fileno(), *(self.outputs if self.room() else ())]
        poll = select.poll()
        for fd in {*wanted, *readable}:
            poll.register(fd, wanted.get(fd, 0) | (select.POLLIN if fd in readable else 0))
        ready = [fd for fd, _ in poll.poll(None if seconds is None else seconds * 1000 + 1)]
        for fd in ready:  # output first: it was written before whatever else happened
            if fd in self.outputs and fd in readable:
                self._read(fd)
        for fd in ready:
            if fd == self.wake:
                self._reap()
            elif fd == self.door.fileno():
                self._open_door()
            elif fd in self.interests():
                self.event(fd)

    def _reap(self) -> None:
        children.drain(self.wake)
        for pid, code, usage in children.reap_all():
            if pid == self.child and not self.done:
                self._end((code, usage))

    def _end(self, status: tuple[int, Any] | None) -> None:
        self.done, self.ended = True, status
        self._ended_at = self._last_data = time.monotonic()

    def _open_door(self) -> None:
        message, fds = wire.receive(self.door)
        if message is None:
            os._exit(0)  # init is gone, and so are we
        self.joined(message, fds)

    def _read(self, fd: int) -> None:
        try:
            data = os.read(fd, BLOCK)
        except BlockingIOError:
            return
        except OSError:  # a terminal whose last user is gone
            data = b""
        if data:
            self._last_data = time.monotonic()
            self.took(self.outputs[fd], data)
        else:
            self.drop(fd)

    def drop(self, fd: int) -> None:
        """Close one output."""
        del self.outputs[fd]
        os.close(fd)

    def _over(self) -> bool:
        if not self.done:
            return False
        now = time.monotonic()
        quiet = now - self._last_data >= DRAIN_SECONDS or now - self._ended_at >= DRAIN_MAX_SECONDS
        return not self.outputs or (quiet and self.room())

    def _patience(self) -> float | None:
        if self.done:
            return DRAIN_SECONDS
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
