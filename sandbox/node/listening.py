"""A listening socket inside a sandbox's network namespace, for the client outside to accept on."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Any

from sandbox.node import wire

_BACKLOG = 128


def run(request: dict[str, Any], status: socket.socket) -> None:
    """Listen on loopback at the wanted port, or any other if that is taken, and send the socket away.

    Accepted connections belong to the process that accepts them; nothing in here has to run for that.
    """
    try:
        with bind(request["port"]) as server:
            wire.send(status, {"port": server.getsockname()[1]}, [server.fileno()])
    except OSError as error:
        with contextlib.suppress(OSError):
            wire.send(status, {"error": error.strerror or str(error)})


def bind(port: int) -> socket.socket:
    """A listening socket on loopback at that port, or any other if it is taken."""
    server = socket.socket(socket.AF_INET)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            server.bind(("127.0.0.1", 0))
        server.listen(_BACKLOG)
    except OSError:
        server.close()
        raise
    return server
