"""Whether the clients of pods live: by their Lease objects, and at once for a dead process of this host."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandbox.kubernetes.manifests import GROUP
from sandbox.namespace import probe

SLACK_SECONDS = 2.0
"""How far clocks may differ."""


def identity() -> str:
    """This process for good: boot, process namespace, pid, start. Others of the same boot and namespace can
    tell that it has ended without waiting for its heartbeat to be late."""
    return f"{_here()}/{os.getpid()}/{probe.start_time(os.getpid())}"


def _here() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return "unknown"


def _has_ended(holder: str) -> bool:
    """Whether the process of that identity is known to be gone."""
    place, *rest = holder.rsplit("/", 2)
    if place != _here() or place == "unknown" or not all(part.isdigit() for part in rest):
        return False
    return not probe.is_running(int(rest[0]), int(rest[1]))


def seconds(text: str) -> float:
    """A timestamp of the API as seconds since the epoch."""
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


class Clients:
    """All clients of the namespace, as their leases show them at the server's time `now`."""

    def __init__(self, leases: Sequence[dict[str, Any]], now: float) -> None:
        self._silent: dict[str, float] = {}
        self._names: dict[str, str] = {}
        for lease in leases:
            spec, client = lease["spec"], lease["metadata"]["labels"][f"{GROUP}/client"]
            since, beat = now - seconds(spec["renewTime"]), spec["leaseDurationSeconds"]
            ended = _has_ended(spec["holderIdentity"])
            self._silent[client] = (
                max(0.001, since - beat / 4) if ended else since - beat * 1.5 - SLACK_SECONDS
            )
            self._names[client] = lease["metadata"]["name"]

    def silent(self, pod: dict[str, Any]) -> float:
        """For how many seconds at least the pod's client has been dead; 0 or less if it lives."""
        return self._silent.get(pod["metadata"]["labels"][f"{GROUP}/client"], float("inf"))

    def forgotten(self, life_s: float) -> list[str]:
        """Names of leases whose client has been dead for longer than any pod lives."""
        return [self._names[client] for client, silent in self._silent.items() if silent > life_s]
