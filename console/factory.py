"""`posttrain tasks synth` and `tasks audit`: the two that run foreign code, in sandboxes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from console.progress import Stage, Stages
from console.session import InSession, Session, print_table

if TYPE_CHECKING:
    from catalog.models import QualityReport
    from envfactory.config import SynthConfig
    from envfactory.synthesis import Synthesis


def synth(
    source: str,
    *settings: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    config: Annotated[Path | None, Parameter(alias="-c")] = None,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    session: InSession,
) -> None:
    """Make audited tasks of a source; again with the same source, go on. Further settings: --NAME VALUE.

    Parameters
    ----------
    source
        pypi:NAME, pypi:NAME==VERSION, or a path or URL of a git repository.
    config
        TOML file with settings.
    dry_run
        Print the resolved settings and stop.
    """
    from console.settings import load_settings
    from envfactory.config import SynthConfig

    resolved = load_settings(SynthConfig, config, settings)
    if dry_run:
        shown = resolved.model_dump(mode="json")
        return session.emit(shown, lambda: print(json.dumps(shown, indent=2)))
    made = asyncio.run(_synthesize(session, source, resolved))
    summary = {"source": source, "minutes": round(made.seconds / 60, 2), **made.funnel.summary()}

    def show() -> None:
        rows = [(name, _words(value)) for name, value in summary.items()]
        print_table(("what", "value"), rows, empty="")

    session.emit(summary, show)


def audit(
    *ids: str,
    all: Annotated[bool, Parameter(negative="")] = False,
    format: Annotated[str | None, Parameter(alias="-f")] = None,
    repo: str | None = None,
    image: str | None = None,
    session: InSession,
) -> None:
    """Judge tasks again, or anybody's tasks in another format; what fails is quarantined.

    Parameters
    ----------
    ids
        Ids of tasks; with --format one file or folder.
    all
        Every accepted task.
    format
        Import the file or folder in this format first, as `tasks import` does.
    repo
        Path or URL of the git repository of its tasks; {repo} stands for a task's owner/name.
    image
        Digest of an image with the tests' environment (default: one is built).
    """
    from catalog.errors import UserError

    if format is None and (repo or image):
        raise UserError("--repo and --image are for a document of others: give --format, too.")
    if format is not None and (len(ids) != 1 or all):
        raise UserError("With --format name one file or folder.")
    if format is None and bool(ids) == all:
        raise UserError("Name tasks to audit, or give --all.")
    if format is not None:
        from console.exchange import import_document
        from envfactory.folders import strangers

        if format == "harbor" and (folders := strangers(Path(ids[0]))):
            if image is None:
                raise UserError("Name the image that the folder's Dockerfile builds: --image sha256:...")
            reports = asyncio.run(_audit_folders(session, folders, image, repo))
            return session.emit(
                [report.model_dump(mode="json") for report in reports], lambda: _print_folders(reports)
            )
        entered = asyncio.run(import_document(session, Path(ids[0]), format, repo=repo, image=image))
        ids = tuple(one.task.id for one in entered)
    reports = asyncio.run(_audit(session, ids))
    rows = [(one.task_id, one.rejected_by or "passes", one.history[-1].reason) for one in reports]
    session.emit(
        [report.model_dump(mode="json") for report in reports],
        lambda: print_table(("task", "verdict", "reason"), rows, empty="There is no accepted task to audit."),
    )


async def _synthesize(session: Session, source: str, config: SynthConfig) -> Synthesis:
    from catalog.store import default_home
    from envfactory.synthesis import Tools, synthesize
    from sandbox.base import provider
    from sandbox.images import ImageStore

    store = session.store()
    sandboxes = provider(store=store)
    home = session.home or default_home()
    try:
        with session.catalog() as catalog, Stages(file=session.log) as stages:
            with stages.stage("Synthesis", total=sum(config.tasks.values())) as stage:
                tools = Tools(catalog, sandboxes, ImageStore(store))
                tick = _counter(stage, sum(config.tasks.values()))
                made = await synthesize(source, home, tools, config, progress=stage.note, tick=tick)
                stage.result(f"{len(made.tasks)} tasks accepted of {made.funnel.proposed} proposals")
            return made
    finally:
        await sandboxes.close()


def _counter(stage: Stage, wanted: int) -> Any:
    reached: dict[str, int] = {}

    def tick(split: str | None, accepted: int, _wanted: int) -> None:
        reached[split or "history"] = accepted
        done = sum(count for name, count in reached.items() if name != "history")
        stage.update(min(done, wanted))

    return tick


async def _audit(session: Session, ids: tuple[str, ...]) -> list[QualityReport]:
    from console.workshop import open_workshop
    from envfactory.audit import audit
    from sandbox.images import ImageStore

    reports: list[QualityReport] = []
    async with open_workshop(session) as workshop:
        catalog = workshop.catalog
        tasks = [catalog.get_task(id) for id in ids] or catalog.list_tasks(status="accepted")
        with Stages(file=session.log) as stages, stages.stage("Audit", total=len(tasks)) as stage:
            for task in tasks:
                stage.note(task.id)
                reports.append(await audit(task, catalog, ImageStore(session.store()), workshop.grader))
                stage.advance()
            bad = sum(report.rejected_by is not None for report in reports)
            stage.result(f"{len(reports) - bad} of {len(reports)} tasks pass")
    return reports


async def _audit_folders(
    session: Session, folders: list[Path], image: str, repo: str | None
) -> list[QualityReport]:
    """Judge strangers' Harbor folders. They enter no catalog: what their tests are is not known."""
    from catalog.errors import UserError
    from catalog.store import default_home
    from envfactory.folders import audit_folder
    from envfactory.sanitize import clean
    from envfactory.sources import open_source
    from envfactory.sources.base import Limits
    from sandbox.base import provider
    from sandbox.images import ImageStore

    store = session.store()
    if not ImageStore(store).exists(image):
        raise UserError(f"No image {image} is in {store}: build or import it first.")
    sandboxes = provider(store=store)
    reports: list[QualityReport] = []
    try:
        files = None
        if repo is not None:
            history = open_source(repo, Limits(commits=1)).fetch(session.home or default_home())
            files = clean(history.tree(history.newest))
        with Stages(file=session.log) as stages, stages.stage("Audit", total=len(folders)) as stage:
            for folder in folders:
                stage.note(folder.name)
                reports.append(await audit_folder(folder, sandboxes, image, files))
                stage.advance()
    finally:
        await sandboxes.close()
    return reports


def _print_folders(reports: list[QualityReport]) -> None:
    marks = {True: "passed", False: "failed", None: "not judged"}
    rows = [
        (report.task_id, gate.name, marks[gate.passed], gate.evidence)
        for report in reports
        for gate in report.gates
    ]
    print_table(("task", "gate", "verdict", "evidence"), rows, empty="")


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items()) or "-"
    return str(value)
