"""The verifier that looks at what is there: files, and rows of SQLite databases, before and after.

Settings: `StateSettings`. Every file that the agent changed, and every file that should have changed, is
compared: with the wanted content where there is one, with the content before otherwise. So doing too much
fails like doing too little, but for the differences that the settings allow. The agent's files are data:
nothing of theirs is executed, and its databases are opened only inside a fresh sandbox that holds nothing
else of the agent's, read-only (`verifiers.sqlitedump`). Left out: modes of files, virtual tables' rows,
databases with a rollback journal beside them (they count as unreadable).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any

from pydantic import Field, ValidationError

from catalog.models import BlobRef, Record, Task, Verdict
from sandbox.base import Outcome, Sandbox
from verifiers.grading import protected_files
from verifiers.judging import Bench, Change, Unjudgeable, read_files, settings_of
from verifiers.rows import Comparison, Dump, TableRule, compare_databases, same_content

_FOLDER = "/tmp/verifier-state"
_LOG = "-wal"
_BESIDE = ("-wal", "-shm", "-journal")
_SHOWN = 8
_OUTPUT = 64 << 20
_FIND = """\
for python in /opt/env/bin/python python3; do
    "$python" -I -c 'import sqlite3' </dev/null 2>/dev/null && exec "$python" -I - "$@"
