"""PID 1 of a pod: serves the same requests as `init`, over exec streams of the API server.

    python3 -I -S podlet.pyz serve '{"workdir": ..., ...}'    the container's main process
    python3 -I -S podlet.pyz connect                          what an exec runs: stdin and stdout to it

A session belongs to one client and outlives its connections: commands go on while the client reconnects,
and nothing is lost or repeated (`frames`). A session that nobody resumes within `reconnect_s` ends with its
commands. The pod ends itself when its creator has been away for that long, or for its lease. Standard library
only, one thread.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from typing import Any

from sandbox.node import cgroups, children, fileops, frames, listening, mux, privileges, sealed
from sandbox.node import syscalls as sc
from sandbox.node.connector import FOLDER, SOCKET
from sandbox.node.frames import Frame, Kind
from sandbox.node.init import Init
from sandbox.node.sessions import Connection, PollReactor, Session

TICK_MS = 1000
JOURNAL_BYTES = 1 << 20


class Podlet(Init):
    """`Init` whose clients come over links."""

    def __init__(self, spec: dict[str, Any], listener: socket.socket) -> None:
        self.spec = spec
        self.upper = -1
        self.clients = {}
        self.monitors = set()
        self.doors = {}
        self.finished = set()
        self.listener = listener
        self.reactor = PollReactor()
        self.sessions: dict[str, Session] = {}
        self.connections: dict[int, Connection] = {}
        self.ports: dict[int, tuple[Session, socket.socket]] = {}
        """Where programs of the sandbox reach a client's proxy."""
        self.creator_seen = self.anyone_seen = time.monotonic() + spec["start_s"]
        memory = os.memfd_create("journal", os.MFD_CLOEXEC)
        self.journal = os.open(f"/proc/self/fd/{memory}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        os.close(memory)
        self.journal_start = 0
        """What lies before it is stored by a client, and its memory is given back."""

    def serve(self, wake: int) -> None:
        """Until the pod has been without its client for too long."""
        poll = self.reactor.poll
        poll.register(self.listener.fileno(), select.POLLIN)
        poll.register(wake, select.POLLIN)
        while not self._expire():
            for fd, events in poll.poll(TICK_MS):
                if fd == wake:
                    children.drain(wake)
                    self._reap()
                elif fd == self.listener.fileno():
                    self._accept()
                elif fd in self.connections:
                    self._listen(self.connections[fd], events)
                elif fd in self.ports:
                    self._accept_inside(*self.ports[fd])
                else:
                    self._carry(fd, events)
            for connection in list(self.connections.values()):
                self._flush(connection)

    # ---- connections

    def _accept(self) -> None:
        sock, _ = self.listener.accept()
        uid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if uid != os.geteuid():
            sock.close()
            return
        connection = Connection(sock)
        self.connections[sock.fileno()] = connection
        self.reactor.interest(sock.fileno(), read=True, write=False)

    def _drop(self, connection: Connection) -> None:
        fd = connection.sock.fileno()
        self.connections.pop(fd, None)
        self.reactor.interest(fd, read=False, write=False)
        connection.sock.close()
        if connection.session is not None and connection.session.connection is connection:
            connection.session.connection = None
            connection.session.seen = time.monotonic()

    def _listen(self, connection: Connection, events: int) -> None:
        if events & select.POLLOUT:
            self._flush(connection)
        if not events & ~select.POLLOUT or connection.sock.fileno() < 0:
            return
        try:
            data = connection.sock.recv(1 << 18)
            if not data:
                self._drop(connection)
                return
            for frame in connection.parser.feed(data):
                self._frame(connection, frame)
        except BlockingIOError:
            return
        except (OSError, frames.LinkBroken):
            self._drop(connection)

    def _flush(self, connection: Connection) -> None:
        if connection.sock.fileno() < 0:
            return
        session = connection.session
        if session is not None and session.ledger.owes():
            connection.outbox += session.ledger.encode(Kind.ACK)
        try:
            connection.flush()
        except OSError:
            self._drop(connection)
            return
        self.reactor.interest(connection.sock.fileno(), read=True, write=bool(connection.outbox))

    def _frame(self, connection: Connection, frame: Frame) -> None:
        if frame.kind is Kind.HELLO:
            self._welcome(connection, frame.json())
            return
        session = connection.session
        if session is None or not session.ledger.accept(frame):
            return
        if frame.kind is Kind.PING:
            session.emit(session.ledger.encode(Kind.PONG))
        elif frame.kind is Kind.REQUEST:
            self._request(session, frame.json())
        elif frame.kind is Kind.FILE:
            session.take_file(frame)
        elif frame.kind is Kind.BYE:
            self._end(session)
        else:
            session.mux.frame(frame)

    def _welcome(self, connection: Connection, hello: dict[str, Any]) -> None:
        """Begin or resume a session; its former connection, which may only seem alive, is dropped."""
        name, token = str(hello["session"]), str(hello["token"])
        session = self.sessions.get(name)
        if session is None and hello["received"] == 0:
            session = self.sessions[name] = Session(
                token, self.reactor, self.journal, self.journal_start, creator=bool(hello["creator"])
            )
        if session is None or not hmac.compare_digest(session.token.encode(), token.encode()):
            refusal = json.dumps({"error": "this session is over"}).encode()
            connection.outbox += frames.Ledger().encode(Kind.WELCOME, 0, refusal)
            return
        if session.connection is not None:
            self._drop(session.connection)
        connection.session = session
        answer = {"received": session.ledger.received, "facts": facts(self.spec)}
        connection.outbox += session.ledger.encode(Kind.WELCOME, 0, json.dumps(answer).encode())
        connection.outbox += session.ledger.replay(int(hello["received"]))
        session.connection = connection

    # ---- requests

    def _carry(self, fd: int, events: int) -> None:
        for session in list(self.sessions.values()):
            if fd in session.mux.descriptors:
                if events & select.POLLOUT:
                    session.mux.writable(fd)
                if events & ~select.POLLOUT:
                    if session.mux.reading(fd):
                        session.mux.readable(fd)
                    else:
                        session.mux.writable(fd)  # an error on a pipe that we write: find out
                return
        self.reactor.interest(fd, read=False, write=False)

    def _request(self, session: Session, message: dict[str, Any]) -> None:
        """Make the request's descriptors and do with it what `init` does."""
        inner: list[int] = []
        opened: list[mux.Stream] = []
        for id, kind in mux.streams(message):
            if kind in ("file", "log"):
                inner.append(session.file(id) if kind == "file" else os.dup(self.journal))
                continue
            ours, theirs = mux.make(kind)
            inner.append(theirs)
            if ours >= 0:
                opened.append(session.mux.add(id, ours, mux.mirror(kind)))
        session.mux.order(opened[0], [stream for stream in opened[1:] if stream.reads])
        if message["op"] in ("listen", "unlisten"):
            with socket.socket(fileno=inner[0]) as status:
                self._answer(status, self._port(session, message))
        else:
            self._start(message, inner)

    def _port(self, session: Session, message: dict[str, Any]) -> dict[str, Any]:
        """Begin or stop to listen on loopback, at the wanted port or any other if that is taken."""
        if message["op"] == "unlisten":
            self._shut_ports(session)
            return {"ok": True}
        try:
            server = listening.bind(message["port"])
        except OSError as error:
            return {"error": error.strerror or str(error)}
        self.ports[server.fileno()] = (session, server)
        self.reactor.interest(server.fileno(), read=True, write=False)
        return {"port": server.getsockname()[1]}

    def _accept_inside(self, session: Session, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            session.accepted(server.accept()[0], server.getsockname()[1])

    def _shut_ports(self, session: Session) -> None:
        for fd, (owner, server) in list(self.ports.items()):
            if owner is session:
                self.reactor.interest(fd, read=False, write=False)
                del self.ports[fd]
                server.close()

    def _forget_clients(self) -> None:
        """The child keeps what it serves alone (`_serve`)."""

    def _serve(
        self, message: dict[str, Any], status: socket.socket, fds: list[int], door: socket.socket | None
    ) -> int:
        events = [fd for fd, _ in self.spec["events"].values()]
        close_all_but([status.fileno(), *fds, *events, *([door.fileno()] if door is not None else [])])
        try:
            return super()._serve(message, status, fds, door)
        except Exception:
            traceback.print_exc()  # into the pod's log
            raise

    def _kill_all(self) -> None:
        if os.getpid() == 1:
            super()._kill_all()

    # ---- ends

    def _end(self, session: Session) -> None:
        self._shut_ports(session)
        session.end()
        self.sessions = {name: each for name, each in self.sessions.items() if each is not session}
        if session.connection is not None:
            self._flush(session.connection)
            session.connection.session = None

    def _trim_journal(self) -> None:
        """Give back the memory of what a client has stored."""
        safe = max((session.safe() for session in self.sessions.values()), default=0)
        if safe - self.journal_start >= JOURNAL_BYTES:
            sc.punch_hole(self.journal, self.journal_start, safe - self.journal_start)
            self.journal_start = safe
            for session in self.sessions.values():
                session.skip(safe)

    def _expire(self) -> bool:
        """End sessions that nobody resumed; whether the pod itself is to end."""
        self._trim_journal()
        now, patience, lease = time.monotonic(), self.spec["reconnect_s"], self.spec["lease_s"]
        for session in list(self.sessions.values()):
            if session.connection is None and now - session.seen > patience:
                self._end(session)
        if any(session.creator for session in self.sessions.values()):
            self.creator_seen = now
        if self.sessions:
            self.anyone_seen = now  # before the first, there is patience with our client
        if lease is None:
            return now - self.creator_seen > patience
        return now - self.anyone_seen > max(0.0, lease - patience) + 1.0


def facts(spec: dict[str, Any]) -> dict[str, Any]:
    """What this pod really has: limits as its control group states them, ids, room."""
    disk = os.statvfs(spec["workdir"])
    return {
        "uid": os.geteuid(),
        "pid": os.getpid(),
        "memory_max": _limit("memory.max", "memory/memory.limit_in_bytes"),
        "pids_max": _limit("pids.max", "pids/pids.max"),
        "oom_group": _limit("memory.oom.group"),
        "disk_bytes": disk.f_blocks * disk.f_frsize,
        "events": sorted(spec["events"]),
        "python": sys.version.split()[0],
        "api_server": [os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")],
    }


def _limit(*names: str) -> int | None:
    for name in names:
        with contextlib.suppress(OSError, ValueError), open(f"/sys/fs/cgroup/{name}") as file:
            return int(file.read())
    return None


def groups() -> cgroups.Group:
    """The pod's own control groups, where the runtime shows them (version 2, or 1)."""
    group = cgroups.Group()
    for name, folders, probe in (
        ("memory", ("/sys/fs/cgroup", "/sys/fs/cgroup/memory"), ("memory.events", "memory.oom_control")),
        ("pids", ("/sys/fs/cgroup", "/sys/fs/cgroup/pids"), ("pids.events",)),
    ):
        for folder in folders:
            if any(os.path.exists(f"{folder}/{file}") for file in probe):
                setattr(group, name, folder)
                break
    return group


def close_all_but(keep: list[int]) -> None:
    """Close every descriptor above standard error that is not in `keep`."""
    first = 3
    for fd in sorted(keep):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, 1 << 20)


def serve(spec: dict[str, Any]) -> None:
    """The container's main process."""
    spec.update(events=groups().watch(), single_id=False, nested=False)
    spec["one_user"] = os.geteuid() != 0
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    os.umask(0o077)
    os.makedirs(FOLDER, exist_ok=True)
    with contextlib.suppress(OSError):  # not ours where everything has one user
        os.chmod(FOLDER, 0o700)  # a volume comes open to all; an agent must not take the socket's place
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{SOCKET}.new")
    os.umask(0o022)
    if not os.path.isdir(spec["workdir"]):
        fileops.make_parents(f"{spec['workdir']}/.", os.geteuid() or privileges.AGENT)
    os.chdir("/")
    wake = children.wake_fd()
    sealed.seal()
    listener.listen()
    os.rename(f"{SOCKET}.new", SOCKET)  # probes see it once it answers
    Podlet(spec, listener).serve(wake)


def main() -> None:
    """argv: `serve` and the specification."""
    serve(json.loads(sys.argv[2]))
