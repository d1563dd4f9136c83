"""INSERT that may be repeated, in both dialects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite


def upsert(
    connection: Connection,
    table: Table,
    values: dict[str, Any],
    key: Sequence[str],
    changed: dict[str, Any] | None,
) -> Any:
    """INSERT ... ON CONFLICT(key) DO UPDATE SET changed, or DO NOTHING when `changed` is None."""
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    statement: Any = dialect.insert(table).values(values)
    if changed is None:
        return statement.on_conflict_do_nothing(index_elements=key)
    return statement.on_conflict_do_update(index_elements=key, set_=changed)