done
exit 96
"""


class FileRule(Record):
    """How files whose path matches `path` are compared; `*` matches slashes too."""

    path: str
    compare: Comparison = "bytes"
    keys: tuple[str, ...] = ()
    """Object keys left out of a JSON comparison."""


class DatabaseRule(Record):
    """A SQLite file compared by its rows."""

    path: str
    tables: tuple[TableRule, ...] = ()
    schema_may_differ: bool = False
    """Do not compare the statements that made tables, views, triggers and indexes."""


class StateSettings(Record):
    """Settings of a `state` verifier. A gold solution leaves exactly `expected` and `deleted` behind."""

    expected: BlobRef
    """Tar of the files whose content must differ from the one before, as they should be."""
    deleted: tuple[str, ...] = ()
    """Files that must be gone."""
    databases: tuple[DatabaseRule, ...] = ()
    files: tuple[FileRule, ...] = ()
    """The first that matches a path counts; others are compared byte for byte."""
    max_rows: int = Field(default=100_000, gt=0)
    """Of one database, all tables together."""


async def judge(bench: Bench, task: Task, change: Change) -> Verdict:
    """Compare the workspace with the wanted state.

    Returns reward 1.0 or 0.0. Raises Unjudgeable where the wanted state itself cannot be read, SandboxError,
    LookupError.
    """
    settings = settings_of(task, StateSettings)
    try:
        expected = dict(protected_files(bench.blobs.get(settings.expected)))
    except ValueError as error:
        raise Unjudgeable("settings", f"{error}") from error
    bases = [rule.path for rule in settings.databases]
    beside = [base + _LOG for base in bases]
    paths = sorted({*change.files, *expected, *settings.deleted, *bases, *beside})
    async with bench.clean(task) as box:
        there = await read_files(box, task.environment.workdir, paths)
        before: dict[str, bytes | None] = {p: there[p].content if p in there else None for p in paths}
        gone: dict[str, bytes | None] = dict.fromkeys(settings.deleted)
        wanted = before | expected | gone
        for base in bases:
            if base in expected or base in gone:
                wanted[base + _LOG] = expected.get(base + _LOG)
        after = before | dict(change.files)
        differences = _compare_files(settings, wanted, after)
        for rule in settings.databases:
            differences += await _compare_base(box, rule, wanted, after, settings.max_rows)
    return _verdict(differences, len(paths))


def _verdict(differences: list[str], count: int) -> Verdict:
    if not differences:
        return Verdict(reward=1.0, evidence=f"The state is as wanted in {count} places.")
    more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    evidence = f"{len(differences)} differences: {'; '.join(differences[:_SHOWN])}{more}."
    return Verdict(reward=0.0, evidence=evidence)


def _compare_files(
    settings: StateSettings, wanted: Mapping[str, bytes | None], after: Mapping[str, bytes | None]
) -> list[str]:
    by_rows = {rule.path + end for rule in settings.databases for end in ("", *_BESIDE)}
    differences: list[str] = []
    for path in sorted(after.keys() - by_rows):
        rule = next((r for r in settings.files if fnmatchcase(path, r.path)), FileRule(path=path))
        right, found = wanted.get(path), after[path]
        if rule.compare == "ignore" or (right is None and found is None):
            continue
        if found is None:
            differences.append(f"{path} is missing")
        elif right is None:
            differences.append(f"{path} should not be there")
        else:
            try:
                same = same_content(right, found, rule.compare, rule.keys)
            except ValueError as error:
                raise Unjudgeable("settings", f"the wanted {path} is not JSON: {error}") from error
            if not same:
                differences.append(f"{path} differs")
    return differences


async def _compare_base(
    box: Sandbox,
    rule: DatabaseRule,
    wanted: Mapping[str, bytes | None],
    after: Mapping[str, bytes | None],
    max_rows: int,
) -> list[str]:
    right, found = wanted[rule.path], after[rule.path]
    right_log, found_log = wanted[rule.path + _LOG], after[rule.path + _LOG]
    if right is None or found is None:
        if right is None and found is None:
            return []
        return [f"{rule.path} {'is missing' if found is None else 'should not be there'}"]
    if after.get(rule.path + "-journal") is not None:
        return [f"{rule.path} is unreadable: a rollback journal lies beside it"]
    if (right, right_log) == (found, found_log):
        return []
    # ours first: after the agent's file was opened, nothing in this sandbox is believed but that file's rows
    first = await _dump(box, "wanted", right, right_log, max_rows)
    if isinstance(first, str):
        raise Unjudgeable("database", f"the wanted {rule.path} cannot be read: {first}")
    second = await _dump(box, "found", found, found_log, max_rows)
    if isinstance(second, str):
        return [f"{rule.path} is unreadable: {second}"]
    said = compare_databases(first, second, rule.tables, schema=not rule.schema_may_differ)
    return [f"{rule.path}: {sentence}" for sentence in said]


async def _dump(box: Sandbox, name: str, data: bytes, log: bytes | None, max_rows: int) -> Dump | str:
    """What a database holds, or why it cannot be read. Raises Unjudgeable where the image cannot do it."""
    place = f"{_FOLDER}/{name}"
    cleared = await box.exec(["rm", "-rf", "--", place], user="root", cwd="/")
    made = await box.exec(["mkdir", "-p", "--", place], cwd="/")
    if not (cleared.ok and made.ok):
        raise Unjudgeable("setup", f"no folder for a database: {(cleared.text + made.text)[-300:]}")
    await box.write(f"{place}/base", data)
    if log:
        await box.write(f"{place}/base{_LOG}", log)
    script = resources.files("verifiers").joinpath("sqlitedump.py").read_bytes()
    result = await box.exec(
        ["sh", "-c", _FIND, "sh", f"{place}/base", str(max_rows)],
        stdin=script,
        cwd="/",
        timeout=90,
        max_output=_OUTPUT,
    )
    if result.outcome is Outcome.EXITED and result.exit_code == 96:
        raise Unjudgeable("image", "the image has no Python with sqlite3, which reads its databases: add it")
    if result.outcome is Outcome.LOST and result.repercussion is None:
        raise Unjudgeable("sandbox", "the sandbox went away while a database was read")
    if not result.ok:
        return f"reading it ended by {result.outcome}"
    if result.stdout_total > len(result.stdout):
        return "its rows are too many to compare"
    return parse_dump(result.stdout)


def parse_dump(data: bytes) -> Dump | str:
    """What `verifiers.sqlitedump` printed, or the error that it reports."""
    try:
        value: Any = json.loads(data)
        if "error" in value:
            return str(value["error"])
        dump = Dump(schema_sql=value["schema"], tables=value["tables"])
    except (ValueError, TypeError, KeyError, RecursionError, ValidationError):
        return "its rows could not be printed"
    if any(len(row) != len(table.columns) for table in dump.tables.values() for row in table.rows):
        return "its rows have unequal lengths"
    return dump
