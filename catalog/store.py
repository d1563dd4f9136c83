"""The catalog: what exists and what happened, under one home folder.

    catalog = Catalog.open(home)
    catalog.put_task(task)
    for task in catalog.list_tasks(status="accepted", split="train"): ...

Every method is one transaction, and `with catalog.transaction():` joins several into one. Putting the
same record again changes nothing, so an interrupted job may simply repeat its last step. Calls are
synchronous and take well under a millisecond; do not await anything inside a transaction, which holds
the write lock of all processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Connection, Engine, Row, Table, and_, func, select
from sqlalchemy.exc import IntegrityError

from catalog import database
from catalog.blobs import Blobs
from catalog.errors import UnknownId, UserError, did_you_mean
from catalog.jsonl import Position, read_at
from catalog.models import (
    CandidateSet,
    Decision,
    QualityReport,
    Record,
    Run,
    RunKind,
    Status,
    Task,
    canonical_json,
)
from catalog.stages import StageTable
from catalog.tables import candidate_sets, reports, runs, tasks, trajectories
from catalog.trajectory import Trajectory
from catalog.upsert import upsert
from catalog.verdicts import VerdictTable


def default_home() -> Path:
    """`$POSTTRAIN_HOME`, or `posttrain` in the user's cache folder."""
    if home := os.environ.get("POSTTRAIN_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "posttrain"


class Catalog:
    """Tasks, reports, candidate sets, runs, trajectories, cached verdicts and finished stages."""

    def __init__(self, engine: Engine, home: Path, blobs: Blobs) -> None:
        self.home = home
        self.blobs = blobs
        self._engine = engine
        self._writer = engine.execution_options(writes=True)
        self._open: ContextVar[Connection | None] = ContextVar("open transaction", default=None)
        self.verdicts = VerdictTable(self.transaction, self._reading)
        self.stages = StageTable(self.transaction, self._reading)

    @classmethod
    def open(cls, home: Path | str | None = None, *, url: str | None = None) -> Self:
        """Open, making and migrating what is missing. Any number of processes may do so at once.

        `home` defaults to `default_home()`; `url` (or `$POSTTRAIN_DATABASE`) puts the tables into
        another database, the blobs stay under `home`. Raises UserError when the disk is full or read-only,
        or the database is newer than this program.
        """
        home = Path(home) if home is not None else default_home()
        url = url or os.environ.get("POSTTRAIN_DATABASE")
        try:
            home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"Cannot make {home} ({error.strerror}): choose another --home.") from error
        lock = None if url else home / "catalog.lock"
        engine = database.connect(url or f"sqlite:///{home / 'catalog.db'}")
        with database.user_errors(url or str(home)):
            database.migrate(engine, lock=lock)
        return cls(engine, home, Blobs(home / "blobs"))

    def close(self) -> None:
        """Close every connection; the object is of no use afterwards."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Generator[Connection]:
        """Everything inside is written together or not at all. Inner transactions join the outer one."""
        current = self._open.get()
        if current is not None:
            yield current
            return
        with database.user_errors(str(self.home)), self._writer.begin() as connection:
            token = self._open.set(connection)
            try:
                yield connection
            finally:
                self._open.reset(token)

    @contextmanager
    def _reading(self) -> Generator[Connection]:
        current = self._open.get()
        if current is not None:
            yield current
            return
        with database.user_errors(str(self.home)), self._engine.connect() as connection:
            yield connection

    # ---- tasks ----------------------------------------------------------------------------------------

    def put_task(self, task: Task) -> None:
        """Insert the task or replace the one with its id."""
        origin = task.origin
        values = {
            "id": task.id,
            "status": task.status.value,
            "split": task.split,
            "kind": origin.kind,
            "source": origin.source,
            "path": origin.path,
            "function": origin.function,
            "operator": origin.operator,
        }
        self._upsert(tasks, values, task, created=True)

    def get_task(self, id: str) -> Task:
        """The task of that id. Raises UnknownId with the closest id there is."""
        record = self._record(tasks, tasks.c.id == id)
        if record is None:
            raise self._unknown("task", id, tasks)
        return Task.model_validate_json(record)

    def find_task(self, id: str) -> Task | None:
        """The task of that id, or None."""
        record = self._record(tasks, tasks.c.id == id)
        return None if record is None else Task.model_validate_json(record)

    def list_tasks(
        self,
        *,
        status: Status | str | None = None,
        split: str | None = None,
        source: str | None = None,
        kind: str | None = None,
        operator: str | None = None,
        rejected_by: str | None = None,
        limit: int | None = None,
    ) -> list[Task]:
        """Tasks that match every given filter, ordered by id."""
        query = select(tasks.c.record).order_by(tasks.c.id).limit(limit)
        wanted = {"status": status, "split": split, "source": source, "kind": kind, "operator": operator}
        query = query.where(and_(True, *(tasks.c[k] == v for k, v in wanted.items() if v is not None)))
        if rejected_by is not None:
            query = query.join(reports, reports.c.task_id == tasks.c.id)
            query = query.where(reports.c.rejected_by == rejected_by)
        with self._reading() as connection:
            return [Task.model_validate_json(record) for record in connection.scalars(query)]

    def count_tasks(self, *, source: str | None = None) -> dict[str, int]:
        """Number of tasks by status; a status without tasks is left out."""
        query = select(tasks.c.status, func.count()).group_by(tasks.c.status).order_by(tasks.c.status)
        if source is not None:
            query = query.where(tasks.c.source == source)
        with self._reading() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def count_rejections(self, *, source: str | None = None) -> dict[str, int]:
        """Number of tasks by the first gate that failed, most frequent first."""
        count = func.count()
        query = select(reports.c.rejected_by, count).where(reports.c.rejected_by.is_not(None))
        if source is not None:
            query = query.join(tasks, tasks.c.id == reports.c.task_id).where(tasks.c.source == source)
        query = query.group_by(reports.c.rejected_by).order_by(count.desc(), reports.c.rejected_by)
        with self._reading() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    # ---- reports and candidate sets -------------------------------------------------------------------

    def put_report(self, report: QualityReport) -> None:
        """Insert or replace the report of a task, which must be there already."""
        values = {
            "task_id": report.task_id,
            "accepted": report.accepted,
            "rejected_by": report.rejected_by,
        }
        self._upsert(reports, values, report)

    def find_report(self, task_id: str) -> QualityReport | None:
        record = self._record(reports, reports.c.task_id == task_id)
        return None if record is None else QualityReport.model_validate_json(record)

    def list_reports(self, *, accepted: bool | None = None) -> list[QualityReport]:
        """Reports ordered by task id."""
        query = select(reports.c.record).order_by(reports.c.task_id)
        if accepted is not None:
            query = query.where(reports.c.accepted.is_(accepted))
        with self._reading() as connection:
            return [QualityReport.model_validate_json(record) for record in connection.scalars(query)]

    def decide(self, task_id: str, status: Status, decision: Decision) -> None:
        """Set a task's status and append to its history, together.

        The same decision (actor, action, reason) of a task that has that status already is not repeated.
        """
        with self.transaction():
            task = self.get_task(task_id)
            report = self.find_report(task_id) or QualityReport(task_id=task_id)
            last = report.history[-1] if report.history else None
            same = last is not None and (last.actor, last.action, last.reason) == (
                decision.actor,
                decision.action,
                decision.reason,
            )
            if same and task.status is status:
                return
            self.put_task(task.model_copy(update={"status": status}))
            self.put_report(report.model_copy(update={"history": (*report.history, decision)}))

    def put_candidates(self, candidates: CandidateSet) -> None:
        """Insert or replace the candidate set of a task, which must be there already."""
        values = {"task_id": candidates.task_id, "chance": candidates.chance}
        self._upsert(candidate_sets, values, candidates)

    def find_candidates(self, task_id: str) -> CandidateSet | None:
        record = self._record(candidate_sets, candidate_sets.c.task_id == task_id)
        return None if record is None else CandidateSet.model_validate_json(record)

    def list_candidates(self) -> list[CandidateSet]:
        """Every candidate set, ordered by task id."""
        query = select(candidate_sets.c.record).order_by(candidate_sets.c.task_id)
        with self._reading() as connection:
            return [CandidateSet.model_validate_json(record) for record in connection.scalars(query)]

    # ---- runs and trajectories ------------------------------------------------------------------------

    def put_run(self, run: Run) -> None:
        """Insert or replace a run."""
        values = {
            "id": run.id,
            "kind": run.kind.value,
            "state": run.state,
            "folder": run.folder,
            "created": run.created,
            "finished": run.finished,
        }
        self._upsert(runs, values, run, stamp=False)

    def get_run(self, id: str) -> Run:
        """The run of that id. Raises UnknownId with the closest id there is."""
        record = self._record(runs, runs.c.id == id)
        if record is None:
            raise self._unknown("run", id, runs)
        return Run.model_validate_json(record)

    def list_runs(self, *, kind: RunKind | str | None = None, state: str | None = None) -> list[Run]:
        """Runs, newest first."""
        query = select(runs.c.record).order_by(runs.c.created.desc(), runs.c.id)
        wanted = {"kind": kind, "state": state}
        query = query.where(and_(True, *(runs.c[k] == v for k, v in wanted.items() if v is not None)))
        with self._reading() as connection:
            return [Run.model_validate_json(record) for record in connection.scalars(query)]

    def put_trajectory(self, trajectory: Trajectory, *, at: Position | None = None) -> None:
        """Index a trajectory. Its tokens stay in the file that `at` points into, or else go into a blob.

        Its run and its task must be there already.
        """
        if at is None:
            line = canonical_json(trajectory.model_dump(mode="json"))
            at = Position(self.blobs.put(line), 0, len(line))
        values = {
            "id": trajectory.id,
            "run_id": trajectory.run_id,
            "task_id": trajectory.task_id,
            "agent": trajectory.agent,
            "policy": trajectory.policy,
            "effort": trajectory.effort,
            "group": trajectory.group,
            "reward": trajectory.reward,
            "failure": trajectory.failure.boundary if trajectory.failure else None,
            "sampled_tokens": trajectory.sampled_tokens,
            "file": at.file,
            "offset": at.offset,
            "length": at.length,
            "created": time.time(),
        }
        self._upsert(trajectories, values, None, stamp=False)

    def get_trajectory(self, id: str) -> Trajectory:
        """The whole trajectory, read from its file. Raises UnknownId, or UserError if the file is gone."""
        with self._reading() as connection:
            row = connection.execute(select(trajectories).where(trajectories.c.id == id)).one_or_none()
        if row is None:
            raise self._unknown("trajectory", id, trajectories)
        return Trajectory.model_validate_json(self._line(row))

    def list_trajectories(
        self,
        *,
        run_id: str | None = None,
        task_id: str | None = None,
        agent: str | None = None,
        policy: str | None = None,
        limit: int | None = None,
    ) -> list[Row[Any]]:
        """Index rows (columns of `catalog.tables.trajectories`), ordered by id; no tokens are read."""
        query = select(trajectories).order_by(trajectories.c.id).limit(limit)
        wanted = {"run_id": run_id, "task_id": task_id, "agent": agent, "policy": policy}
        query = query.where(and_(True, *(trajectories.c[k] == v for k, v in wanted.items() if v is not None)))
        with self._reading() as connection:
            return list(connection.execute(query))

    # ---- shared ---------------------------------------------------------------------------------------

    def _line(self, row: Row[Any]) -> bytes:
        if row.file.startswith("sha256:"):
            return self.blobs.get(row.file)
        try:
            return read_at(Position(row.file, row.offset, row.length))
        except FileNotFoundError as error:
            raise UserError(f"Trajectory {row.id} was kept in {row.file}, which is gone.") from error

    def _record(self, table: Table, where: Any) -> str | None:
        with self._reading() as connection:
            return connection.execute(select(table.c.record).where(where)).scalar()

    def _unknown(self, noun: str, id: str, table: Table) -> UnknownId:
        with self._reading() as connection:
            known = connection.scalars(select(table.c.id).limit(20_000)).all()
        return UnknownId(f"No {noun} is called {id}.{did_you_mean(id, known)}")

    def _upsert(
        self,
        table: Table,
        values: dict[str, Any],
        record: Record | None,
        *,
        created: bool = False,
        stamp: bool = True,
    ) -> None:
        if record is not None:
            values = values | {"record": canonical_json(record.model_dump(mode="json")).decode()}
        if stamp:
            values = values | {"updated": time.time()}
        key = [column.name for column in table.primary_key]
        changed = {name: value for name, value in values.items() if name not in key}
        if created:
            values = values | {"created": time.time()}
        with self.transaction() as connection:
            try:
                connection.execute(upsert(connection, table, values, key, changed))
            except IntegrityError as error:
                missing = "task" if table in (reports, candidate_sets) else "task or run"
                raise UserError(f"Put the {missing} before what refers to it ({values[key[0]]}).") from error
