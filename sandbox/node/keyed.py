"""A keyed command: it goes on when its client is killed, and its result is in the log before anyone hears of
it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import Any

from sandbox.node import journal, monitor, verdicts, wire
from sandbox.node.course import UNUSED, Course
from sandbox.node.kept import Kept


class Keyed(Course):
    """Keeps the output, and the clients that wait for the end."""

    def __init__(self, limit: int, status: socket.socket, *course: Any) -> None:
        super().__init__(*course)
        self.kept = {"stdout": Kept(limit), "stderr": Kept(limit)}
        self.owner = status
        self.waiting = {status.fileno(): status}

    def took(self, stream: str, data: bytes) -> None:
        self.kept[stream].add(data)

    def interests(self) -> dict[int, int]:
        return dict.fromkeys(self.waiting, select.POLLIN)

    def event(self, fd: int) -> None:
        """A client says or goes something; the owner alone may end the command."""
        sock = self.waiting[fd]
        try:
            message, _ = wire.receive(sock)
        except OSError:
            message = None
        if message is None:
            del self.waiting[fd]
            sock.close()
        elif "kill" in message and sock is self.owner:
            self.kill("killed")

    def joined(self, message: dict[str, Any], fds: list[int]) -> None:
        for fd in fds[1:]:
            os.close(fd)
        sock = socket.socket(fileno=fds[0])
        self.waiting[sock.fileno()] = sock

    def tell(self, reply: dict[str, Any]) -> None:
        """Answer everyone who waits."""
        for sock in self.waiting.values():
            with contextlib.suppress(OSError):
                wire.send(sock, reply)
            sock.close()
        self.waiting.clear()


def run(
    spec: dict[str, Any], request: dict[str, Any], status: socket.socket, fds: list[int], door: socket.socket
) -> int:
    """fds: standard input, the log. Returns the monitor's exit code."""
    stdin, log = fds
    wake, before = monitor.prepare(spec)
    outputs: dict[int, str] = {}
    pipes = [stdin]
    for stream in ("stdout", "stderr"):
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        outputs[read_end] = stream
        pipes.append(write_end)
    child = monitor.start(spec, request, pipes, status)
    if child is None:
        return UNUSED
    for fd in pipes:
        os.close(fd)
    course = Keyed(request["max_output"], status, child, outputs, request["timeout"], wake, door)
    course.run()
    report = monitor.describe(spec, before, course.ended, course.reason)
    kept = {name: (stream.take(), stream.total) for name, stream in course.kept.items()}
    if course.reason == "killed":
        door.close()  # whoever comes with this key now starts anew
    event = {"end": request["token"], "result": verdicts.result(report, course.began, kept)}
    try:
        journal.append(log, event, sync=True)
    except OSError as error:
        course.tell({"failed": error.strerror})
    else:
        course.tell({"done": request["token"]})
    os.close(log)
    if not course.reason:
        _linger(course)
    return UNUSED if course.reason == "killed" else 0


def _linger(course: Keyed) -> None:
    """Stay for the background processes: reap them, and take what they write so that they do not block."""
    for stream in course.kept.values():
        stream.discard()
    while True:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            return
        course.step(None)
        course.tell({"gone": True, "known": True})
