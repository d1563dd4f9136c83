"""npm's registry without what came later than a day.

Serves `/npm/NAME` (also `@SCOPE/NAME`) and the tarballs listed there. Documents come from the host's registry
in their full form, whose `time` says when each version came; a version without a time does not exist here.
The tag `latest`, if its version came later, means the highest version that is no pre-release.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Any
from urllib.parse import quote

from sandbox.network.upstream import NoAnswer, Reply, Upstream

MAX_DOCUMENT = 256 << 20
FRESH_S = 600.0
_NAME = re.compile(r"(@[a-z0-9~-][a-z0-9._~-]*/)?[a-z0-9~-][a-z0-9._~-]*")
_STRENGTH = ("sha512", "sha384", "sha256", "sha1")


def default_url() -> str:
    """The host's registry: $npm_config_registry, or npmjs.org."""
    for name in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
        if os.environ.get(name):
            return os.environ[name]
    return "https://registry.npmjs.org"


class NpmIndex:
    """One registry of npm packages, cut at one day."""

    def __init__(self, before: date, upstream: Upstream, url: str, without: Collection[str]) -> None:
        self.before = before
        self.without = frozenset(name.lower() for name in without)
        self._cut = datetime(before.year, before.month, before.day, tzinfo=UTC)
        self._upstream = upstream
        self._url = url.rstrip("/")
        self._documents: dict[str, tuple[float, dict[str, Any]]] = {}

    async def get(self, parts: Sequence[str], base: str) -> Reply:
        """Answer for the parts of a path below `/npm`; `base` is the address of that. Raises NoAnswer."""
        if len(parts) == 3 and parts[0] == "-":
            return await self._tarball(parts[1], parts[2].removesuffix(".tgz"))
        name = "/".join(parts).lower()
        if not _NAME.fullmatch(name):
            raise NoAnswer(404, "that is no package's name")
        document = await self._document(name)
        versions = {
            version: {**entry, "dist": {**entry["dist"], "tarball": _place(base, name, version)}}
            for version, entry in document["versions"].items()
        }
        body = json.dumps({**document, "versions": versions}).encode()
        return Reply(200, "application/json", body)

    async def _document(self, name: str) -> dict[str, Any]:
        if name in self.without:
            raise NoAnswer(404, f"{name} is not offered to this sandbox")
        async with self._upstream.lock(f"npm {name}"):
            known = self._documents.get(name)
            if known is None or time.monotonic() - known[0] > FRESH_S:
                document = await asyncio.to_thread(self._load, name)
                known = self._documents[name] = (time.monotonic(), document)
        if not known[1]["versions"]:
            raise NoAnswer(404, f"{name} had no release before {self.before}")
        return known[1]

    def _load(self, name: str) -> dict[str, Any]:
        data = self._upstream.read(f"{self._url}/{quote(name, safe='@')}", "application/json", MAX_DOCUMENT)
        try:
            return cut(json.loads(data), self._cut)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise NoAnswer(502, f"the registry does not tell when the versions of {name} came") from None

    async def _tarball(self, name: str, version: str) -> Reply:
        if not _NAME.fullmatch(name):
            raise NoAnswer(404, "that is no package's name")
        entry = (await self._document(name))["versions"].get(version)
        if entry is None:
            raise NoAnswer(404, f"{name} {version} did not exist before {self.before}")
        found = _hash(entry["dist"])
        if found is None:
            raise NoAnswer(502, f"the registry lists {name} {version} without a hash")
        return await self._upstream.file(entry["dist"]["tarball"], *found)


def cut(document: Mapping[str, Any], day: datetime) -> dict[str, Any]:
    """The document as if nothing had come since `day`. KeyError or TypeError if it has no times."""
    times: dict[str, str] = document["time"]
    kept: dict[str, Any] = {
        version: entry
        for version, entry in document["versions"].items()
        if version in times and _when(times[version]) < day
    }
    tags = {tag: version for tag, version in document.get("dist-tags", {}).items() if version in kept}
    if kept and "latest" not in tags:
        tags["latest"] = max(kept, key=_order)
    return {
        "name": document["name"],
        "dist-tags": tags,
        "versions": kept,
        "time": {version: times[version] for version in kept},
    }


def _when(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _order(version: str) -> tuple[bool, tuple[int, ...], str]:
    """Sorts releases above pre-releases, then by number."""
    core, _, further = version.partition("+")[0].partition("-")
    return not further, tuple(int(part) if part.isdigit() else 0 for part in core.split(".")), further


def _hash(dist: Mapping[str, Any]) -> tuple[str, str] | None:
    """(algorithm, hexadecimal digest), the strongest that is listed."""
    listed: dict[str, str] = {}
    for word in str(dist.get("integrity", "")).split():
        algorithm, _, encoded = word.partition("-")
        try:
            listed.setdefault(algorithm, base64.b64decode(encoded, validate=True).hex())
        except binascii.Error:
            continue
    if isinstance(dist.get("shasum"), str) and re.fullmatch(r"[0-9a-f]{40}", dist["shasum"]):
        listed.setdefault("sha1", dist["shasum"])
    return next(((name, listed[name]) for name in _STRENGTH if listed.get(name)), None)


def _place(base: str, name: str, version: str) -> str:
    return f"{base}/-/{quote(name, safe='')}/{quote(version, safe='')}.tgz"
