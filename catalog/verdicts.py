"""The table of cached verdicts. `verifiers.grading.VerdictCache` decides what may be read from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from sqlalchemy import Connection, func, select, update

from catalog.models import Verdict, canonical_json
from catalog.tables import verdicts
from catalog.upsert import upsert


class CacheStats(NamedTuple):
    """Entries of the cache and how often one was used instead of a grading."""

    entries: int
    hits: int


class VerdictTable:
    """Verdicts by the digest of (image, diff, verifier)."""

    def __init__(
        self,
        write: Callable[[], AbstractContextManager[Connection]],
        read: Callable[[], AbstractContextManager[Connection]],
    ) -> None:
        self._write = write
        self._read = read

    def get(self, key: str) -> Verdict | None:
        """The verdict kept under `key`, marked `cached`, with one more hit counted; None if there is none."""
        with self._read() as connection:
            record = connection.execute(select(verdicts.c.record).where(verdicts.c.key == key)).scalar()
        if record is None:
            return None
        with self._write() as connection:
            more = update(verdicts).where(verdicts.c.key == key).values(hits=verdicts.c.hits + 1)
            connection.execute(more)
        return Verdict.model_validate_json(record).model_copy(update={"cached": True})

    def put(self, key: str, verdict: Verdict) -> None:
        """Keep a verdict. The first one stays; a verdict without a reward is refused (it may be retried)."""
        if verdict.reward is None:
            raise ValueError("a verdict without a reward is an infrastructure failure and is not cached")
        kept = verdict.model_copy(update={"cached": False})
        record = canonical_json(kept.model_dump(mode="json")).decode()
        values = {"key": key, "record": record, "hits": 0, "created": time.time()}
        with self._write() as connection:
            connection.execute(upsert(connection, verdicts, values, ["key"], None))

    def hits(self, key: str) -> int:
        """How often this entry was used."""
        with self._read() as connection:
            return connection.execute(select(verdicts.c.hits).where(verdicts.c.key == key)).scalar() or 0

    def stats(self) -> CacheStats:
        with self._read() as connection:
            entries, hits = connection.execute(
                select(func.count(), func.coalesce(func.sum(verdicts.c.hits), 0)).select_from(verdicts)
            ).one()
        return CacheStats(int(entries), int(hits))
