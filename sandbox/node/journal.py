"""Lines of a sandbox's log, written by clients and (for keyed commands) by the monitor that outlives them.

One JSON object a line, appended with one write(2), so that several writers keep their lines whole and the
order of lines is the order of events. Bytes are text where they are UTF-8, base64 elsewhere.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import time
from typing import Any


def pack(data: bytes) -> dict[str, str]:
    """Bytes as JSON: {"text": ...} or {"base64": ...}."""
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def unpack(value: dict[str, str]) -> bytes:
    """The bytes that `pack` was given."""
    if "text" in value:
        return value["text"].encode()
    return base64.b64decode(value["base64"])


def append(fd: int, event: dict[str, Any], *, sync: bool = False) -> None:
    """Append one event with its time; with `sync` it is on the disk when this returns. OSError if it is not
    whole (the reader skips a torn line)."""
    line = json.dumps({**event, "time": round(time.time(), 6)}).encode() + b"\n"
    if os.write(fd, line) != len(line):
        os.write(fd, b"\n")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the sandbox's log")
    if sync:
        os.fdatasync(fd)
