"""The engine's API through the docker SDK, off the event loop, with errors of ours.

The SDK is synchronous: calls run in a few threads of this object's own.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, TypeVar

from sandbox.base import SandboxUnavailable

THREADS = 8
SECONDS = 120
T = TypeVar("T")


class NotThere(Exception):
    """The container or image does not exist (any more)."""


def _sdk() -> Any:
    try:
        return importlib.import_module("docker")
    except ImportError as error:
        raise SandboxUnavailable(
            "the docker backend needs the docker SDK: pip install 'posttrain[docker]'"
        ) from error


class Engine:
    """One engine. `url` is a unix socket's (default: $DOCKER_HOST, then the SDK's own default)."""

    def __init__(self, url: str | None = None) -> None:
        self._sdk = _sdk()
        self._errors = self._sdk.errors
        self.url = url or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        if not self.url.startswith("unix://"):
            raise SandboxUnavailable(
                f"the engine at {self.url} is not on this machine: set DOCKER_HOST to a unix:// socket"
            )
        self._api: Any = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="docker")

    @property
    def api(self) -> Any:
        """The SDK's client; made at first use. Raises SandboxUnavailable if nothing answers."""
        if self._api is None:
            self._knock()
            try:
                self._api = self._sdk.APIClient(
                    base_url=self.url, version="auto", timeout=SECONDS, max_pool_size=THREADS
                )
            except self._errors.DockerException as error:
                raise SandboxUnavailable(f"the engine at {self.url} does not answer: {error}") from error
        return self._api

    def _knock(self) -> None:
        """See that somebody listens; the SDK says in three lines, and leaks a socket, when nobody does."""
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect(self.url.removeprefix("unix://"))
            except OSError as error:
                raise SandboxUnavailable(
                    f"no docker engine answers at {self.url} ({error.strerror or error}): "
                    "start dockerd, or set DOCKER_HOST to the unix:// socket of one"
                ) from error

    def info(self) -> dict[str, Any]:
        return self._guard("info", lambda: self.api.info())

    def _guard(self, what: str, call: Callable[[], T]) -> T:
        """Run a call; the SDK's and the transport's errors become ours."""
        try:
            return call()
        except self._errors.NotFound as error:
            raise NotThere(f"{what}: {error.explanation}") from error
        except (self._errors.DockerException, OSError) as error:
            reason = getattr(error, "explanation", None) or error
            raise SandboxUnavailable(f"the docker engine could not {what}: {reason}") from error

    async def call(self, what: str, call: Callable[[], T]) -> T:
        """Run `call` in a thread; `what` completes "the engine could not ..."."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: self._guard(what, call))

    # ---- containers

    async def start(self, options: Mapping[str, Any]) -> str:
        """Create and start a container from the SDK's own arguments; returns its id."""

        def run() -> str:
            made: str = self.api.create_container(**options)["Id"]
            try:
                self.api.start(made)
            except BaseException:
                self.api.remove_container(made, force=True, v=True)
                raise
            return made

        return await self.call("start a container", run)

    async def remove(self, container: str) -> None:
        """Kill and remove; nothing happens if it is gone or just going."""

        def run() -> None:
            try:
                self.api.remove_container(container, force=True, v=True)
            except self._errors.NotFound:
                pass
            except self._errors.APIError as error:
                if error.status_code != 409:  # removal already in progress
                    raise

        await self.call(f"remove container {container[:12]}", run)

    async def inspect(self, container: str) -> dict[str, Any]:
        """Raises NotThere."""
        return await self.call("inspect a container", lambda: self.api.inspect_container(container))

    async def tail(self, container: str) -> str:
        """The last lines that a container printed."""
        text: bytes = await self.call("read a container's log", lambda: self.api.logs(container, tail=5))
        return text.decode(errors="replace").strip()

    async def labelled(self, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """All containers, also ended ones, that carry exactly these labels."""
        wanted = [f"{name}={value}" for name, value in labels.items()]

        def run() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = self.api.containers(all=True, filters={"label": wanted})
            return [each for each in found if all(each["Labels"].get(k) == v for k, v in labels.items())]

        return await self.call("list containers", run)

    # ---- images

    def has_image(self, reference: str) -> bool:
        try:
            self._guard("inspect an image", lambda: self.api.inspect_image(reference))
        except NotThere:
            return False
        return True

    def image_layers(self, repository: str) -> list[list[str]]:
        """Layer digests of every image with a name in that repository."""

        def run() -> list[list[str]]:
            found = self.api.images(name=repository, quiet=True)
            return [self.api.inspect_image(id)["RootFS"].get("Layers") or [] for id in set(found)]

        return self._guard("list images", run)

    def images(self, labels: Mapping[str, str]) -> list[str]:
        """Names of the images that carry these labels."""
        wanted = [f"{name}={value}" for name, value in labels.items()]
        found = self._guard("list images", lambda: self.api.images(filters={"label": wanted}))
        return [name for each in found for name in each["RepoTags"] or ()]

    def untag(self, name: str) -> bool:
        """Remove an image by its name; False if it is in use, or gone already."""

        def run() -> bool:
            try:
                self.api.remove_image(name)
            except self._errors.APIError as error:
                if error.status_code not in (404, 409):
                    raise
                return False
            return True

        return self._guard("remove an image", run)

    def load(self, archive: IO[bytes]) -> None:
        """`docker load` of an archive. Raises SandboxUnavailable with what the engine said."""

        def run() -> None:
            for line in self.api.load_image(archive) or ():
                if "error" in line:
                    raise OSError(line["error"])

        self._guard("load an image", run)

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        if self._api is not None:
            self._api.close()
            self._api = None
