"""HTTP to one registry: credentials, tokens, redirects, patience. See `sandbox.oci.registry`."""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import ipaddress
import json
import os
import re
import ssl
import time
import urllib.request
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlencode, urljoin, urlsplit

from sandbox.oci.documents import MAX_DOCUMENT, ImageError

RETRIES = 5
TIMEOUT_S = 60.0
_BUSY = (429, 500, 502, 503, 504)
_MOVED = (301, 302, 303, 307, 308)
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class RegistryError(ImageError):
    """A registry that refused or could not be reached; the message says which and why."""


def is_loopback(host: str) -> bool:
    """Whether `host[:port]` can only be this machine, where plain HTTP is no risk."""
    name = urlsplit(f"//{host}").hostname or ""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def credentials(host: str) -> str | None:
    """`user:password` that `docker login` stored for the host, None if there are none."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    try:
        stored: Any = json.loads((folder / "config.json").read_bytes())["auths"]
        entry: Any = stored.get(host) or stored[f"https://{host}"]
        return base64.b64decode(entry["auth"]).decode()
    except (OSError, KeyError, json.JSONDecodeError, binascii.Error, UnicodeDecodeError):
        return None


def patience(attempt: int) -> float:
    """Seconds before the next attempt."""
    return min(8.0, 0.2 * 2**attempt)


class Transport:
    """Requests to one registry, each answered or explained by a RegistryError."""

    def __init__(self, host: str, scope: str) -> None:
        self.host = host
        self.root = f"{'http' if is_loopback(host) else 'https'}://{host}"
        self._scope = scope
        self._authorization: str | None = None
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler({} if is_loopback(host) else None),
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(context=ssl.create_default_context()),
        ):
            self._opener.add_handler(handler)

    @contextmanager
    def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        body: bytes | IO[bytes] | None = None,
        accept: Collection[int] = (200,),
    ) -> Generator[http.client.HTTPResponse]:
        """One request to a path or URL of the registry; the response's status is one of `accept`."""
        response = self._answer(method, urljoin(self.root, path), headers, body)
        with contextlib.closing(response):
            if response.status not in accept:
                raise RegistryError(f"{self.host} refused {method} {path}: {_reason(response)}")
            yield response

    def _answer(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | IO[bytes] | None
    ) -> http.client.HTTPResponse:
        asked = False
        moves = 0
        attempt = 0
        while True:
            if body is not None and not isinstance(body, bytes):
                body.seek(0)
            try:
                response = self._send(method, url, headers, body)
            except (OSError, http.client.HTTPException) as error:
                attempt += 1
                if attempt >= RETRIES or isinstance(getattr(error, "reason", None), ssl.SSLError):
                    raise RegistryError(f"{self.host} cannot be reached: {error}") from None
                time.sleep(patience(attempt))
                continue
            if response.status == 401 and not asked:
                asked = True
                challenge = response.getheader("WWW-Authenticate") or ""
                response.close()
                self._authorization = self._authorize(challenge)
            elif response.status in _MOVED and method in ("GET", "HEAD") and moves < 5:
                moves += 1
                target = urljoin(url, response.getheader("Location") or "")
                response.close()
                if urlsplit(target).scheme not in ("https", urlsplit(self.root).scheme):
                    raise RegistryError(f"{self.host} redirects to {target[:200]}, which is not HTTPS")
                url = target
            elif response.status in _BUSY and attempt < RETRIES - 1:
                attempt += 1
                wait = response.getheader("Retry-After") or ""
                response.close()
                time.sleep(min(30.0, float(wait)) if wait.isdigit() else patience(attempt))
            else:
                return response

    def _send(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | IO[bytes] | None
    ) -> http.client.HTTPResponse:
        request = urllib.request.Request(url, data=body, headers=dict(headers), method=method)
        if self._authorization and url.startswith(f"{self.root}/"):  # never to where a redirect leads
            request.add_unredirected_header("Authorization", self._authorization)
        response: Any = self._opener.open(request, timeout=TIMEOUT_S)
        return response

    def _authorize(self, challenge: str) -> str:
        """The Authorization header that the registry's challenge asks for."""
        known = credentials(self.host)
        basic = f"Basic {base64.b64encode(known.encode()).decode()}" if known else None
        kind = challenge.partition(" ")[0].lower()
        if kind == "basic":
            if basic is None:
                raise RegistryError(f"{self.host} wants a login: run `docker login {self.host}`")
            return basic
        fields: dict[str, str] = dict(_CHALLENGE.findall(challenge))
        realm = fields.get("realm", "")
        if kind != "bearer" or urlsplit(realm).scheme not in ("https", urlsplit(self.root).scheme):
            raise RegistryError(f"{self.host} wants credentials in an unknown way: {challenge[:100]!r}")
        query = urlencode({"service": fields.get("service", ""), "scope": self._scope})
        request = urllib.request.Request(f"{realm}{'&' if '?' in realm else '?'}{query}")
        if basic:
            request.add_unredirected_header("Authorization", basic)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as response:
                if response.status != 200:
                    why = _reason(response)
                    raise RegistryError(f"{self.host} gives no token: {why}; try `docker login {self.host}`")
                answer = json.loads(response.read(MAX_DOCUMENT))
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise RegistryError(f"the token server of {self.host} does not answer: {error}") from None
        token = answer.get("token") or answer.get("access_token")
        if not isinstance(token, str):
            raise RegistryError(f"the token server of {self.host} sent no token")
        return f"Bearer {token}"


def _reason(response: http.client.HTTPResponse) -> str:
    """Status and the registry's own words, short and printable."""
    said = ""
    with contextlib.suppress(
        OSError, http.client.HTTPException, json.JSONDecodeError, LookupError, TypeError
    ):
        first = json.loads(response.read(4096))["errors"][0]
        said = f" {first.get('code', '')} {first.get('message', '')}"
    text = f"{response.status} {response.reason}{said}"
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:300]
