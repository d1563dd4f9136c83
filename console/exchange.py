"""`posttrain tasks export|import` and `runs export|import`: tasks and trajectories in others' formats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from console.session import InSession, Session, clean, print_table

if TYPE_CHECKING:
    from console.workshop import Workshop
    from envfactory.formats.exchange import Entered
    from envfactory.formats.importing import Importer
    from sandbox.images import ImageStore


def export_tasks(
    out: Path,
    *ids: str,
    format: Annotated[str, Parameter(alias="-f")],
    status: str = "accepted",
    split: str | None = None,
    source: str | None = None,
    session: InSession,
) -> None:
    """Write tasks as a new file or folder in another format.

    Parameters
    ----------
    out
        The file or folder to write; it must not exist.
    ids
        Only these tasks, whatever their status.
    format
        swebench, swebench-v5, swe-smith, swe-rebench, harbor, terminal-bench, openenv or huggingface.
    status
        Tasks of this status.
    split
        Only tasks of this split.
    source
        Only tasks of this source.
    """
    from catalog.errors import UserError
    from envfactory.formats.exchange import export_tasks
    from sandbox.images import ImageStore

    with session.catalog() as catalog:
        tasks = [catalog.get_task(id) for id in ids]
        tasks = tasks or catalog.list_tasks(status=status, split=split, source=source)
        if not tasks:
            raise UserError("No task matches: see `posttrain tasks list`.")
        count, missing = export_tasks(tasks, catalog, ImageStore(session.store()), format, out)

    def show() -> None:
        print(f"{out.resolve()}: {count} tasks")
        for line in missing:
            print(f"  other programs do not see {clean(line)}")

    session.emit({"path": str(out.resolve()), "tasks": count, "not seen by others": list(missing)}, show)


def import_tasks(
    path: Path,
    *,
    format: Annotated[str, Parameter(alias="-f")],
    repo: str | None = None,
    image: str | None = None,
    trust: Annotated[bool, Parameter(negative="")] = False,
    session: InSession,
) -> None:
    """Enter the tasks of a file or folder in another format, as drafts; `tasks audit` judges them.

    A document of posttrain's own holds all that its tasks need. For one of others name the repository.

    Parameters
    ----------
    path
        The file or folder.
    format
        swebench, swebench-v5, swe-smith, swe-rebench, harbor, terminal-bench, openenv or huggingface.
    repo
        Path or URL of the git repository with the document's commits; {repo} stands for its owner/name.
    image
        Digest of an image with the tests' environment in /opt/env (default: one is built).
    trust
        Keep the status and the quality report that the document claims.
    """
    entered = asyncio.run(import_document(session, path, format, repo=repo, image=image, trust=trust))
    rows = [(one.task.id, one.task.status.value, "; ".join(one.notes) or None) for one in entered]
    columns = ("id", "status", "notes")
    session.emit(
        [dict(zip(columns, row, strict=True)) | {"new": one.fresh}
         for row, one in zip(rows, entered, strict=True)],
        lambda: print_table(columns, rows, empty=""),
    )  # fmt: skip


async def import_document(
    session: Session,
    path: Path,
    format: str,
    *,
    repo: str | None = None,
    image: str | None = None,
    trust: bool = False,
) -> list[Entered]:
    """Enter a document's tasks into the catalog. Raises FormatError before anything is entered."""
    from console.progress import Stages
    from console.workshop import open_workshop
    from envfactory.formats.exchange import import_tasks
    from sandbox.images import ImageStore

    images = ImageStore(session.store())
    if repo is None:
        with session.catalog() as catalog:
            return await import_tasks(path, format, catalog, images, trust=trust)
    async with open_workshop(session) as workshop:
        with Stages(file=session.log) as stages, stages.stage("Import") as stage:
            foreign = importer(workshop, images, repo, image, stage.note)
            return await import_tasks(path, format, workshop.catalog, images, foreign=foreign, trust=trust)


def importer(
    workshop: Workshop, images: ImageStore, repo: str, image: str | None, progress: Callable[[str], None]
) -> Importer:
    """What makes tasks of strangers' documents."""
    from envfactory.formats.importing import Importer

    catalog = workshop.catalog
    return Importer(
        catalog.home, catalog.blobs, images, workshop.provider, workshop.grader,
        repository=repo, image=image, progress=progress,
    )  # fmt: skip


def export_run(
    run: str, out: Path, *, format: Annotated[str, Parameter(alias="-f")], session: InSession
) -> None:
    """Write the trajectories of a run in another format.

    Parameters
    ----------
    run
        Id of a run, or its folder.
    out
        The folder to write, or a .jsonl file; it must not exist.
    format
        atif or mini-swe-agent.
    """
    from catalog.jsonl import read_lines
    from catalog.trajectory import Trajectory
    from envfactory.formats.registry import trajectory_format

    found = trajectory_format(format)
    lines = read_lines(run_folder(session, run) / "rollout" / "trajectories.jsonl")
    count = found.write((Trajectory.model_validate(line) for line in lines), out)

    def show() -> None:
        print(f"{out.resolve()}: {count} trajectories")
        for line in found.missing:
            print(f"  other programs do not see {line}")

    value = {"path": str(out.resolve()), "trajectories": count, "not seen by others": list(found.missing)}
    session.emit(value, show)


def import_run(
    path: Path, run: Path, *, format: Annotated[str, Parameter(alias="-f")], session: InSession
) -> None:
    """Make a run of trajectories in another format; `posttrain regrade` judges what they submitted.

    Parameters
    ----------
    path
        The file or folder with trajectories.
    run
        Folder of the new run.
    format
        atif or mini-swe-agent.
    """
    from catalog.models import RunKind
    from catalog.runs import RunFolder
    from console.runs import record
    from envfactory.formats.registry import trajectory_format
    from rollout.journal import TrajectoryLog

    trajectories = list(trajectory_format(format).read(path))
    config = {"format": format, "imported": str(path.resolve())}
    with RunFolder.open(run, kind=RunKind.EVALUATION, config=config, seed=0, resume=True) as folder:
        log = TrajectoryLog(run / "rollout" / "trajectories.jsonl")
        for one in trajectories:
            log.append(one.model_copy(update={"run_id": folder.run.id}))
        log.close()
        folder.finish({"imported": len(trajectories)})
        with session.catalog() as catalog:
            record(catalog, run)
            known = {task.id for task in catalog.list_tasks()}
        strange = sorted({one.task_id for one in trajectories} - known)
    value = {"run": folder.run.id, "trajectories": len(trajectories), "of unknown tasks": strange}

    def show() -> None:
        print(f"{folder.run.id}: {len(trajectories)} trajectories in {run.resolve()}")
        if strange:
            print(clean(f"  {len(strange)} tasks are not in the catalog, such as {strange[0]}"))

    session.emit(value, show)


def run_folder(session: Session, run: str) -> Path:
    """The folder of a run, by its id or its folder. Raises UnknownId."""
    if Path(run).is_dir():
        return Path(run)
    with session.catalog() as catalog:
        return Path(catalog.get_run(run).folder)
