"""What a client keeps on disk for each of its containers: a socket, and a lock that says whether he lives.

    STORE/docker/ID/lock          held by the client that answers for the sandbox, as long as he lives
    STORE/docker/ID/run/socket    shown to the container while it boots

The kernel lets go of the lock when its holder ends, however he ends, so nobody judges by process numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
from pathlib import Path


class Place:
    """The folder of one sandbox."""

    def __init__(self, root: Path, id: str) -> None:
        self.folder = root / "docker" / id
        self._lock = -1

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def make(self) -> socket.socket:
        """Make the folder, lock it, and return the listening socket."""
        self.folder.parent.mkdir(mode=0o700, exist_ok=True)
        self.run.mkdir(parents=True)
        assert self.lock(), "nobody else knows a fresh folder"
        listener = socket.socket(socket.AF_UNIX)
        directory = os.open(self.run, os.O_PATH | os.O_DIRECTORY)
        try:
            listener.bind(f"/proc/self/fd/{directory}/socket")  # short, however long the folder's path
        finally:
            os.close(directory)
        # In an engine with remapped users the container's root is nobody here; the folder above is closed.
        (self.run / "socket").chmod(0o666)
        listener.listen()
        listener.setblocking(False)
        return listener

    def connect(self) -> socket.socket | None:
        """A connection to the sandbox's init, None if nobody listens."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            directory = os.open(self.run, os.O_PATH | os.O_DIRECTORY)
            try:
                sock.connect(f"/proc/self/fd/{directory}/socket")
            finally:
                os.close(directory)
        except OSError:
            sock.close()
            return None
        return sock

    def lock(self) -> bool:
        """Answer for the sandbox from now on; False if somebody else does, or the folder is gone."""
        if self._lock >= 0:
            return True
        try:
            fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._lock = fd
        return True

    def unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def is_orphan(self) -> bool:
        """Whether nobody answers for the sandbox (any more). A place without a lock tells nothing: False."""
        if self._lock >= 0:
            return False
        try:
            fd = os.open(self.folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True

    def remove(self) -> None:
        """Delete the folder, then let go."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.unlock()


async def readable(sock: socket.socket, seconds: float) -> bool:
    """Wait until somebody connects; False if nobody did. Cancelling it loses no connection."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await ready.wait()
    finally:
        loop.remove_reader(sock)
    return ready.is_set()
