"""Package indexes as they were on a day: PyPI's below /simple/ and /files/, npm's below /npm/.

Names in `without` do not exist at all, so that a package under repair cannot be installed over its own bug.
Upload times tell when something came, not what the index looked like: a release that was deleted since is
missing, one that was yanked since is marked so.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import date
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sandbox.network import npm, pypi
from sandbox.network.upstream import Fetch, NoAnswer, Reply, Upstream, fetch


class PackageIndex:
    """Both indexes, cut at one day. Files are kept in `cache` by their hash."""

    def __init__(
        self,
        before: date,
        cache: Path,
        *,
        upstream: str | None = None,
        npm_upstream: str | None = None,
        without: Collection[str] = (),
        fetch: Fetch = fetch,
    ) -> None:
        """`before`: the first day (UTC) whose uploads do not exist. The upstreams are the host's own unless
        given. ValueError for one that is no address."""
        urls = (upstream or pypi.default_url(), npm_upstream or npm.default_url())
        for url in urls:
            if urlsplit(url).scheme not in ("http", "https"):
                raise ValueError(f"the package index {url!r} is no http(s) address")
        asks = Upstream(cache, fetch)
        self._python = pypi.PythonIndex(before, asks, urls[0], without)
        self._node = npm.NpmIndex(before, asks, urls[1], without)

    async def get(self, path: str, accept: str = "", origin: str = "") -> Reply:
        """Answer a request for an absolute path; `origin` is this server's address as the client sees it."""
        parts = [unquote(part) for part in path.partition("?")[0].split("/") if part]
        try:
            if parts[:1] == ["npm"]:
                rest = parts[1:]
                return await self._node.get(rest, f"{origin}/npm")
            return await self._python.get(parts, accept)
        except NoAnswer as error:
            return Reply(error.status, "text/plain; charset=utf-8", f"{error}\n".encode())
