"""Objects with resource versions, and the history that watches follow."""

from __future__ import annotations

import asyncio
import copy
import datetime
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

Key = tuple[str, str, str]  # resource, namespace, name


class Conflict(Exception):
    """The name is taken."""


class Gone(Exception):
    """The version is older than what the history keeps."""


@dataclass(frozen=True)
class Event:
    version: int
    type: str
    resource: str
    object: dict[str, Any]


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def matches(labels: dict[str, str], selector: str) -> bool:
    """Equality selectors: `a=b,c!=d,e`."""
    for term in filter(None, selector.split(",")):
        if "!=" in term:
            key, _, value = term.partition("!=")
            if labels.get(key) == value:
                return False
        elif "=" in term:
            key, _, value = term.replace("==", "=").partition("=")
            if labels.get(key) != value:
                return False
        elif term not in labels:
            return False
    return True


class Store:
    """Everything the cluster knows."""

    def __init__(self) -> None:
        self.objects: dict[Key, dict[str, Any]] = {}
        self.version = 100
        self.history: list[Event] = []
        self.oldest = 0
        self._changed = asyncio.Condition()
        self._tick = asyncio.Event()

    def _record(self, type: str, resource: str, found: dict[str, Any]) -> None:
        self.version += 1
        found["metadata"]["resourceVersion"] = str(self.version)
        self.history.append(Event(self.version, type, resource, copy.deepcopy(found)))
        self._tick.set()
        self._tick = asyncio.Event()

    def create(self, resource: str, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        metadata = body["metadata"]
        if "name" not in metadata:
            metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
        key = (resource, namespace, metadata["name"])
        if key in self.objects:
            raise Conflict(metadata["name"])
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
        if namespace:
            metadata["namespace"] = namespace
        self.objects[key] = body
        self._record("ADDED", resource, body)
        return body

    def touch(self, resource: str, found: dict[str, Any]) -> None:
        """The object was changed in place."""
        key = (resource, found["metadata"].get("namespace", ""), found["metadata"]["name"])
        if self.objects.get(key) is found:
            self._record("MODIFIED", resource, found)

    def delete(self, resource: str, found: dict[str, Any]) -> None:
        key = (resource, found["metadata"].get("namespace", ""), found["metadata"]["name"])
        if self.objects.get(key) is found:
            del self.objects[key]
            self._record("DELETED", resource, found)

    def get(self, resource: str, namespace: str, name: str) -> dict[str, Any] | None:
        return self.objects.get((resource, namespace, name))

    def list(self, resource: str, namespace: str, selector: str = "") -> list[dict[str, Any]]:
        return [
            found
            for (kind, space, _), found in self.objects.items()
            if kind == resource
            and (not namespace or space == namespace)
            and matches(found["metadata"].get("labels") or {}, selector)
        ]

    def compact(self) -> None:
        """Forget the history: watches from older versions are answered 410."""
        self.version += 1
        self.oldest = self.version
        self.history.clear()

    async def follow(self, resource: str, namespace: str, selector: str, after: int) -> AsyncIterator[Event]:
        """Events after that version, for ever."""
        if after < self.oldest:
            raise Gone
        while True:
            tick = self._tick
            for event in [each for each in self.history if each.version > after]:
                after = event.version
                metadata = event.object["metadata"]
                if (
                    event.resource == resource
                    and (not namespace or metadata.get("namespace", "") == namespace)
                    and matches(metadata.get("labels") or {}, selector)
                ):
                    yield event
            await tick.wait()
