"""Who made which sandbox: one small file each in the image store, read by every client of it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from sandbox.base import SandboxSpec
from sandbox.namespace import probe


class Records:
    """STORE/run/ID.json, written before a sandbox is made and removed by its nodelet when it is gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, id: str, spec: SandboxSpec, name: str, groups: dict[str, Any], nodelet: int) -> None:
        """`name` is that of its control groups below the parents in `groups`."""
        record = {
            "id": id, "owner": spec.owner, "image": spec.image, "created": time.time(), "group": name,
            "groups": [path for path in (groups["memory"], groups["pids"], groups["cpu"]) if path],
            "nodelet": nodelet, "nodelet_start": probe.start_time(nodelet),
            "client": os.getpid(), "client_start": probe.start_time(os.getpid()),
        }  # fmt: skip
        self.path(id).write_text(json.dumps(record))

    def path(self, id: str) -> Path:
        return self.folder / f"{id}.json"

    def find(self, id: str) -> dict[str, Any] | None:
        """The record of that sandbox, if there is one."""
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            return json.loads(self.path(id).read_text())
        return None

    def of(self, owner: str) -> list[dict[str, Any]]:
        """The records of exactly that owner, dead ones too."""
        every = (self.find(path.stem) for path in self.folder.glob("*.json"))
        return [record for record in every if record is not None and record["owner"] == owner]

    def remove(self, id: str) -> None:
        self.path(id).unlink(missing_ok=True)


def is_alive(record: dict[str, Any]) -> bool:
    """Whether the nodelet that keeps the sandbox lives."""
    return probe.is_running(record["nodelet"], record["nodelet_start"])


def is_orphan(record: dict[str, Any]) -> bool:
    """Whether the client that made the sandbox is gone."""
    return not probe.is_running(record["client"], record["client_start"])
