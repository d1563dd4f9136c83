"""The host's package indexes, as the proxy asks them: answers with a limit, files by their hash, kept."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit, urlunsplit

MAX_FILE = 4 << 30
TIMEOUT_S = 60.0
_BLOCK = 1 << 18

Fetch = Callable[[str, str], IO[bytes]]
"""(address, Accept) -> an open answer. Raises OSError; urllib's HTTPError carries the status."""


class NoAnswer(Exception):
    """What the index cannot answer, with a status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: bytes, or the path of a file that holds them."""

    status: int
    media_type: str
    body: bytes | Path


def fetch(address: str, accept: str) -> IO[bytes]:
    """GET with the host's proxies and certificates; credentials in the address become a header."""
    parts = urlsplit(address)
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    request = urllib.request.Request(bare, headers={"Accept": accept, "User-Agent": "posttrain"})
    if parts.username:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(pair.encode()).decode()}")
    answer: IO[bytes] = urllib.request.urlopen(  # the scheme was checked by whoever configured the index
        request, timeout=TIMEOUT_S, context=ssl.create_default_context()
    )
    return answer


class Upstream:
    """Asks by address; keeps files in the folder `cache`, where `sandbox.oci.collect` finds old ones."""

    def __init__(self, cache: Path, fetch: Fetch = fetch) -> None:
        self._cache = cache
        self._fetch = fetch
        self._locks: dict[str, asyncio.Lock] = {}

    def lock(self, what: str) -> asyncio.Lock:
        """One at a time asks for this."""
        return self._locks.setdefault(what, asyncio.Lock())

    def read(self, address: str, accept: str, limit: int) -> bytes:
        """A whole answer of at most `limit` bytes. Raises NoAnswer. Blocks: call it in a thread."""
        with self._open(address, accept) as answer:
            data = answer.read(limit + 1)
        if len(data) > limit:
            raise NoAnswer(502, "the package index answers with too much")
        return data

    async def file(self, address: str, algorithm: str, digest: str) -> Reply:
        """A file with that hash (hexadecimal), from the cache or fetched now. Raises NoAnswer."""
        path = self._cache / f"{algorithm}-{digest}"
        async with self.lock(path.name):
            if path.exists():
                os.utime(path)
            else:
                await asyncio.to_thread(self._download, address, algorithm, digest, path)
        return Reply(200, "application/octet-stream", path)

    def _download(self, address: str, algorithm: str, digest: str, path: Path) -> None:
        self._cache.mkdir(parents=True, exist_ok=True)
        hasher, total = hashlib.new(algorithm), 0
        with tempfile.NamedTemporaryFile(dir=self._cache, prefix=".new-", delete=False) as file:
            try:
                with self._open(address, "*/*") as answer:
                    while block := answer.read(_BLOCK):
                        total += len(block)
                        if total > MAX_FILE:
                            raise NoAnswer(502, "the file is too large")
                        hasher.update(block)
                        file.write(block)
                if hasher.hexdigest() != digest:
                    raise NoAnswer(502, "the package index sent a file with another hash than it lists")
                file.flush()
                os.fsync(file.fileno())
                os.rename(file.name, path)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file.name)
                raise

    @contextmanager
    def _open(self, address: str, accept: str) -> Generator[IO[bytes]]:
        try:
            with self._fetch(address, accept) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                raise NoAnswer(404, "the package index has no such thing") from None
            raise NoAnswer(502, f"the package index answers {error.code}") from None
        except OSError as error:
            raise NoAnswer(502, f"the package index does not answer: {error}") from None
