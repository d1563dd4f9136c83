"""`posttrain runs`: jobs and what came of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from console.session import InSession, clean, print_table

if TYPE_CHECKING:
    from catalog.store import Catalog

app = App(name="runs", help="Jobs and what came of them.")
app.command("console.exchange:export_run", name="export")
app.command("console.exchange:import_run", name="import")


@app.command(name="list")
def list_runs(*, kind: str | None = None, state: str | None = None, session: InSession) -> None:
    """List runs, newest first.

    Parameters
    ----------
    kind
        synthesis, audit, sft, rl, opd or evaluation.
    state
        running, finished or failed.
    """
    with session.catalog() as catalog:
        runs = catalog.list_runs(kind=kind, state=state)
    columns = ("id", "kind", "state", "started", "minutes", "folder")
    rows = [
        (
            run.id,
            run.kind.value,
            run.state,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created)),
            f"{(run.finished - run.created) / 60:.1f}" if run.finished else None,
            run.folder,
        )
        for run in runs
    ]
    session.emit(
        [run.model_dump(mode="json") for run in runs],
        lambda: print_table(columns, rows, empty="There are no such runs."),
    )


@app.command(name="show")
def show_run(run: str, *, session: InSession) -> None:
    """Show one run: its state, settings, latest metrics and summary.

    Parameters
    ----------
    run
        Id of a run, or its folder.
    """
    from catalog.jsonl import read_lines, read_record
    from catalog.runs import read_run

    folder = Path(run)
    if folder.is_dir():
        record = read_run(folder)
    else:
        with session.catalog() as catalog:
            record = catalog.get_run(run)
        folder = Path(record.folder)
    metrics = list(read_lines(folder / "metrics.jsonl"))
    at = folder / "progress.json"
    progress = read_record(at) if at.exists() else None
    value = record.model_dump(mode="json") | {"progress": progress, "metrics": metrics}

    def show() -> None:
        print(f"{record.id}  {record.kind.value}  {record.state}  {folder}")
        if progress:
            print(clean(f"  {progress['stage']}: {progress['done']} of {progress['total'] or '?'}"))
        print(f"Settings  {json.dumps(record.config)}")
        if metrics:
            print(f"Step {metrics[-1]['step']}  {json.dumps(metrics[-1])}")
        if record.summary:
            print(f"Summary  {json.dumps(record.summary, indent=2)}")

    session.emit(value, show)


def record(catalog: Catalog, folder: Path) -> str:
    """Enter a run folder and the trajectories under its `rollout` into the catalog; returns the run's id.

    Doing so again changes nothing. Trajectories of tasks that the catalog does not know are left out.
    """
    from catalog.jsonl import Position
    from catalog.runs import read_run
    from catalog.trajectory import Trajectory

    run = read_run(folder)
    file = (folder / "rollout" / "trajectories.jsonl").resolve()
    known = {task.id for task in catalog.list_tasks()}
    with catalog.transaction():
        catalog.put_run(run.model_copy(update={"folder": str(folder.resolve())}))
        offset = 0
        for line in file.read_bytes().splitlines(keepends=True) if file.exists() else ():
            if line.endswith(b"\n"):
                trajectory = Trajectory.model_validate_json(line)
                if trajectory.task_id in known and trajectory.run_id == run.id:
                    position = Position(str(file), offset, len(line) - 1)
                    catalog.put_trajectory(trajectory, at=position)
            offset += len(line)
    return run.id
