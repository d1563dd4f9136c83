"""Reaching a sandbox of another process through its nodelet's socket."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from sandbox.node import wire

SECONDS = 5.0
LONGEST_PATH = 100
"""Bytes of a socket's path that the kernel takes, and some to spare."""


def introduce(folder: Path, nodelet: int, id: str, end: socket.socket) -> dict[str, Any] | None:
    """Ask the nodelet to hand `end` to the init of sandbox `id`; its answer, or None if it is gone."""
    directory = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(SECONDS)
            path = str(folder / f"{nodelet}.sock")
            if len(os.fsencode(path)) > LONGEST_PATH:
                path = f"/proc/self/fd/{directory}/{nodelet}.sock"
            sock.connect(path)
            wire.send(sock, {"id": id}, [end.fileno()])
            return wire.receive(sock)[0]
    except OSError:
        return None
    finally:
        os.close(directory)
