"""Files and databases before and after: what must change changes, and nothing else does."""

from __future__ import annotations

import sqlite3
import tempfile
import time
from pathlib import Path

import pytest

from catalog.models import Environment, Limits, Origin, Problem, Task, VerifierSpec
from sandbox.trees import pack_files
from verifiers.rows import Dump, Table, TableRule, compare_databases, same_content
from verifiers.state import parse_dump

START = """
CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT, seen REAL, twice GENERATED ALWAYS AS (upper(name)));
CREATE TABLE log (at TEXT, line TEXT);
CREATE TABLE scratch (x BLOB);
INSERT INTO users (id, name, seen) VALUES (1, 'ann', 0.5), (2, 'bob', 0.5);
"""
GOLD = START + "UPDATE users SET name = 'eve' WHERE id = 2;"


def database(script: str, *, wal: bool = False) -> dict[str, bytes]:
    """The files of a database made by a script: `app.db`, and its log where asked for."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "app.db"
        connection = sqlite3.connect(path, isolation_level=None)
        if wal:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.executescript(script)
        made = {entry.name: entry.read_bytes() for entry in Path(folder).iterdir()}
        connection.close()
    return made


BEFORE = {**database(START), "notes.txt": b"old\n", "config.json": b'{"a": 1, "at": 5}', "trash.txt": b"x"}


@pytest.fixture(scope="module")
def task(images, blobs) -> Task:
    expected = {**database(GOLD), "config.json": b'{"a": 2, "at": 6}'}
    rules = [
        {"table": "log", "extra_rows": True},
        {"table": "scr*", "ignore": True},
        {"table": "users", "columns": ["seen"]},
    ]
    settings = {
        "expected": blobs.put(pack_files(expected)),
        "deleted": ["trash.txt"],
        "databases": [{"path": "app.db", "tables": rules}],
        "files": [
            {"path": "config.json", "compare": "json", "keys": ["at"]},
            {"path": "cache/*", "compare": "ignore"},
        ],
        "max_rows": 500,
    }
    return Task(
        id="rename",
        origin=Origin(kind="import", source="x", revision="1"),
        problem=Problem(statement="Rename bob to eve"),
        environment=Environment(
            image=images.workspace(BEFORE), tree="none", limits=Limits(memory_mb=256, disk_mb=64)
        ),
        verifier=VerifierSpec(
            kind="state", settings=settings, protected=blobs.put(pack_files({})), allowed=(".",)
        ),
        solution=blobs.put(b""),
    )


def solved(script: str = GOLD, **files: bytes | None) -> dict[str, bytes | None]:
    return {**database(script), "config.json": b'{"at": 99, "a": 2}', "trash.txt": None, **files}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "change",
    [
        solved(),
        solved(GOLD + "UPDATE users SET seen = 7; INSERT INTO log VALUES ('now', 'renamed'); VACUUM;"),
        solved(GOLD + "DROP TABLE scratch;"),
        solved(**{"cache/x": b"1"}),
        {**solved(), **database(GOLD, wal=True)},
    ],
    ids=["gold", "allowed rows", "ignored table", "ignored file", "in the log"],
)
async def test_the_wanted_state_passes(grader, task, change):
    verdict = await grader.grade_files(task, change)
    assert (verdict.reward, verdict.failure) == (1.0, None), verdict.evidence


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "4 differences"),
        (solved(START), "users: 1 rows are missing, such as (i:2, t:eve)"),
        (solved(GOLD + "INSERT INTO users (name) VALUES ('x');"), "1 rows are not wanted"),
        (solved(GOLD + "UPDATE users SET name = CAST(name AS BLOB) WHERE id = 1;"), "b:616e6e"),
        (solved(GOLD + "UPDATE users SET name = CAST(x'ff' AS TEXT) WHERE id = 1;"), "(i:1, x:ff)"),
        (solved(GOLD + "UPDATE users SET name = hex(zeroblob(2000)) WHERE id = 1;"), "T:4000:"),
        (solved(GOLD + "CREATE TRIGGER t AFTER INSERT ON log BEGIN DELETE FROM users; END;"), "trigger t"),
        (solved(GOLD + "DROP TABLE log;"), "table log is missing"),
        (solved(**{"notes.txt": b"new"}), "notes.txt differs"),
        (solved(**{"more.txt": b""}), "more.txt should not be there"),
        (solved(**{"trash.txt": b"x"}), "trash.txt should not be there"),
        (solved(**{"config.json": b"[" * 5000}), "config.json differs"),
        (solved(**{"app.db": None}), "app.db is missing"),
        (solved(**{"app.db-journal": b"x"}), "rollback journal"),
        ({**solved(), **database(GOLD + "DELETE FROM users;", wal=True)}, "rows are missing"),
    ],
)
async def test_anything_else_fails(grader, task, change, said):
    verdict = await grader.grade_files(task, change)
    assert verdict.reward == 0.0
    assert said in verdict.evidence


HOSTILE = {
    "no database": b"SQLite format 3\0" + b"\xff" * 5000,
    "cut short": database(GOLD)["app.db"][:5000],
    "many rows": database(
        GOLD + "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 600) "
        "INSERT INTO log SELECT i, '' FROM n;"
    )["app.db"],
    "a view instead of a table": database(
        START + "DROP TABLE users; CREATE VIEW users AS WITH RECURSIVE n(i) AS "
        "(SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS id, 'eve' AS name FROM n;"
    )["app.db"],
    "code in a column": database(GOLD + "ALTER TABLE users ADD COLUMN more AS (hex(zeroblob(900000000)));")[
        "app.db"
    ],
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_databases_fail_and_do_not_hang(grader, task, name):
    begun = time.monotonic()
    verdict = await grader.grade_files(task, solved(**{"app.db": HOSTILE[name]}))
    assert verdict.reward == 0.0, verdict
    assert "app.db" in verdict.evidence
    assert time.monotonic() - begun < 30


@pytest.mark.asyncio(loop_scope="module")
async def test_a_wanted_state_that_cannot_be_read_is_no_verdict(grader, task, blobs):
    for expected in ({"app.db": b"SQLite format 3\0" + b"?" * 5000}, {"config.json": b"{"}):
        ref = blobs.put(pack_files(expected))
        spec = task.verifier.model_copy(update={"settings": {**task.verifier.settings, "expected": ref}})
        verdict = await grader.grade_files(task.model_copy(update={"verifier": spec}), solved())
        assert verdict.reward is None
        assert verdict.failure.boundary == "verifier"


def dump(**tables: tuple[str, list[tuple[str | None, ...]]]) -> Dump:
    made = {n: Table(columns=tuple(c.split()), rows=tuple(rows)) for n, (c, rows) in tables.items()}
    return Dump(schema_sql={f"table {name}": "x" for name in made}, tables=made)


def test_rows_are_a_multiset():
    one = dump(t=("a b", [("i:1", None), ("i:1", None), ("i:2", "t:x")]))
    assert compare_databases(one, dump(t=("a b", [("i:2", "t:x"), ("i:1", None), ("i:1", None)])), ()) == []
    fewer = dump(t=("a b", [("i:2", "t:x"), ("i:1", None)]))
    assert compare_databases(one, fewer, ()) == ["t: 1 rows are missing, such as (i:1, null)"]
    assert compare_databases(fewer, one, (TableRule(table="t", extra_rows=True),)) == []
    assert compare_databases(one, fewer, (TableRule(table="t", extra_rows=True),)) != []
    assert compare_databases(one, dump(t=("b a", [])), ()) == ["table t has other columns"]
    assert compare_databases(one, dump(), (), schema=False) == ["table t is missing"]
    assert compare_databases(one, dump(), ()) == ["table t is missing", "table t is missing"]


def test_contents_are_compared_as_the_rule_says():
    assert same_content(b"a \r\nb\n\n", b"a\nb", "text")
    assert not same_content(b"a\nb", b"a\n\nb", "text")
    assert not same_content(b"a ", b"a", "bytes")
    assert same_content(b"a ", b"b", "ignore")
    assert same_content(b'{"a": [{"t": 1}]}', b'{ "a":[{"t":2}] }', "json", ["t"])
    assert not same_content(b'{"a": 1}', b'{"a": true}', "json")
    assert not same_content(b'{"a": 1}', b"{", "json")
    with pytest.raises(ValueError, match="Expecting"):
        same_content(b"{", b"{}", "json")


LONG_ROW = b'{"schema": {}, "tables": {"t": {"columns": ["a"], "rows": [["i:1", "i:2"]]}}}'


@pytest.mark.parametrize(
    "printed",
    [b"", b"[]", b"{}", b'{"schema": 1, "tables": {}}', b"[" * 99999, b'{"error": "no"}', LONG_ROW],
)
def test_a_dump_is_not_believed_blindly(printed):
    assert isinstance(parse_dump(printed), str)
