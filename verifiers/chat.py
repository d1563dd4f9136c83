"""A model behind an OpenAI-compatible endpoint, asked for replies in a given JSON schema.

    endpoint = Endpoint("http://127.0.0.1:8000/v1", "some-model")

One `POST /chat/completions` a question, by the standard library. Redirects are not followed, and replies are
data. Left out: streams, tools, several choices.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from sandbox.oci.transport import is_loopback

MAX_REPLY = 1 << 20
_TRIES = 3
_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


class ChatFailed(OSError):
    """The endpoint gave no reply; one sentence, without the key."""


class Endpoint:
    """One model. Holds its key in memory alone: neither `repr` nor an error shows it."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str = "",
        temperature: float = 0.7,
        max_tokens: int = 2048,
        timeout: float = 120,
        at_once: int = 4,
        pause: float = 1.0,
    ) -> None:
        """
        Args:
            url: base of the API, such as `https://host/v1`.
            key: sent as bearer token where not empty.
            timeout: seconds for one try; after the first failure there are two more.
            at_once: questions that run at a time.
            pause: seconds before the second try, doubled before the third.

        Raises ValueError for an URL that is not http or https.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the judge's URL must start with http:// or https://, not {url!r}")
        self.model = model
        self.identity = f"{model} temperature={temperature:g} max_tokens={max_tokens}"
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._key = key
        self._shape = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self._timeout = timeout
        self._pause = pause
        self._slots = asyncio.Semaphore(at_once)
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler({} if is_loopback(parts.netloc) else None),
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(context=ssl.create_default_context()),
            urllib.request.HTTPErrorProcessor(),
            urllib.request.HTTPDefaultErrorHandler(),
        ):
            self._opener.add_handler(handler)

    def __repr__(self) -> str:
        return f"Endpoint({self._url!r}, {self.model!r})"

    async def ask(self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any], seed: int) -> str:
        """The text of the first choice. Raises ChatFailed."""
        shape = {"name": "verdict", "strict": True, "schema": schema}
        body = {
            **self._shape,
            "seed": seed,
            "messages": list(messages),
            "response_format": {"type": "json_schema", "json_schema": shape},
        }
        data = json.dumps(body).encode()
        async with self._slots:
            for attempt in range(_TRIES):
                try:
                    return await asyncio.to_thread(self._post, data)
                except _Busy as error:
                    if attempt + 1 == _TRIES:
                        raise ChatFailed(f"no reply from {self._url}: {error}") from error
                    await asyncio.sleep(self._pause * 2**attempt)
        raise AssertionError("unreachable")

    def _post(self, data: bytes) -> str:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, data, headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                reply = response.read(MAX_REPLY + 1)
        except urllib.error.HTTPError as error:
            with error:
                kind = _Busy if error.code in _AGAIN else ChatFailed
                raise kind(f"{self._url} answers {error.code}") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Busy(f"{error}"[:200] or type(error).__name__) from error
        if len(reply) > MAX_REPLY:
            raise ChatFailed(f"the reply of {self._url} has more than {MAX_REPLY:,} bytes")
        return _content(reply, self._url)


class _Busy(Exception):
    """Worth another try."""


def _content(reply: bytes, url: str) -> str:
    try:
        content: Any = json.loads(reply)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ChatFailed(f"the reply of {url} is no chat completion") from None
    return content if isinstance(content, str) else ""
