"""`posttrain regrade`: stored trajectories against the verifiers that their tasks have now."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from console.session import InSession, Session, print_table

if TYPE_CHECKING:
    from rollout.regrade import Regraded

app = App(name="regrade", help="Grade stored trajectories again, and show what flipped.")


@app.default
def regrade(run: str, *, fresh: Annotated[bool, Parameter(negative="")] = False, session: InSession) -> None:
    """Grade the trajectories of a run with the verifiers that their tasks have now, and show what flipped.

    The run's trajectories stay as they are; the results are lines of RUN/regrade.jsonl.

    Parameters
    ----------
    run
        Id of a run, or its folder.
    fresh
        Make every verdict anew, though the verifier is the one that judged before.
    """
    from console.exchange import run_folder
    from rollout.regrade import summary

    lines, skipped = asyncio.run(_regrade(session, run_folder(session, run), fresh))
    counts = summary([*lines, *skipped])
    flipped = [line for line in (*lines, *skipped) if line.outcome != "same"]
    columns = ("trajectory", "task", "before", "after", "outcome", "evidence")
    rows = [
        (one.trajectory_id, one.task_id, one.before, one.after, one.outcome, one.evidence) for one in flipped
    ]

    def show() -> None:
        print_table(columns, rows, empty="Nothing flipped.")
        print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "no trajectories")

    value: dict[str, Any] = {"counts": counts, "flipped": [one.model_dump(mode="json") for one in flipped]}
    session.emit(value, show)


async def _regrade(session: Session, folder: Path, fresh: bool) -> tuple[list[Regraded], list[Regraded]]:
    """Results for the present verifiers, of this and of earlier calls, and what could not be judged now."""
    from catalog.jsonl import JsonLines, read_lines
    from catalog.runs import held
    from catalog.trajectory import Trajectory
    from console.progress import Stages
    from console.workshop import open_workshop
    from rollout.regrade import Leftovers, regrade, results

    source = folder / "rollout" / "trajectories.jsonl"
    trajectories = [Trajectory.model_validate(line) for line in read_lines(source)]
    async with open_workshop(session) as workshop:
        catalog = workshop.catalog
        change = Leftovers(workshop.grader, workshop.provider, catalog.blobs)
        with held(folder), JsonLines(folder / "regrade.jsonl") as log, Stages(file=session.log) as stages:
            with stages.stage("Regrade", total=len(trajectories)) as stage:
                unsettled: list[Regraded] = []
                async for line in regrade(trajectories, catalog.find_task, change, log, fresh=fresh):
                    stage.advance()
                    if line.outcome in ("unjudged", "skipped"):
                        unsettled.append(line)
            tasks = filter(None, map(catalog.find_task, {one.task_id for one in trajectories}))
            verifiers = {task.id: task.verifier.digest() for task in tasks}
            return results(read_lines(log.path), verifiers), unsettled
