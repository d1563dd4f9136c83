"""PID 1 of a sandbox that a container engine started: builds the same root as elsewhere, then serves.

The engine gives namespaces, control group, capabilities and the image's files as a read-only root. From
that this program makes what every other sandbox has: an overlay of that root under one size-limited tmpfs,
a minimal /dev, a masked /proc; then it gives up the capabilities that only this took. Interpreter and code
come from the client's machine, below PLACE, never from the image: an image may hold anything.

Clients come over a unix socket whose listening end the first of them hands over: it outlives him. Without
any client for the lease's seconds it exits, and the container with it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

from sandbox.node import cgroups, children, confine, init, privileges, rootfs, sealed, wire
from sandbox.node import syscalls as sc

PLACE = "/.posttrain"
"""Where the engine shows the client's files while the container boots; gone from sight afterwards."""
CONNECT_SECONDS = 30.0


class ContainedInit(init.Init):
    """Its further clients come by themselves."""

    def _admit(self, control: socket.socket) -> socket.socket | None:
        """Accept a client and tell him what he attached to."""
        guest, _ = control.accept()
        self._answer(guest, {"handle": self.spec["handle"]})
        return guest


def _groups() -> cgroups.Group:
    """This container's control group as the engine shows it, version 1 or 2."""
    place = "/sys/fs/cgroup"
    if os.path.exists(f"{place}/cgroup.controllers"):
        return cgroups.Group(memory=place, pids=place)
    return cgroups.Group(memory=f"{place}/memory", pids=f"{place}/pids")


def _limits(group: cgroups.Group) -> dict[str, str]:
    """The limits in force, read back: what an engine was asked for is not what it does."""
    found: dict[str, str] = {}
    for name, folder, files in (
        ("memory", group.memory, ("memory.max", "memory.limit_in_bytes")),
        ("pids", group.pids, ("pids.max",)),
    ):
        for file in files:
            if os.path.exists(f"{folder}/{file}"):
                with open(f"{folder}/{file}") as text:
                    found[name] = text.read().strip()
    return found


def _boot(spec: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Build and enter the root; (descriptor of the upper folder, facts for the client)."""
    group = _groups()
    facts: dict[str, Any] = {
        "limits": _limits(group),
        "namespaces": {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "mnt", "user")},
    }
    spec["events"] = group.watch()
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    if spec["network"] == "none":
        init.loopback_up()
    upper = rootfs.build(spec)
    init.make_workdir(spec)
    if spec["nested"]:
        confine.enter()
    return upper, facts


def main() -> None:
    """Connect to the client, do as he says."""
    os.umask(0o022)
    sc.set_title("sandbox-init")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(CONNECT_SECONDS)
    client.connect(f"{PLACE}/run/socket")
    spec, fds = wire.receive(client)
    client.settimeout(None)
    if spec is None or not fds:
        return
    try:
        upper, facts = _boot(spec)
    except OSError as error:
        wire.send(client, {"error": str(error), "errno": error.errno or 0})
        return
    wake = children.wake_fd()
    sealed.seal()
    granted = privileges.NESTED_CAPABILITIES if spec["nested"] else privileges.ROOT_CAPABILITIES
    sc.set_capabilities(granted | 1 << sc.CAP_SETPCAP)  # which commands lose too
    privileges.bound(spec)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    sys.stdin = sys.stdout = sys.stderr = None
    wire.send(client, {"ready": True, **facts})
    ContainedInit(spec, client, upper).loop(wake, socket.socket(fileno=fds[0]))
