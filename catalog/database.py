"""The database under the catalog: opening, pragmas, transactions, migrations.

SQLite in WAL mode is the default: readers never wait, writers take turns. A commit survives `kill -9`
of any process; with `synchronous=NORMAL` a power cut may lose the last commits but never breaks the file.
PostgreSQL is the same code behind a URL (`postgresql+psycopg://...`, extra `postgres`).
"""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.exc import DatabaseError

from catalog.errors import UserError
from catalog.migrations import HEAD

BUSY_TIMEOUT_S = 60.0
_ADVISORY_LOCK = 0x706F7374  # any number that every posttrain process agrees on


def connect(url: str) -> Engine:
    """An engine for that URL. Every SQLite connection gets foreign keys and a busy timeout."""
    if not url.startswith("sqlite"):
        return create_engine(url, pool_pre_ping=True)
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})
    event.listen(engine, "connect", _sqlite_connected)
    event.listen(engine, "begin", _sqlite_begin)
    return engine


def _sqlite_connected(connection: Any, _record: object) -> None:
    # The driver must not open transactions by itself; `_sqlite_begin` says which kind we want.
    connection.isolation_level = None
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA foreign_keys=ON")


def _sqlite_begin(connection: Connection) -> None:
    # A transaction that reads and then writes would fail at once with SQLITE_BUSY when another process
    # wrote in between; IMMEDIATE takes the write lock first, and waits for it.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def user_errors(where: str) -> Generator[None]:
    """Turn what the user can fix (disk, permissions, a server that is down) into one sentence."""
    try:
        yield
    except (DatabaseError, sqlite3.DatabaseError) as error:
        # The driver's own where a pragma went to it directly.
        reason = str(error.orig if isinstance(error, DatabaseError) else error)
        hints = {
            "disk is full": "free some space",
            "disk I/O error": "check the disk and its free space",
            "malformed": "restore a copy of catalog.db or choose another --home",
            "not a database": "restore a copy of catalog.db or choose another --home",
            "readonly": "make it writable or choose another --home",
            "unable to open": "make its folder writable or choose another --home",
            "is locked": "another process holds it; stop that one or wait",
            "connection": "start the server or correct the URL",
        }
        for sign, hint in hints.items():
            if sign in reason:
                first_line = reason.strip().splitlines()[0]
                raise UserError(f"The catalog at {where} cannot be used ({first_line}): {hint}.") from error
        raise


def migrate(engine: Engine, *, lock: Path | None) -> None:
    """Bring the schema up to date. Any number of processes may do so at once: one works, others wait.

    `lock` is a file to lock meanwhile (SQLite); PostgreSQL uses an advisory lock. Raises UserError when
    the database was written by a newer version of this program.
    """
    if lock is not None:
        # Held for the look alone, too: the switch to WAL fails at once, busy timeout or not, while any
        # other process reads. It is kept in the file, so only the first opening makes it.
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with engine.connect() as connection:
                connection.connection.execute("PRAGMA journal_mode=WAL")
            _upgrade(engine)
    elif revision(engine) != HEAD:
        with engine.connect() as guard:
            guard.execute(text("SELECT pg_advisory_lock(:n)"), {"n": _ADVISORY_LOCK})
            try:
                _upgrade(engine)
            finally:
                guard.execute(text("SELECT pg_advisory_unlock(:n)"), {"n": _ADVISORY_LOCK})


def revision(engine: Engine) -> str | None:
    """The revision that the database is at; None for an empty one."""
    with engine.connect() as connection:
        if not inspect(connection).has_table("alembic_version"):
            return None
        return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _upgrade(engine: Engine) -> None:
    found = revision(engine)  # again: another process may have finished while this one waited
    if found == HEAD:
        return
    # alembic takes a fifth of a second to import, and most openings need nothing of it.
    from alembic import command
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError

    config = alembic_config()
    try:
        if found is not None:
            ScriptDirectory.from_config(config).get_revision(found)
    except CommandError as error:
        raise UserError(
            f"The catalog {engine.url.render_as_string()} is at revision {found}, newer than this "
            "version of posttrain: upgrade posttrain or choose another --home."
        ) from error
    with engine.execution_options(writes=True).begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def alembic_config() -> Any:
    """Alembic's configuration without an ini file: the scripts lie beside this module."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config
