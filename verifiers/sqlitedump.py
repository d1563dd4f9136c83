"""Prints the rows of a SQLite file as JSON; piped into an interpreter inside a sandbox, imports none of ours.

    python3 -I - FILE MAX_ROWS < sqlitedump.py

The file is hostile data. It is opened read-only, with its schema untrusted and every function, write, attach
and extension refused, so views, triggers and generated columns of its own never run; they are only named.
Prints `{"schema": {name: sql}, "tables": {name: {"columns": [...], "rows": [[...], ...]}}}` with values as
`null`, `i:12`, `r:0.5`, `t:text`, `b:<hex>`, `x:<hex>` (text that is not UTF-8), or `{"error": "..."}`.
"""

import hashlib
import json
import os
import resource
import sqlite3
import sys
from typing import Any

SHOWN = 2000
ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ}
PRAGMAS = {"table_xinfo"}
SETTINGS = ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON", "mmap_size = 0")


def permit(action: int, first: str | None, *_: str | None) -> int:
    pragma = action == sqlite3.SQLITE_PRAGMA and first in PRAGMAS
    return sqlite3.SQLITE_OK if pragma or action in ALLOWED else sqlite3.SQLITE_DENY


def decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def printable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def shown(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, bytes):
        long = len(value) > SHOWN
        return f"b:{len(value)}:{hashlib.sha256(value).hexdigest()}" if long else "b:" + value.hex()
    if isinstance(value, str):
        if not printable(value):
            return "x" + str(shown(value.encode("utf-8", "surrogateescape")))[1:]
        if len(value) <= SHOWN:
            return "t:" + value
        digest = hashlib.sha256(value.encode()).hexdigest()
        return f"T:{len(value)}:{digest}"
    return f"{'i' if isinstance(value, int) else 'r'}:{value!r}"


def dump(path: str, max_rows: int) -> dict[str, Any]:
    # a log beside it must be read too, and then the file is not immutable
    mode = "mode=ro" if os.path.exists(path + "-wal") else "mode=ro&immutable=1"
    connection = sqlite3.connect(f"file:{path}?{mode}", uri=True)
    connection.text_factory = decoded
    for setting in SETTINGS:
        connection.execute(f"PRAGMA {setting}")
    if hasattr(connection, "setlimit"):
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 64 << 20)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.set_authorizer(permit)
    schema: dict[str, str] = {}
    tables: dict[str, Any] = {}
    left = max_rows
    for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall():
        if str(name).startswith("sqlite_"):
            continue
        schema[f"{kind} {name}"] = str(sql)
        if kind != "table" or str(sql).lstrip().upper().startswith("CREATE VIRTUAL"):
            continue
        # hidden columns are generated: they follow from the others, and computing them would run their code
        info = connection.execute(f"PRAGMA table_xinfo({quoted(name)})").fetchall()
        columns = [column[1] for column in info if column[6] == 0]
        asked = ", ".join(quoted(column) for column in columns)
        rows: list[list[str | None]] = []
        for row in connection.execute(f"SELECT {asked} FROM {quoted(name)}"):
            left -= 1
            if left < 0:
                raise ValueError(f"more than {max_rows} rows")
            rows.append([shown(value) for value in row])
        tables[name] = {"columns": columns, "rows": rows}
    return {"schema": schema, "tables": tables}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    try:
        result = dump(sys.argv[1], int(sys.argv[2]))
    except (sqlite3.Error, ValueError, MemoryError, OverflowError) as error:
        result = {"error": f"{error}"[:300] or type(error).__name__}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
