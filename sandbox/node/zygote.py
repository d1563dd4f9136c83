"""The nodelet: one small process per provider that forks sandboxes.

It lives as long as its client: when the control socket ends (also by kill -9), it kills its sandboxes, waits
for them, removes their control groups and records, and exits. Sandboxes with a lease outlive the client; the
nodelet then stays until the last of them has ended.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import sys
from typing import Any

from sandbox.node import cgroups, children, host, init, ledger, lower, scheduling, wire
from sandbox.node import syscalls as sc

PARENT_CHECK_MS = 1000
GUEST_SECONDS = 1.0


class Zygote:
    """Sandboxes by init's pid."""

    def __init__(self, control: socket.socket, listener: socket.socket, state: str) -> None:
        self.control = control
        self.listener = listener
        self.state = state
        self.identity = os.geteuid() == 0
        self.sandboxes: dict[int, dict[str, Any]] = {}
        self.groups = cgroups.Groups.probe()
        self.lower = lower.Lower()
        self.nodes = scheduling.Nodes()
        self.ledger = ledger.Ledger(f"{state}/../node", self.groups.memory_ceiling())

    def hello(self) -> dict[str, Any]:
        """Facts about this host for the client."""
        reason = _try_user_namespace()
        return {
            "groups": self.groups.describe(),
            "user_namespace": not reason,
            "user_namespace_reason": reason,
            "id_map": "0 0 65536" if self.identity else None,
            "mounts_layers": lower.possible(),
            "autogroups": scheduling.autogroups(),
            "core_scheduling": scheduling.core_reason(),
            "numa_nodes": len(self.nodes.processors),
            **({"error": reason} if reason and not self.identity else {}),
        }

    def loop(self) -> None:
        """Serve until the client is gone and no sandbox lives on its lease."""
        wake = children.wake_fd()
        poll = select.poll()
        for fd in (self.control.fileno(), wake, self.listener.fileno()):
            poll.register(fd, select.POLLIN)
        control, parent = self.control.fileno(), os.getppid()
        orphaned = False
        while not orphaned or self.sandboxes:
            ready = [fd for fd, _ in poll.poll(PARENT_CHECK_MS)]
            if wake in ready:
                children.drain(wake)
                self.reap()
            if self.listener.fileno() in ready:
                self.introduce()
            # Our client may have died although a child of his still holds the socket.
            if not orphaned and (os.getppid() != parent or (control in ready and not self.serve())):
                orphaned = True
                poll.unregister(control)
                self.control.close()
                os.dup2(0, 2)  # /dev/null: whoever reads our client's errors need not wait for leases
                self.end([pid for pid, each in self.sandboxes.items() if each["lease_s"] is None])
        self.ledger.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.state}/{os.getpid()}.sock")

    def serve(self) -> bool:
        """One request of the client; False if it is gone."""
        try:
            message, fds = wire.receive(self.control)
        except OSError:
            return False
        if message is None:
            return False
        self.handle(message, fds)
        return True

    def handle(self, message: dict[str, Any], fds: list[int]) -> None:
        if message["op"] == "create":
            self.create(message, fds[0])
        elif message["op"] == "sweep":
            cgroups.sweep(message["folders"])
            self.tell({"event": "dead", "id": message["id"]})
        elif message["op"] == "kill":
            for pid, record in self.sandboxes.items():
                if record["id"] == message["id"]:
                    os.kill(pid, signal.SIGKILL)

    def introduce(self) -> None:
        """Serve one guest: hand the socket he sends to the init of the sandbox he names."""
        connection, _ = self.listener.accept()
        connection.settimeout(GUEST_SECONDS)
        with connection, contextlib.suppress(OSError, ValueError, KeyError):
            message, fds = wire.receive(connection)
            record = next(
                (each for each in self.sandboxes.values() if message and each["id"] == message["id"]), None
            )
            if record is None or not fds:
                wire.send(connection, {"error": "no such sandbox"})
            else:
                wire.send(record["control"], {"op": "attach"}, fds)
                wire.send(connection, {"ok": True, "handle": record["handle"]})
            for fd in fds:
                os.close(fd)

    def create(self, spec: dict[str, Any], client_fd: int) -> None:
        """Fork one sandbox. Its init reports success itself; what fails before is reported here."""
        client = socket.socket(fileno=client_fd)
        ours, theirs = socket.socketpair()
        group = None
        memory: int = spec["memory_bytes"]
        try:
            self.ledger.admit(memory, spec["admission"])
        except ledger.Refused as refused:
            wire.send(client, {"error": str(refused), "refused": refused.limit})
            self._gone(spec["id"])
            for sock in (client, ours, theirs):
                sock.close()
            return
        try:
            self.lower.mount(spec["mounts"])
            batch = spec["scheduling"] == "batch"
            group = self.groups.make(spec["name"], spec["memory_bytes"], spec["pids"], batch=batch)
            spec["events"] = group.watch()
            spec["groups"] = {"memory": group.memory, "pids": group.pids}
            node = self.nodes.place()
            spec["processors"] = [] if node is None else sorted(self.nodes.processors[node])
            try:
                pid = self._fork(spec, client, ours, theirs)
            except OSError:
                self.nodes.leave(node)
                raise
            for fd, _ in spec["events"].values():
                os.close(fd)
        except OSError as error:
            if group is not None:
                group.remove()
            self.ledger.release(memory)
            wire.send(client, {"error": f"{error}", "errno": error.errno or 0})
            self._gone(spec["id"])
            ours.close()
        else:
            self.sandboxes[pid] = {
                "id": spec["id"], "group": group, "control": ours, "handle": spec.pop("handle"),
                "lease_s": spec["lease_s"], "memory": memory, "node": node,
            }  # fmt: skip

            try:
                self._identify(spec, pid)
                group.add(pid)
                ours.send(b"g")
            except OSError as error:
                os.kill(pid, signal.SIGKILL)
                wire.send(client, {"error": f"{error}", "errno": error.errno or 0})
        theirs.close()
        client.close()

    def _fork(
        self, spec: dict[str, Any], client: socket.socket, ours: socket.socket, theirs: socket.socket
    ) -> int:
        flags = sc.CLONE_NEWPID | sc.CLONE_NEWNS | sc.CLONE_NEWIPC | sc.CLONE_NEWUTS
        if spec["network"] == "none":
            flags |= sc.CLONE_NEWNET
        if spec["user_namespace"]:
            flags |= sc.CLONE_NEWUSER
        pid = sc.clone(flags)
        if pid:
            return pid
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _close_all_but({client.fileno(), theirs.fileno(), *(fd for fd, _ in spec["events"].values())})
            if theirs.recv(1) == b"g":
                init.run(spec, client, theirs)
        finally:
            os._exit(0)

    def _identify(self, spec: dict[str, Any], pid: int) -> None:
        """Write the user namespace's id maps."""
        if not spec["user_namespace"]:
            return
        if self.identity:
            text = spec["id_map"]
        else:
            _put(f"/proc/{pid}/setgroups", "deny")
            text = None
        _put(f"/proc/{pid}/uid_map", text or f"0 {os.geteuid()} 1")
        _put(f"/proc/{pid}/gid_map", text or f"0 {os.getegid()} 1")

    def reap(self) -> None:
        for pid, status, _ in children.reap_all():
            record = self.sandboxes.pop(pid, None)
            if record is not None:
                oom = os.WIFSIGNALED(status) and record["group"].killed_for_memory()
                self._remove(record)
                self.tell({"event": "dead", "id": record["id"], "oom": oom})

    def _gone(self, id: str) -> None:
        """Say that a sandbox which was asked for does not exist."""
        self._forget(id)
        self.tell({"event": "dead", "id": id})

    def _remove(self, record: dict[str, Any]) -> None:
        record["control"].close()
        self.ledger.release(record["memory"])
        self.nodes.leave(record["node"])
        record["group"].remove()
        self._forget(record["id"])

    def _forget(self, id: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.state}/{id}.json")

    def tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            wire.send(self.control, message)

    def end(self, pids: list[int]) -> None:
        """Kill these sandboxes and remove what was theirs."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            self._remove(self.sandboxes.pop(pid))


def _try_user_namespace() -> str:
    """Empty if user namespaces work, else why not and what to change."""
    pid = os.fork()
    if pid == 0:
        try:
            sc.unshare(sc.CLONE_NEWUSER)
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    number = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if number == 0:
        return ""
    hints = [
        f"set `sysctl {name}={value}`"
        for name, bad, value in (
            ("kernel.unprivileged_userns_clone", "0", "1"),
            ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
            ("user.max_user_namespaces", "0", "10000"),
        )
        if _sysctl(name) == bad
    ]
    hint = " and ".join(hints) or "run outside the chroot or container that forbids them, or as root"
    return f"user namespaces are refused here ({os.strerror(number)}): {hint}"


def _sysctl(name: str) -> str:
    try:
        with open("/proc/sys/" + name.replace(".", "/")) as file:
            return file.read().strip()
    except OSError:
        return ""


def _close_all_but(keep: set[int]) -> None:
    """Close every descriptor above standard error that is not in `keep`, other sandboxes' sockets too."""
    first = 3
    for fd in sorted(keep):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, 1 << 20)


def _listen(state: str) -> socket.socket:
    """A socket in the state folder, for clients that attach; bound by its short name (paths have limits)."""
    listener = socket.socket(socket.AF_UNIX)
    os.chdir(state)
    mask = os.umask(0o177)
    listener.bind(f"{os.getpid()}.sock")
    os.umask(mask)
    listener.listen()
    os.chdir("/")
    return listener


def _put(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def main() -> None:
    """argv: descriptor of the control socket, state folder. Says once what it can enforce."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    os.umask(0o022)
    listener = _listen(sys.argv[2])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a socket for each sandbox
    host.settle()
    zygote = Zygote(control, listener, sys.argv[2])
    wire.send(control, zygote.hello())
    gc.collect()
    gc.freeze()
    gc.disable()
    zygote.loop()
