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
import time
from typing import Any

from sandbox.node import (
    children,
    confine,
    fileops,
    held,
    keyed,
    listening,
    monitor,
    privileges,
    rootfs,
    scheduling,
    sealed,
    wire,
)
from sandbox.node import syscalls as sc
from sandbox.node.course import UNUSED

SIOCSIFFLAGS = 0x8914
SIOCGIFFLAGS = 0x8913
IFF_UP = 1


class Init:
    """State of one sandbox's PID 1."""

    def __init__(self, spec: dict[str, Any], client: socket.socket, upper: int) -> None:
        self.spec = spec
        self.client: socket.socket | None = client
        """The creator; None once it is gone and the sandbox lives on its lease."""
        self.upper = upper
        self.monitors: set[int] = set()
        self.clients: dict[int, socket.socket] = {client.fileno(): client}
        """The creator and those that attached, by descriptor."""
        self.doors: dict[int, tuple[str, socket.socket]] = {}
        """Monitors that hold their command's streams: (name of key or tag, where joining clients are
        sent)."""
        self.finished: set[str] = set()
        """Keys and tags of commands that were started and whose monitor is gone."""
        self.over_at: float | None = None
        """When the lease ends; None while somebody is connected."""

    def loop(self, wake: int, control: socket.socket) -> None:
        poll = select.poll()
        poll.register(self.clients[next(iter(self.clients))].fileno(), select.POLLIN)
        poll.register(control.fileno(), select.POLLIN)
        poll.register(wake, select.POLLIN)
        while self.over_at is None or time.monotonic() < self.over_at:
            left = None if self.over_at is None else max(0.0, self.over_at - time.monotonic()) * 1000 + 1
            for fd, _ in poll.poll(left):
                if fd == wake:
                    children.drain(wake)
                    self._reap()
                elif fd == control.fileno():
                    guest = self._admit(control)
                    if guest is None:
                        return
                    self.clients[guest.fileno()] = guest
                    poll.register(guest.fileno(), select.POLLIN)
                    self.over_at = None
                elif not self._hear(fd, poll):
                    return

    def _admit(self, control: socket.socket) -> socket.socket | None:
        """A further client, whom the zygote sends; None if the zygote is gone."""
        _, fds = wire.receive(control)
        return socket.socket(fileno=fds[0]) if fds else None

    def _hear(self, fd: int, poll: select.poll) -> bool:
        """One message of a client, or its end; False if the sandbox ends with it."""
        sock = self.clients[fd]
        message, fds = self._receive(sock)
        if message is None:
            lease: float | None = self.spec["lease_s"]
            if sock is self.client:
                if lease is None:
                    return False
                self.client = None
            poll.unregister(fd)
            del self.clients[fd]
            sock.close()
            if not self.clients and lease is not None:
                self.over_at = time.monotonic() + lease
        elif message["op"] == "end":
            return self.client is not None  # its heir may end it; a guest of a living creator may not
        else:
            self._start(message, fds)
        return True

    def _reap(self) -> None:
        for pid, status, _ in children.reap_all():
            if pid in self.monitors:
                self.monitors.discard(pid)
                self._shut_door(pid, status)
                if os.WIFSIGNALED(status):  # an agent that may signal its monitor did
                    self._kill_all()

    def _kill_all(self) -> None:
        """Nothing of a command may escape its monitor's death."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)

    def _shut_door(self, pid: int, status: int) -> None:
        name, door = self.doors.pop(pid, ("", None))
        if door is not None:
            door.close()
            if name and os.waitstatus_to_exitcode(status) != UNUSED:
                self.finished.add(name)

    def _receive(self, sock: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
        try:
            return wire.receive(sock)
        except OSError:
            return None, []

    def _start(self, message: dict[str, Any], fds: list[int]) -> None:
        """Serve one request. fds: status socket, then the request's own pipes."""
        operation: str = message["op"]
        status = socket.socket(fileno=fds[0])
        name: str | None = message.get("name")
        if operation == "list":
            self._answer(status, {"names": [each for each, _ in self.doors.values() if each]})
        elif name is not None and (operation == "join" or (message["held"] == "keyed" and self._known(name))):
            self._join(name, message, status, fds[1:])
        elif name is not None and self._known(name):
            self._answer(status, {"taken": True})
        else:
            self._fork(message, status, fds[1:])
        status.close()
        for fd in fds[1:]:
            os.close(fd)

    def _known(self, name: str) -> bool:
        return name in self.finished or self._door(name) is not None

    def _door(self, name: str) -> socket.socket | None:
        return next((door for each, door in self.doors.values() if each == name), None)

    def _join(self, name: str, message: dict[str, Any], status: socket.socket, fds: list[int]) -> None:
        """Send a client to the monitor of that name; a command that ran once never starts again."""
        door = self._door(name)
        if door is not None:
            with contextlib.suppress(OSError):
                wire.send(door, message, [status.fileno(), *fds])
                return
        self._answer(status, {"gone": True, "known": name in self.finished})

    def _answer(self, status: socket.socket, reply: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            wire.send(status, reply)

    def _fork(self, message: dict[str, Any], status: socket.socket, fds: list[int]) -> None:
        """Fork a monitor for one request."""
        self._settle()
        name: str | None = message.get("name")
        ours, theirs = socket.socketpair() if message.get("held") else (None, None)
        try:
            pid = os.fork()
        except OSError as error:
            self._answer(status, monitor.refusal(error))
            pid = -1
        if pid == 0:
            code = 70
            try:
                self._forget_clients()
                if ours is not None:
                    ours.close()
                code = self._serve(message, status, fds, theirs)
            finally:
                os._exit(code)
        if theirs is not None and ours is not None:
            theirs.close()
            if pid > 0:
                self.doors[pid] = (name or "", ours)
            else:
                ours.close()
        if pid > 0:
            self.monitors.add(pid)

    def _settle(self) -> None:
        """Finish with monitors that are ending: what dies with a killed one must not be a newer command.

        A client hears of a monitor's end before init does, since sockets close before SIGCHLD comes.
        """
        for pid in list(self.monitors):
            if _is_exiting(pid):
                with contextlib.suppress(ChildProcessError):
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                self._reap()

    def _forget_clients(self) -> None:
        for sock in self.clients.values():
            sock.close()
        for _, door in self.doors.values():
            door.close()

    def _serve(
        self, message: dict[str, Any], status: socket.socket, fds: list[int], door: socket.socket | None
    ) -> int:
        """What a forked monitor does; its exit code."""
        if message["op"] == "listen":
            listening.run(message, status)
        elif message["op"] != "exec":
            fileops.run(self.spec, message, status, fds, self.upper)
        elif door is None:
            monitor.run(self.spec, message, status, fds)
        elif message["held"] == "keyed":
            return keyed.run(self.spec, message, status, fds, door)
        else:
            return held.run(self.spec, message, status, fds, door)
        return 0


def _is_exiting(pid: int) -> bool:
    """Whether a child has begun to exit (PF_EXITING in proc(5), field 9)."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return bool(int(os.read(fd, 4096).rpartition(b")")[2].split()[6]) & 4)
    finally:
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
    with contextlib.suppress(OSError):  # `Capabilities` says where that is no use
        scheduling.own_cores()
    if spec["processors"]:
        scheduling.stay_on(spec["processors"])
    if spec["cgroup_namespace"]:
        with contextlib.suppress(OSError):
            sc.unshare(sc.CLONE_NEWCGROUP)
    if spec["network"] == "none":
        loopback_up()
    socket.sethostname("sandbox")
    upper = rootfs.build(spec)
    make_workdir(spec)
    if spec["nested"] and spec["user_namespace"]:
        confine.enter()
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
    sealed.seal()
    privileges.bound(spec)
    wire.send(client, {"ready": True})
    Init(spec, client, upper).loop(wake, control)
