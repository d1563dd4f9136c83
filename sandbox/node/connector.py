"""What an exec in a pod runs: standard input and output carried to the podlet's socket, until either ends.

It imports as little as it can, since every connection starts it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys

FOLDER = "/run/posttrain"
SOCKET = f"{FOLDER}/podlet.sock"
EXIT_NO_PODLET = 3
"""Exit code where no podlet listens."""
BLOCK = 1 << 17


def connect() -> int:
    """Carry standard input to the podlet's socket and what it answers to standard output."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(SOCKET)
    except OSError as error:
        os.write(2, f"no podlet listens: {error.strerror}\n".encode())
        return EXIT_NO_PODLET
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(sock.fileno(), select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            data = os.read(0, BLOCK) if fd == 0 else sock.recv(BLOCK)
            if not data:
                return 0
            if fd == 0:
                sock.sendall(data)
            else:
                view = memoryview(data)
                while view:
                    view = view[os.write(1, view) :]


def main() -> None:
    """A peer that went away is an end, not an error."""
    with contextlib.suppress(OSError):
        sys.exit(connect())
