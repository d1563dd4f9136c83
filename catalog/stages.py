"""Steps that are done: results by the hash of everything that went into them.

A job that was killed asks for each step again and gets the recorded result of those that finished:

    built = catalog.stages.once("build", [source, version], lambda: build(...))

Results are JSON. Put bytes into blobs and record their names.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from sqlalchemy import Connection, and_, delete, func, select

from catalog.models import canonical_json, digest_json
from catalog.tables import stages
from catalog.upsert import upsert


class Finished(NamedTuple):
    """A recorded step: what it gave, and how long it took."""

    value: Any
    seconds: float


class StageTable:
    """Results of steps by (name, key)."""

    def __init__(
        self,
        write: Callable[[], AbstractContextManager[Connection]],
        read: Callable[[], AbstractContextManager[Connection]],
    ) -> None:
        self._write = write
        self._read = read

    @staticmethod
    def key(*parts: object) -> str:
        """`sha256:...` of the JSON of the parts: everything that the result depends on."""
        return digest_json(list(parts))

    def get(self, name: str, key: str) -> Finished | None:
        """The recorded result, or None if the step never finished."""
        query = select(stages.c.value, stages.c.seconds)
        with self._read() as connection:
            row = connection.execute(query.where(_is(name, key))).one_or_none()
        return None if row is None else Finished(json.loads(row.value), row.seconds)

    def put(self, name: str, key: str, value: object, *, seconds: float = 0.0) -> Any:
        """Record a result; when one is there already that one stays. Returns the result that stands."""
        values = {
            "name": name,
            "key": key,
            "value": canonical_json(value).decode(),
            "seconds": seconds,
            "created": time.time(),
        }
        with self._write() as connection:
            connection.execute(upsert(connection, stages, values, ["name", "key"], None))
            kept = connection.execute(select(stages.c.value).where(_is(name, key))).scalar_one()
        return json.loads(kept)

    def once(self, name: str, parts: list[Any], run: Callable[[], Any]) -> Any:
        """The recorded result of this step, or that of running it now (no transaction is held meanwhile)."""
        key = self.key(*parts)
        found = self.get(name, key)
        if found is not None:
            return found.value
        started = time.monotonic()
        value = run()
        return self.put(name, key, value, seconds=time.monotonic() - started)

    def list(self, name: str) -> dict[str, Any]:
        """All results of the steps of one name, by key, in the order in which they finished."""
        query = select(stages.c.key, stages.c.value).where(stages.c.name == name)
        with self._read() as connection:
            rows = connection.execute(query.order_by(stages.c.created, stages.c.key)).all()
        return {key: json.loads(value) for key, value in rows}

    def count(self) -> dict[str, int]:
        """Number of finished steps by name."""
        query = select(stages.c.name, func.count()).group_by(stages.c.name).order_by(stages.c.name)
        with self._read() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def forget(self, name: str, key: str | None = None) -> int:
        """Drop one result, or all of a name; returns how many."""
        with self._write() as connection:
            where = stages.c.name == name if key is None else _is(name, key)
            return connection.execute(delete(stages).where(where)).rowcount


def _is(name: str, key: str) -> Any:
    return and_(stages.c.name == name, stages.c.key == key)
