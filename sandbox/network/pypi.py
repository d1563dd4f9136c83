"""PyPI's simple API (PEP 503, 691, 714) without what came later than a day.

Serves `/simple/NAME/` and `/files/NAME/FILE[.metadata]`. Listings come from the host's index in JSON with
upload times (PEP 700); a file without one does not exist here. Only files of a filtered listing can be
fetched, and only with the hash that the listing gives.
"""

from __future__ import annotations

import asyncio
import html
import json
import os
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, cast
from urllib.parse import quote, urljoin

from sandbox.network.upstream import NoAnswer, Reply, Upstream

JSON = "application/vnd.pypi.simple.v1+json"
HTML = "application/vnd.pypi.simple.v1+html"
MAX_LISTING = 128 << 20
FRESH_S = 600.0


@dataclass(frozen=True, slots=True)
class _File:
    filename: str
    url: str
    sha256: str
    metadata_sha256: str | None
    entry: dict[str, Any]


def default_url() -> str:
    """The host's index: $PIP_INDEX_URL, or pypi.org."""
    return os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"


class PythonIndex:
    """One index of Python packages, cut at one day."""

    def __init__(self, before: date, upstream: Upstream, url: str, without: Collection[str]) -> None:
        self.before = before
        self.without = frozenset(normalised(name) for name in without)
        self._cut = datetime(before.year, before.month, before.day, tzinfo=UTC)
        self._upstream = upstream
        self._url = url.rstrip("/")
        self._listings: dict[str, tuple[float, dict[str, _File]]] = {}

    async def get(self, parts: Sequence[str], accept: str) -> Reply:
        """Answer for the parts of a path. Raises NoAnswer."""
        if len(parts) == 2 and parts[0] == "simple":
            name = normalised(parts[1])
            files = await self._listing(name)
            return _as_json(name, files) if JSON in accept else _as_html(name, files)
        if len(parts) == 3 and parts[0] == "files":
            return await self._file(normalised(parts[1]), parts[2])
        raise NoAnswer(404, "this index answers /simple/NAME/ and the files that it lists")

    async def _listing(self, name: str) -> dict[str, _File]:
        """Files of a package that existed before the day, by file name."""
        if name in self.without:
            raise NoAnswer(404, f"{name} is not offered to this sandbox")
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name):
            raise NoAnswer(404, "that is no package's name")
        async with self._upstream.lock(f"pypi {name}"):
            known = self._listings.get(name)
            if known is None or time.monotonic() - known[0] > FRESH_S:
                files = await asyncio.to_thread(self._load, name)
                known = self._listings[name] = (time.monotonic(), files)
        if not known[1]:
            raise NoAnswer(404, f"{name} had no release before {self.before}")
        return known[1]

    def _load(self, name: str) -> dict[str, _File]:
        address = f"{self._url}/{name}/"
        data = self._upstream.read(address, JSON, MAX_LISTING)
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
            return await self._upstream.file(file.url, "sha256", file.sha256)
        file = files.get(filename.removesuffix(".metadata"))
        if file is None or file.metadata_sha256 is None:
            raise NoAnswer(404, f"{filename} did not exist before {self.before}")
        return await self._upstream.file(f"{file.url}.metadata", "sha256", file.metadata_sha256)


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
