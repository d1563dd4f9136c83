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
    from catalog.models import RunKind
    from catalog.runs import RunFolder
    from console.runs import record
    from console.workshop import open_speaker, open_workshop
    from rollout.evaluate import evaluate

    resolved, seed = job.model_dump(mode="json"), job.evaluation.seed
    with RunFolder.open(run, kind=RunKind.EVALUATION, config=resolved, seed=seed, resume=True) as folder:
        async with open_workshop(session, jobs=job.jobs) as workshop:
            tasks = workshop.tasks(job.agent, split=job.split, source=job.source, limit=job.limit)
            agent = workshop.agent(job.agent, fresh=True, bash=job.bash)
            async with open_speaker(job.policy, job.engine) as speaker:
                found = await evaluate(
                    tasks, speaker, agent,
                    folder=run / "rollout", run_id=folder.run.id, config=job.evaluation,
                )  # fmt: skip
            # Tasks of one function resemble each other: they are resampled together.
            clusters = {task.id: (task.origin.path, task.origin.function) for task in tasks}
            result: dict[str, Any] = {"run": folder.run.id, "folder": str(run), **found.summary()}
            if found.rates:
                rate = found.estimate(clusters, seed=seed)
                result |= {"rate": rate.mean, "low": rate.low, "high": rate.high, "n": len(found.rates)}
            folder.finish(result)
            record(workshop.catalog, run)
    return result
