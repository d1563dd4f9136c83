"""What the API server says of our pods: one list and one watch for a whole client.

A watch ends all the time (timeouts, restarts, cut connections) and is taken up at the last version seen; a
version that the server no longer has (410 Gone) means listing anew, and what happened in between shows as
the difference. No event is needed for correctness: each wait also looks at the latest state known.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from sandbox.base import SandboxError
from sandbox.kubernetes.cluster import Cluster
from sandbox.kubernetes.official import aiohttp

WATCH_SECONDS = 300
LOOK_SECONDS = 1.0
FIRST_WAIT = 0.05
LONGEST_WAIT = 5.0


class PodWatch:
    """The latest state of every pod that `selector` matches."""

    def __init__(self, cluster: Cluster, selector: str, changed: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._selector = selector
        self._changed = changed
        self.pods: dict[str, dict[str, Any]] = {}
        self._events: dict[str, asyncio.Event] = {}
        self._task: asyncio.Task[None] | None = None
        self.lists = 0
        """How often everything was listed: once, and after every 410."""
        self.watches = 0

    async def start(self) -> None:
        """List once, so that errors of access show here, then follow in the background."""
        if self._task is None:
            version = await self._list()
            self._task = asyncio.create_task(self._follow(version))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def until(
        self, name: str, settled: Callable[[dict[str, Any] | None], bool], seconds: float
    ) -> bool:
        """Wait until `settled` holds for the pod's latest state (None: it is not there), False if it never
        did. `settled` is asked at every change and once a second."""
        event = self._events.setdefault(name, asyncio.Event())
        try:
            async with asyncio.timeout(seconds):
                while not settled(self.pods.get(name)):
                    event.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_SECONDS):
                            await event.wait()
        except TimeoutError:
            return False
        finally:
            self._events.pop(name, None)
        return True

    def learn(self, pod: dict[str, Any]) -> None:
        """A state from an answer to a request of ours; older than what is known, it is dropped."""
        name = pod["metadata"]["name"]
        known = self.pods.get(name)
        if known is None or _version(known) < _version(pod):
            self._set(name, pod)

    def _set(self, name: str, pod: dict[str, Any] | None) -> None:
        if pod is None:
            self.pods.pop(name, None)
        else:
            self.pods[name] = pod
        if (event := self._events.get(name)) is not None:
            event.set()
        self._changed(name)

    async def _list(self) -> str:
        cluster = self._cluster
        found: dict[str, dict[str, Any]] = {}
        more: dict[str, Any] = {}
        while True:
            answer = await cluster.call(
                "listing pods",
                cluster.core.list_namespaced_pod_without_preload_content,
                cluster.namespace,
                label_selector=self._selector,
                limit=500,
                **more,
            )
            assert answer is not None
            found |= {pod["metadata"]["name"]: pod for pod in answer["items"]}
            if not (token := answer["metadata"].get("continue")):
                break
            more = {"_continue": token}
        self.lists += 1
        for name in self.pods.keys() - found.keys():
            self._set(name, None)
        for name, pod in found.items():
            if self.pods.get(name, {}).get("metadata", {}).get("resourceVersion") != _text(pod):
                self._set(name, pod)
        return answer["metadata"]["resourceVersion"]

    async def _follow(self, version: str) -> None:
        wait = FIRST_WAIT
        while True:
            try:
                if not version:
                    version = await self._list()
                self.watches += 1
                async for event in self._cluster.watch(self._selector, version, WATCH_SECONDS):
                    wait = FIRST_WAIT
                    version = self._event(event, version)
                    if not version:
                        break
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, SandboxError):
                pass  # the state that we have stays; the next round takes up where it ends
            await asyncio.sleep(wait)
            wait = min(wait * 2, LONGEST_WAIT)

    def _event(self, event: dict[str, Any], version: str) -> str:
        """Take one event; the version to go on from, "" to list anew."""
        pod = event["object"]
        if event["type"] == "ERROR":
            return "" if pod.get("code") in (410, 504) else version
        if event["type"] != "BOOKMARK":
            self._set(pod["metadata"]["name"], None if event["type"] == "DELETED" else pod)
        return _text(pod) or version


def _text(pod: dict[str, Any]) -> str:
    return str(pod["metadata"].get("resourceVersion") or "")


def _version(pod: dict[str, Any]) -> int:
    """Comparable since Kubernetes 1.35 says so (KEP-5504); before that in practice."""
    text = _text(pod)
    return int(text) if text.isdigit() else 0
