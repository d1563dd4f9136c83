"""The API server, through the official asyncio client: requests, typed errors, exec streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlencode

from sandbox.base import SandboxLost, SandboxUnavailable
from sandbox.kubernetes import errors
from sandbox.kubernetes.execstream import PROTOCOLS, ExecStream
from sandbox.kubernetes.official import aiohttp, client, config
from sandbox.kubernetes.settings import KubernetesSettings

ATTEMPTS = 6
REQUEST_SECONDS = 30.0
PARALLEL = 32
"""Requests under way at once; more only queue in the API server's own fairness."""
LINE_BYTES = 4 << 20


class Cluster:
    """One connection pool to one API server; belongs to one event loop."""

    def __init__(self, settings: KubernetesSettings) -> None:
        self.settings = settings
        self.namespace = settings.namespace
        self._api: Any = None
        self._gate = asyncio.Semaphore(PARALLEL)
        self.clock_offset = 0.0
        """Seconds that the server's clock is ahead of ours."""

    async def open(self) -> None:
        """Load the configuration. SandboxUnavailable that says what is missing."""
        configuration = client.Configuration()
        try:
            await self._configure(configuration)
        except (config.ConfigException, OSError, ValueError) as error:
            raise SandboxUnavailable(
                f"no cluster is configured ({error}): set KUBECONFIG, or run inside one"
            ) from error
        configuration.connection_pool_maxsize = 0  # every living sandbox holds a connection
        configuration.client_side_validation = True
        self._api = client.ApiClient(configuration)
        self.core = client.CoreV1Api(self._api)
        self.networking = client.NetworkingV1Api(self._api)
        self.coordination = client.CoordinationV1Api(self._api)

    async def _configure(self, configuration: Any) -> None:
        settings = self.settings
        if settings.kubeconfig is None and settings.context is None:
            with contextlib.suppress(config.ConfigException):
                config.load_incluster_config(client_configuration=configuration)
                return
        await config.load_kube_config(
            config_file=str(settings.kubeconfig) if settings.kubeconfig else None,
            context=settings.context,
            client_configuration=configuration,
            persist_config=False,
        )

    async def close(self) -> None:
        if self._api is not None:
            await self._api.close()
            self._api = None

    @property
    def api(self) -> Any:
        if self._api is None:
            raise SandboxLost("the provider of this sandbox is closed")
        return self._api

    async def call(
        self,
        doing: str,
        function: Callable[..., Awaitable[Any]],
        *arguments: Any,
        accept: Sequence[int] = (),
        **options: Any,
    ) -> dict[str, Any] | None:
        """Call an operation's raw form; its JSON, or None for a status in `accept`.

        Connection failures, 429 and 5xx are tried again (every operation we use may be repeated: creations
        have names of their own). Raises the typed error of `errors.refusal` for other answers.
        """
        wait, problem = 0.1, ""
        for _ in range(ATTEMPTS):
            try:
                async with self._gate:
                    response = await function(*arguments, _request_timeout=REQUEST_SECONDS, **options)
                    body = await response.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                self._note_clock(response.headers.get("Date"))
                if response.status < 300:
                    return json.loads(body) if body else {}
                if response.status in accept:
                    return None
                if response.status != 429 and response.status < 500:
                    raise errors.refusal(response.status, body, doing)
                problem = f"status {response.status}: {errors.message_of(body)}"
                wait = max(wait, _seconds(response.headers.get("Retry-After")))
            await asyncio.sleep(wait)
            wait = min(wait * 2, 5.0)
        raise SandboxUnavailable(f"the API server does not answer while {doing}: {problem}")

    def _note_clock(self, date: str | None) -> None:
        if date:
            with contextlib.suppress(ValueError):
                self.clock_offset = parsedate_to_datetime(date).timestamp() - time.time()

    async def watch(self, selector: str, version: str, seconds: int) -> AsyncIterator[dict[str, Any]]:
        """Events of pods after `version`, until the server ends the watch; raw, errors included."""
        response = await self.core.list_namespaced_pod_without_preload_content(
            self.namespace,
            label_selector=selector,
            resource_version=version,
            watch=True,
            allow_watch_bookmarks=True,
            timeout_seconds=seconds,
            _request_timeout=float(seconds + 30),
        )
        try:
            if response.status >= 300:
                text = (await response.read()).decode(errors="replace")
                yield {
                    "type": "ERROR",
                    "object": {"code": response.status, "message": errors.message_of(text)},
                }
                return
            while line := await response.content.readline():
                if not line.endswith(b"\n"):
                    return  # cut in the middle
                yield json.loads(line)
        finally:
            response.close()

    async def exec(self, pod: str, command: Sequence[str], *, stdin: bool = True) -> ExecStream:
        """Run a command in the pod's container over a websocket. Raises SandboxLost if there is no such pod,
        SandboxUnavailable for other refusals, OSError for a connection that fails."""
        query = [("command", word) for word in command]
        query += [("container", "sandbox"), ("stderr", "true"), ("stdout", "true"), ("tty", "false"),
                  ("stdin", str(stdin).lower())]  # fmt: skip
        api = self.api
        headers: dict[str, str] = {}
        await api.update_params_for_auth(headers, [], ["BearerToken"], "", "GET", None)
        host = api.configuration.host.replace("http", "ws", 1)
        url = f"{host}/api/v1/namespaces/{self.namespace}/pods/{pod}/exec?{urlencode(query)}"
        session = api.rest_client.pool_manager
        if session is None:
            session = api.rest_client.pool_manager = api.rest_client._create_pool_manager()
        extra = {"server_hostname": name} if (name := api.configuration.tls_server_name) else {}
        try:
            socket = await session.ws_connect(
                url,
                headers=headers,
                protocols=PROTOCOLS,
                max_msg_size=0,
                proxy=api.configuration.proxy,
                **extra,
            )
        except aiohttp.WSServerHandshakeError as error:
            raise errors.refusal(error.status, error.message, f"starting a command in pod {pod}") from error
        except aiohttp.ClientError as error:
            raise ConnectionError(f"no exec stream to pod {pod}: {error}") from error
        return ExecStream(socket)


def _seconds(text: str | None) -> float:
    try:
        return min(float(text or 0), 30.0)
    except ValueError:
        return 0.0
