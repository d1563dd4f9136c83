"""`posttrain tasks export` and `tasks import`: tasks in other people's formats."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from console.session import InSession, clean, print_table


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
    trust: Annotated[bool, Parameter(negative="")] = False,
    session: InSession,
) -> None:
    """Enter the tasks of a file or folder in another format, as drafts; `tasks audit` judges them.

    Parameters
    ----------
    path
        The file or folder.
    format
        swebench, swebench-v5, swe-smith, swe-rebench, harbor, terminal-bench, openenv or huggingface.
    trust
        Keep the status and the quality report that the document claims.
    """
    from envfactory.formats.exchange import import_tasks
    from sandbox.images import ImageStore

    with session.catalog() as catalog:
        images = ImageStore(session.store())
        entered = asyncio.run(import_tasks(path, format, catalog, images, trust=trust))
    rows = [(one.task.id, one.task.status.value, "; ".join(one.notes) or None) for one in entered]
    columns = ("id", "status", "notes")
    session.emit(
        [dict(zip(columns, row, strict=True)) | {"new": one.fresh}
         for row, one in zip(rows, entered, strict=True)],
        lambda: print_table(columns, rows, empty=""),
    )  # fmt: skip
