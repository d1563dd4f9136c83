"""A package index as it was on a day: PyPI's simple API (PEP 503, 691, 714) without what came later.

Serves `/simple/NAME/` and `/files/NAME/FILE[.metadata]`. Listings come from the host's index in JSON with
upload times (PEP 700); a file without one does not exist here. Only files of a filtered listing can be
fetched, and only with the hash that the listing gives. Names in `without` do not exist at all, so that a
package under repair cannot be installed over its own bug.

Upload times tell when a file came, not what the index looked like: a release that was deleted since is
missing, one that was yanked since is marked so.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import html
import json
import os
import re
import ssl
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

JSON = "application/vnd.pypi.simple.v1+json"
HTML = "application/vnd.pypi.simple.v1+html"
MAX_LISTING = 128 << 20
MAX_FILE = 4 << 30
FRESH_S = 600.0
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


@dataclass(frozen=True, slots=True)
class _File:
    filename: str
    url: str
    sha256: str
    metadata_sha256: str | None
    entry: dict[str, Any]


def default_upstream() -> str:
    """The host's index: $PIP_INDEX_URL, or pypi.org."""
    return os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"


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


class PackageIndex:
    """One index, cut at one day. Files are kept in `cache` by their hash."""

    def __init__(
        self,
        before: date,
        cache: Path,
        *,
        upstream: str | None = None,
        without: Collection[str] = (),
        fetch: Fetch = fetch,
    ) -> None:
        """`before`: the first day (UTC) whose uploads do not exist. ValueError for an `upstream` that is no
        address."""
        self.before = before
        self.without = frozenset(normalised(name) for name in without)
        self._cut = datetime(before.year, before.month, before.day, tzinfo=UTC)
        self._upstream = (upstream or default_upstream()).rstrip("/")
        if urlsplit(self._upstream).scheme not in ("http", "https"):
            raise ValueError(f"the package index {self._upstream!r} is no http(s) address")
        self._cache = cache
        self._fetch = fetch
        self._listings: dict[str, tuple[float, dict[str, _File]]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def get(self, path: str, accept: str = "") -> Reply:
        """Answer a request for an absolute path."""
        parts = [unquote(part) for part in path.partition("?")[0].split("/") if part]
        try:
            if len(parts) == 2 and parts[0] == "simple":
                name = normalised(parts[1])
                files = await self._listing(name)
                return _as_json(name, files) if JSON in accept else _as_html(name, files)
            if len(parts) == 3 and parts[0] == "files":
                return await self._file(normalised(parts[1]), parts[2])
            raise NoAnswer(404, "this index answers /simple/NAME/ and the files that it lists")
        except NoAnswer as error:
            return Reply(error.status, "text/plain; charset=utf-8", f"{error}\n".encode())

    async def _listing(self, name: str) -> dict[str, _File]:
        """Files of a package that existed before the day, by file name."""
        if name in self.without:
            raise NoAnswer(404, f"{name} is not offered to this sandbox")
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name):
            raise NoAnswer(404, "that is no package's name")
        async with self._locks.setdefault(name, asyncio.Lock()):
            known = self._listings.get(name)
            if known is None or time.monotonic() - known[0] > FRESH_S:
                files = await asyncio.to_thread(self._load, name)
                known = self._listings[name] = (time.monotonic(), files)
        if not known[1]:
            raise NoAnswer(404, f"{name} had no release before {self.before}")
        return known[1]

    def _load(self, name: str) -> dict[str, _File]:
        address = f"{self._upstream}/{name}/"
        data = self._read(address, JSON, MAX_LISTING)
        try:
            listing: dict[str, Any] = json.loads(data)
            entries: list[dict[str, Any]] = listing["files"]
            timed = [entry for entry in entries if entry.get("upload-time")]
            if entries and not timed:
                raise NoAnswer(502, f"the package index tells no upload times of {name}: it cannot be cut")
            found = [
                _file(entry, address)
                for entry in timed
                if datetime.fromisoformat(entry["upload-time"]).replace(tzinfo=UTC) < self._cut
            ]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise NoAnswer(502, f"the package index answers for {name} unlike PEP 691") from None
        return {file.filename: file for file in found if file is not None}

    async def _file(self, name: str, filename: str) -> Reply:
        files = await self._listing(name)
        file = files.get(filename)
        if file is not None:
            return await self._cached(file.url, file.sha256)
        file = files.get(filename.removesuffix(".metadata"))
        if file is None or file.metadata_sha256 is None:
            raise NoAnswer(404, f"{filename} did not exist before {self.before}")
        return await self._cached(f"{file.url}.metadata", file.metadata_sha256)

    async def _cached(self, address: str, sha256: str) -> Reply:
        path = self._cache / sha256
        async with self._locks.setdefault(sha256, asyncio.Lock()):
            if not path.exists():
                await asyncio.to_thread(self._download, address, sha256, path)
        return Reply(200, "application/octet-stream", path)

    def _download(self, address: str, sha256: str, path: Path) -> None:
        self._cache.mkdir(parents=True, exist_ok=True)
        hasher, total = hashlib.sha256(), 0
        with tempfile.NamedTemporaryFile(dir=self._cache, prefix=".new-", delete=False) as file:
            try:
                with self._open(address, "*/*") as answer:
                    while block := answer.read(_BLOCK):
                        total += len(block)
                        if total > MAX_FILE:
                            raise NoAnswer(502, "the file is too large")
                        hasher.update(block)
                        file.write(block)
                if hasher.hexdigest() != sha256:
                    raise NoAnswer(502, "the package index sent a file with another hash than it lists")
                file.flush()
                os.fsync(file.fileno())
                os.rename(file.name, path)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file.name)
                raise

    def _read(self, address: str, accept: str, limit: int) -> bytes:
        with self._open(address, accept) as answer:
            data = answer.read(limit + 1)
        if len(data) > limit:
            raise NoAnswer(502, "the package index answers with too much")
        return data

    @contextlib.contextmanager
    def _open(self, address: str, accept: str) -> Any:
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


