"""`posttrain rollout`: let a policy act on tasks, and count what passes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from console.session import InSession, Session, print_table

if TYPE_CHECKING:
    from console.job_settings import EvaluateJob

app = App(name="rollout", help="Let a policy act on tasks.")


@app.command
def evaluate(
    run: Path,
    *settings: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    config: Annotated[Path | None, Parameter(alias="-c")] = None,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    session: InSession,
) -> None:
    """Sample accepted tasks and report the pass rate with its interval. Further settings: --NAME VALUE,
    such as --policy runs/rl/policy --split dev --evaluation.samples 4.

    Parameters
    ----------
    run
        Folder of the run; a run that is there goes on.
    config
        TOML file with settings.
    dry_run
        Print the resolved settings and stop.
    """
    from console.job_settings import EvaluateJob
    from console.settings import load_settings

    job = load_settings(EvaluateJob, config, settings)
    if dry_run:
        resolved = job.model_dump(mode="json")
        return session.emit(resolved, lambda: print(json.dumps(resolved, indent=2, ensure_ascii=False)))
    result = asyncio.run(_evaluate(session, job, run))
    session.emit(result, lambda: print_table(("what", "value"), list(result.items()), empty=""))


async def _evaluate(session: Session, job: EvaluateJob, run: Path) -> dict[str, Any]:
    from catalog.runs import read_run
    from console.jobs import measure
    from console.workshop import open_workshop

    async with open_workshop(session, jobs=job.jobs) as workshop:
        tasks = workshop.tasks(job.agent, split=job.split, source=job.source, limit=job.limit)
        await measure(workshop, job, tasks, run)
    done = read_run(run)
    return {"run": done.id, "folder": str(run), **done.summary}
