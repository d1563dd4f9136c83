"""The package index that the user's pip is set up for, read without pip.

The settings come from `pip config list` (files and environment: index-url, extra-index-url, cert,
trusted-host, proxy). Pages are the simple repository API: JSON (PEP 691) or HTML (PEP 503). Nothing
fetched here is ever executed; every file with a published hash is checked against it.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import html.parser
import json
import os
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envfactory.errors import SourceError

_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_PAGE_LIMIT = 64 << 20


@dataclass(frozen=True, slots=True)
class IndexFile:
    """One file that an index offers."""

    name: str
    url: str
    sha256: str | None
    requires_python: str | None
    uploaded: str | None
    """ISO 8601 time, where the index says it."""
    yanked: bool


def pip_settings() -> dict[str, str]:
    """pip's settings by bare name (`index-url`), environment above `download` above `global`."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise SourceError(
            f"pip does not run under {sys.executable}: install it (python3 -m ensurepip)"
        ) from error
    ranks = {"global": 0, "download": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        if section in ranks and value[:1] in "'\"":
            text = str(ast.literal_eval(value))
            if name not in found or found[name][0] <= ranks[section]:
                found[name] = (ranks[section], text)
    return {name: value for name, (_, value) in found.items()}


class PackageIndex:
    """Reads the configured indexes, first the main one, then the extra ones."""

    def __init__(self, settings: Mapping[str, str] | None = None, *, timeout: float = 60) -> None:
        self.settings = dict(pip_settings() if settings is None else settings)
        self.timeout = timeout
        self.urls = [self.settings.get("index-url", "https://pypi.org/simple").strip()]
        self.urls += self.settings.get("extra-index-url", "").split()
        handlers: list[Any] = [urllib.request.HTTPSHandler(context=self._tls())]
        if proxy := self.settings.get("proxy"):
            handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
        self._opener = urllib.request.build_opener(*handlers)

    def _tls(self) -> ssl.SSLContext:
        bundle = self.settings.get("cert") or os.environ.get("SSL_CERT_FILE") or None
        if bundle and not Path(bundle).exists():
            raise SourceError(
                f"the certificate bundle {bundle} does not exist: mend pip's `cert` or SSL_CERT_FILE"
            )
        folder = bundle if bundle and Path(bundle).is_dir() else None
        context = ssl.create_default_context(cafile=None if folder else bundle, capath=folder)
        hosts = {urllib.parse.urlsplit(url).hostname for url in self.urls}
        if hosts & {host.partition(":")[0] for host in self.settings.get("trusted-host", "").split()}:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    def files(self, package: str) -> list[IndexFile]:
        """What the indexes offer for a package; a name found in two of them counts once.

        Raises SourceError when none knows the package or one cannot be reached.
        """
        found: dict[str, IndexFile] = {}
        for base in self.urls:
            page = self._page(base, package)
            for file in page:
                found.setdefault(file.name, file)
        if not found:
            raise SourceError(f"package {package} does not exist on {self._hosts()}: check the spelling")
        return list(found.values())

    def _hosts(self) -> str:
        names = [urllib.parse.urlsplit(url).hostname or "a local folder" for url in self.urls]
        return ", ".join(dict.fromkeys(names))

    def _page(self, base: str, package: str) -> list[IndexFile]:
        url = f"{base.rstrip('/')}/{package}/"
        local = url.startswith("file:")
        if local:
            url += "index.html"
        try:
            with self._open(url, {"Accept": _ACCEPT}) as answer:
                body, kind = answer.read(_PAGE_LIMIT), answer.headers.get("Content-Type") or ""
                url = answer.geturl()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (404, 410):
                return []
            raise SourceError(
                f"the package index answered {error.code} for {package}: check pip's index-url"
            ) from error
        except OSError as error:
            if local:
                return []
            raise _unreachable(url, error) from error
        return _json_page(body, url) if "json" in kind else _html_page(body.decode(errors="replace"), url)

    def _open(self, url: str, headers: Mapping[str, str]) -> Any:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("https", "http", "file"):
            raise SourceError(
                f"the package index uses {parts.scheme}://: https, http and file are understood"
            )
        sent = {"User-Agent": "posttrain", **headers}
        if parts.username:
            pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            sent["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
            host = parts.hostname or ""
            netloc = f"{host}:{parts.port}" if parts.port else host
            url = urllib.parse.urlunsplit(parts._replace(netloc=netloc))
        return self._opener.open(urllib.request.Request(url, headers=sent), timeout=self.timeout)

    def download(self, file: IndexFile, *, limit: int = 256 << 20) -> bytes:
        """The bytes of a file, checked against its published hash. Raises SourceError."""
        try:
            with self._open(file.url, {}) as answer:
                data: bytes = answer.read(limit + 1)
        except OSError as error:
            raise _unreachable(file.url, error) from error
        if len(data) > limit:
            raise SourceError(f"{file.name} is larger than {limit >> 20} MiB: choose a smaller package")
        if file.sha256 and hashlib.sha256(data).hexdigest() != file.sha256:
            raise SourceError(f"{file.name} does not have the hash that its index publishes: try again later")
        return data


def _unreachable(url: str, error: OSError) -> SourceError:
    host = urllib.parse.urlsplit(url).hostname
    reason = getattr(error, "reason", None) or error
    return SourceError(
        f"cannot reach {host} ({reason}): check the network, pip's index-url and its certificate"
    )


def _json_page(body: bytes, url: str) -> list[IndexFile]:
    files: list[IndexFile] = []
    for row in json.loads(body).get("files", []):
        files.append(
            IndexFile(
                name=str(row["filename"]),
                url=urllib.parse.urljoin(url, str(row["url"])),
                sha256=row.get("hashes", {}).get("sha256"),
                requires_python=row.get("requires-python"),
                uploaded=row.get("upload-time"),
                yanked=bool(row.get("yanked")),
            )
        )
    return files


def _html_page(text: str, url: str) -> list[IndexFile]:
    files: list[IndexFile] = []

    class Anchors(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            values = dict(attrs)
            if tag != "a" or not values.get("href"):
                return
            address, _, fragment = urllib.parse.urljoin(url, values["href"] or "").partition("#")
            digest = re.fullmatch(r"sha256=([0-9a-f]{64})", fragment)
            files.append(
                IndexFile(
                    name=urllib.parse.unquote(address.rpartition("/")[2]),
                    url=address,
                    sha256=digest.group(1) if digest else None,
                    requires_python=values.get("data-requires-python"),
                    uploaded=None,
                    yanked="data-yanked" in values,
                )
            )

    Anchors().feed(text)
    return files
