"""Compares what two databases and two files hold, but for what may differ: pure.

Rows are compared as a multiset: neither their order nor the rowid that SQLite gave them counts. Values are
typed, so 1, 1.0 and '1' differ.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

from catalog.models import Record

_SHOWN = 3
Row = tuple[str | None, ...]


class Table(Record):
    """Columns and rows of one table, as `verifiers.sqlitedump` prints them."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]


class Dump(Record):
    """What a database holds."""

    schema_sql: dict[str, str]
    """`table NAME`, `view NAME`, `trigger NAME`, `index NAME` -> the statement that made it."""
    tables: dict[str, Table]


class TableRule(Record):
    """What may differ in tables whose name matches `table` (`*` and `?` as in file names)."""

    table: str
    ignore: bool = False
    """Rows and columns may be anything, and the table may be missing."""
    columns: tuple[str, ...] = ()
    """Columns whose values do not count, such as times and random ids."""
    extra_rows: bool = False
    """More rows than wanted are allowed, such as entries of a log."""


def compare_databases(
    wanted: Dump, found: Dump, rules: Sequence[TableRule], *, schema: bool = True
) -> list[str]:
    """One sentence for each difference, none where `found` is as wanted.

    Args:
        rules: the first that matches a table counts.
        schema: compare the statements too that made tables, views, triggers and indexes.
    """
    differences: list[str] = []
    if schema:
        for name in sorted({*wanted.schema_sql, *found.schema_sql}):
            kind, _, rest = name.partition(" ")
            rule = _rule(rules, rest)
            if kind == "table" and rule is not None and rule.ignore:
                continue
            if wanted.schema_sql.get(name) != found.schema_sql.get(name):
                differences.append(f"{name} {_how(name in wanted.schema_sql, name in found.schema_sql)}")
    for name in sorted({*wanted.tables, *found.tables}):
        rule = _rule(rules, name) or TableRule(table=name)
        if not rule.ignore:
            differences += _compare_tables(name, wanted.tables.get(name), found.tables.get(name), rule)
    return differences


def _compare_tables(name: str, wanted: Table | None, found: Table | None, rule: TableRule) -> list[str]:
    if wanted is None or found is None:
        return [f"table {name} {_how(wanted is not None, found is not None)}"]
    kept = [column for column in wanted.columns if column not in rule.columns]
    if kept != [column for column in found.columns if column not in rule.columns]:
        return [f"table {name} has other columns"]
    before, after = _rows(wanted, kept), _rows(found, kept)
    missing, extra = before - after, after - before
    said: list[str] = []
    if missing:
        said.append(f"{name}: {missing.total()} rows are missing, such as {_some(missing)}")
    if extra and not rule.extra_rows:
        said.append(f"{name}: {extra.total()} rows are not wanted, such as {_some(extra)}")
    return said


def _rows(table: Table, kept: Sequence[str]) -> Counter[Row]:
    places = [table.columns.index(column) for column in kept]
    return Counter(tuple(row[place] for place in places) for row in table.rows)


def _rule(rules: Sequence[TableRule], name: str) -> TableRule | None:
    return next((rule for rule in rules if fnmatchcase(name, rule.table)), None)


def _how(wanted: bool, found: bool) -> str:
    return "differs" if wanted and found else "is missing" if wanted else "is not wanted"


def _some(rows: Counter[Row]) -> str:
    first = sorted(rows, key=str)[:_SHOWN]
    return "; ".join("(" + ", ".join("null" if v is None else v[:60] for v in row) + ")" for row in first)


Comparison = Literal["bytes", "text", "json", "ignore"]


def same_content(wanted: bytes, found: bytes, how: Comparison, keys: Collection[str] = ()) -> bool:
    """Whether two contents count as the same.

    `text`: but for line ends, spaces at the ends of lines and empty lines at the end. `json`: as values, with
    the object keys in `keys` left out at any depth. Raises ValueError if `wanted` is not JSON.
    """
    if how == "ignore" or wanted == found:
        return True
    if how == "text":
        return _lines(wanted) == _lines(found)
    if how == "json":
        right = _canonical(wanted, frozenset(keys))
        try:
            return right == _canonical(found, frozenset(keys))
        except ValueError:
            return False
    return False


def _lines(data: bytes) -> list[bytes]:
    lines = [line.rstrip() for line in data.split(b"\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _canonical(data: bytes, keys: frozenset[str]) -> str:
    try:
        return json.dumps(_without(json.loads(data), keys), sort_keys=True)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _without(value: Any, keys: frozenset[str]) -> Any:
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        return {k: _without(v, keys) for k, v in entries.items() if k not in keys}
    if isinstance(value, list):
        return [_without(item, keys) for item in cast("list[Any]", value)]
    return value
