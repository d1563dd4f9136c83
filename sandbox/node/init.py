"""PID 1 of a sandbox: builds the root, then forks one monitor for every command and reaps orphans.

It talks to its client over a socket of its own; when that socket ends, it exits, and the kernel kills
everything in its pid namespace.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
import sys
from typing import Any

from sandbox.node import children, fileops, monitor, privileges, rootfs, wire
from sandbox.node import syscalls as sc

SIOCSIFFLAGS = 0x8914
SIOCGIFFLAGS = 0x8913
IFF_UP = 1


class Init:
    """State of one sandbox's PID 1."""

    def __init__(self, spec: dict[str, Any], client: socket.socket, upper: int) -> None:
        self.spec = spec
        self.client = client
        self.upper = upper
        self.monitors: set[int] = set()
        self.guests: list[socket.socket] = []
        """Further clients (attach); the sandbox outlives them."""

    def loop(self, wake: int, control: socket.socket) -> None:
        poll = select.poll()
        poll.register(self.client.fileno(), select.POLLIN)
        poll.register(control.fileno(), select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == wake:
                    children.drain(wake)
                    self._reap()
                elif fd == control.fileno():
                    _, fds = wire.receive(control)
                    if not fds:
                        return  # the zygote is gone
                    guest = socket.socket(fileno=fds[0])
                    self.guests.append(guest)
                    poll.register(guest.fileno(), select.POLLIN)
                else:
                    sock = self.client if fd == self.client.fileno() else self._guest(fd)
                    message, fds = self._receive(sock)
                    if message is None:
                        if sock is self.client:
                            return
                        poll.unregister(fd)
                        self.guests.remove(sock)
                        sock.close()
                    else:
                        self._start(message, fds)

    def _reap(self) -> None:
        for pid, status, _ in children.reap_all():
            if pid in self.monitors:
                self.monitors.discard(pid)
                if os.WIFSIGNALED(status):  # an agent that may signal its monitor did: nothing may escape
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(-1, signal.SIGKILL)

    def _guest(self, fd: int) -> socket.socket:
        return next(sock for sock in self.guests if sock.fileno() == fd)

    def _receive(self, sock: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
        try:
            return wire.receive(sock)
        except OSError:
            return None, []

    def _start(self, message: dict[str, Any], fds: list[int]) -> None:
        """Fork a monitor for one request. fds: status socket, then the request's own pipes."""
        status = socket.socket(fileno=fds[0])
        try:
            pid = os.fork()
        except OSError as error:
            with contextlib.suppress(OSError):
                wire.send(status, {"error": f"fork: {error.strerror}", "kind": "pids"})
            pid = -1
        if pid == 0:
            code = 70
            try:
                self.client.close()
                for guest in self.guests:
                    guest.close()
                if message["op"] == "exec":
                    monitor.run(self.spec, message, status, fds[1:])
                else:
                    fileops.run(self.spec, message, status, fds[1:], self.upper)
                code = 0
            finally:
                os._exit(code)
        self.monitors.add(pid)
        status.close()
        for fd in fds[1:]:
            os.close(fd)


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(sock, SIOCGIFFLAGS, request))[1]
        if not flags & IFF_UP:
            fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


def make_workdir(spec: dict[str, Any]) -> None:
    """The agent's work folder, where the image has none."""
    if not os.path.isdir(spec["workdir"]):
        agent = 0 if spec["single_id"] else privileges.AGENT
        fileops.make_parents(f"{spec['workdir']}/.", agent)


def _prepare(spec: dict[str, Any]) -> int:
    os.setsid()
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    sc.set_title("sandbox-init")
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    if spec["cgroup_namespace"]:
        with contextlib.suppress(OSError):
            sc.unshare(sc.CLONE_NEWCGROUP)
    if spec["network"] == "none":
        loopback_up()
    socket.sethostname("sandbox")
    upper = rootfs.build(spec)
    make_workdir(spec)
    return upper


def run(spec: dict[str, Any], client: socket.socket, control: socket.socket) -> None:
    """Never returns to the zygote's code: the caller exits afterwards."""
    try:
        upper = _prepare(spec)
    except OSError as error:
        wire.send(client, {"error": str(error), "errno": error.errno or 0})
        return
    wake = children.wake_fd()
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    sys.stdin = sys.stdout = sys.stderr = None
    os.chdir("/")
    privileges.bound(spec)
    wire.send(client, {"ready": True})
    Init(spec, client, upper).loop(wake, control)
