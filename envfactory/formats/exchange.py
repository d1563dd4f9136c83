"""The catalog's tasks out into a document and back: whole or not at all.

    export_tasks(tasks, catalog, images, "harbor", folder)
    await import_tasks(folder, "harbor", workshop...)

An import reads and unpacks the whole document first and enters its tasks in one transaction. What others
say of a task's quality is not taken over: it comes in as a draft, unless `trust` is given.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from catalog.models import Decision, QualityReport, Status, Task
from catalog.store import Catalog
from envfactory.formats.base import Parcel
from envfactory.formats.fields import FormatError
from envfactory.formats.parcels import Unpacked, pack, unpack
from envfactory.formats.registry import task_format
from sandbox.images import ImageStore


@dataclass(frozen=True)
class Entered:
    """What came of one task of a document."""

    task: Task
    fresh: bool
    """False: the catalog had it already, and nothing was changed."""
    notes: tuple[str, ...]


def export_tasks(
    tasks: Iterable[Task], catalog: Catalog, images: ImageStore, format: str, path: Path
) -> tuple[int, tuple[str, ...]]:
    """Write a new document. How many tasks, and what other readers of it will not see. Raises FormatError."""
    found = task_format(format)
    remarks = list(found.missing)

    def packed() -> Iterator[Parcel]:
        for task in tasks:
            parcel = pack(task, catalog.blobs, images, catalog.find_report(task.id))
            remarks.extend(found.misread(parcel))
            yield parcel

    return found.write(packed(), path), tuple(remarks)


async def import_tasks(
    path: Path,
    format: str,
    catalog: Catalog,
    images: ImageStore,
    *,
    foreign: Callable[[Parcel], Awaitable[Unpacked]] | None = None,
    trust: bool = False,
) -> list[Entered]:
    """Enter the tasks of a document. Raises FormatError before anything is entered.

    `foreign` makes tasks of parcels that are not ours (`importing.Importer`); None refuses them.
    """
    parcels = list(task_format(format).read(path))
    if not parcels:
        raise FormatError(f"{path} holds no task")
    unpacked: list[tuple[Parcel, Unpacked]] = []
    for parcel in parcels:
        if parcel.task is not None or foreign is None:
            unpacked.append((parcel, unpack(parcel, catalog.home, catalog.blobs, images)))
        else:
            unpacked.append((parcel, await foreign(parcel)))
    with catalog.transaction():
        return [_enter(parcel, one, catalog, f"{format} document {path}", trust) for parcel, one in unpacked]


def _enter(parcel: Parcel, one: Unpacked, catalog: Catalog, place: str, trust: bool) -> Entered:
    task = one.task
    if (known := catalog.find_task(task.id)) is not None:
        return Entered(known, False, ("it was here already", *one.notes))
    trusted = trust and not parcel.edited and parcel.task is not None and task.id == parcel.task.id
    if not trusted:
        task = task.model_copy(update={"status": Status.DRAFT})
    report = parcel.report if trusted and parcel.report else QualityReport(task_id=task.id, gates=one.gates)
    decision = Decision(actor="importer", action="created", reason=f"from the {place}", at=time.time())
    catalog.put_task(task)
    catalog.put_report(report.model_copy(update={"history": (*report.history, decision)}))
    return Entered(task, True, one.notes)