def normalised(name: str) -> str:
    """PEP 503's form of a package name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _file(entry: dict[str, Any], page: str) -> _File | None:
    """None for a file without a hash or with a name that is a path."""
    filename, digest = entry["filename"], entry.get("hashes", {}).get("sha256")
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest) or "/" in filename:
        return None
    metadata: Any = entry.get("core-metadata") or entry.get("dist-info-metadata")
    metadata_digest: Any = (
        cast(dict[str, Any], metadata).get("sha256") if isinstance(metadata, dict) else None
    )
    if not isinstance(metadata_digest, str) or not re.fullmatch(r"[0-9a-f]{64}", metadata_digest):
        metadata_digest = None
    kept = {key: entry[key] for key in ("requires-python", "size", "upload-time", "yanked") if key in entry}
    return _File(filename, urljoin(page, entry["url"]), digest, metadata_digest, kept)


def _place(name: str, file: _File) -> str:
    return f"../../files/{quote(name)}/{quote(file.filename)}"


def _as_json(name: str, files: dict[str, _File]) -> Reply:
    entries = [
        {
            "filename": file.filename,
            "url": _place(name, file),
            "hashes": {"sha256": file.sha256},
            "core-metadata": {"sha256": file.metadata_sha256} if file.metadata_sha256 else False,
            **file.entry,
        }
        for file in files.values()
    ]
    body = json.dumps({"meta": {"api-version": "1.0"}, "name": name, "files": entries}).encode()
    return Reply(200, JSON, body)


def _as_html(name: str, files: dict[str, _File]) -> Reply:
    lines: list[str] = []
    for file in files.values():
        attributes = {"href": f"{_place(name, file)}#sha256={file.sha256}"}
        if requires := file.entry.get("requires-python"):
            attributes["data-requires-python"] = str(requires)
        if yanked := file.entry.get("yanked"):
            attributes["data-yanked"] = yanked if isinstance(yanked, str) else ""
        if file.metadata_sha256:
            attributes["data-core-metadata"] = f"sha256={file.metadata_sha256}"
        written = " ".join(f'{key}="{html.escape(value)}"' for key, value in attributes.items())
        lines.append(f"<a {written}>{html.escape(file.filename)}</a><br>")
    head = f'<!DOCTYPE html><meta name="pypi:repository-version" content="1.0"><title>{name}</title>'
    return Reply(200, f"{HTML}; charset=utf-8", "\n".join([head, *lines]).encode())
