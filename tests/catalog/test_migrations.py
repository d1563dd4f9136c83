"""Schema, concurrent opening, and kills in the middle of writing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from catalog.database import alembic_config, connect, revision
from catalog.errors import UserError
from catalog.migrations import HEAD
from catalog.store import Catalog
from catalog.tables import metadata
from tests.catalog.test_store import make_task

OPENER = """
import sys
from catalog.store import Catalog
from tests.catalog.test_store import make_task
with Catalog.open(sys.argv[1]) as catalog:
    for n in range(20):
        catalog.put_task(make_task(f"{sys.argv[2]}-{n}"))
"""

WRITER = """
import sys
from catalog.store import Catalog
from tests.catalog.test_store import make_task
with Catalog.open(sys.argv[1]) as catalog:
    for n in range(100_000):
        with catalog.transaction():
            blob = catalog.blobs.put(f"{sys.argv[2]} {n}".encode())
            catalog.put_task(make_task(f"{sys.argv[2]}-{n}"))
            catalog.stages.put("write", f"{sys.argv[2]}-{n}", blob)
        print(n, flush=True)
"""


def start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)


def test_the_migrations_make_exactly_the_tables(tmp_path: Path) -> None:
    assert ScriptDirectory.from_config(alembic_config()).get_heads() == [HEAD]
    with Catalog.open(tmp_path):
        engine = connect(f"sqlite:///{tmp_path / 'catalog.db'}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(text("PRAGMA foreign_keys")).scalar() == 1
    with engine.execution_options(writes=True).begin() as connection:
        config = alembic_config()
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    assert revision(engine) is None
    engine.dispose()
    with Catalog.open(tmp_path) as catalog:
        assert catalog.list_tasks() == []


def test_four_processes_may_open_a_new_catalog_at_once(tmp_path: Path) -> None:
    children = [start(OPENER, str(tmp_path), str(n)) for n in range(4)]
    for child in children:
        child.communicate(timeout=60)
    assert [child.returncode for child in children] == [0, 0, 0, 0]
    with Catalog.open(tmp_path) as catalog:
        assert catalog.count_tasks() == {"draft": 80}


def test_kill_during_writes_loses_nothing_committed(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        child = start(WRITER, str(tmp_path), name)
        assert child.stdout is not None
        with child.stdout:
            child.stdout.readline()
            time.sleep(0.15)
            child.send_signal(signal.SIGKILL)
            said = child.stdout.read().splitlines()
        child.wait()
        with Catalog.open(tmp_path) as catalog:
            written = catalog.stages.list("write")
            mine = [key for key in written if key.startswith(f"{name}-")]
            assert len(mine) >= len(said) + 1 > 2, "what was reported is there"
            known = {task.id for task in catalog.list_tasks()}
            for key in mine:
                assert make_task(key).id in known, "a transaction is whole"
                assert catalog.blobs.get(written[key]) == key.replace("-", " ").encode()
            assert len(known) == len(written)


def test_a_newer_database_is_refused_in_one_sentence(tmp_path: Path) -> None:
    Catalog.open(tmp_path).close()
    engine = connect(f"sqlite:///{tmp_path / 'catalog.db'}")
    with engine.execution_options(writes=True).begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(UserError, match="9999, newer than this version"):
        Catalog.open(tmp_path)


def test_what_the_user_can_fix_is_said_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another --home"):
        Catalog.open(tmp_path / "file")
    (tmp_path / "home" / "catalog.db").mkdir(parents=True)
    with pytest.raises(UserError, match="unable to open"):
        Catalog.open(tmp_path / "home")

    with Catalog.open(tmp_path / "small") as catalog:
        with catalog.transaction() as connection:
            pages = connection.execute(text("PRAGMA page_count")).scalar()
            connection.execute(text(f"PRAGMA max_page_count = {pages}"))
        with pytest.raises(UserError, match=r"full.*free some space"):
            catalog.put_task(make_task("a" * 100_000))
