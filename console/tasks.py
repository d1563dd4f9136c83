"""`posttrain tasks`: make tasks, look at them, judge them again."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from console.factory import audit, synth
from console.session import InSession, clean, print_table

if TYPE_CHECKING:
    from catalog.models import CandidateSet, QualityReport, Task

app = App(name="tasks", help="Synthesize, audit and browse tasks.")
app.command(synth)
app.command(audit)
app.command("console.exchange:export_tasks", name="export")
app.command("console.exchange:import_tasks", name="import")

MARKS = {True: "✓ passed", False: "✗ failed", None: "? not judged"}


@app.command(name="list")
def list_tasks(
    *,
    status: str | None = None,
    split: str | None = None,
    source: str | None = None,
    operator: str | None = None,
    rejected_by: str | None = None,
    limit: Annotated[int, Parameter(alias="-n")] = 50,
    session: InSession,
) -> None:
    """List tasks.

    Parameters
    ----------
    status
        draft, validated, accepted, quarantined or retired.
    split
        train, dev or test.
    source
        As given to synth, such as pypi:boltons.
    operator
        Kind of the bug, such as comparison.
    rejected_by
        Name of the gate that failed first.
    limit
        Show at most so many.
    """
    with session.catalog() as catalog:
        counts = catalog.count_tasks()
        found = catalog.list_tasks(
            status=status,
            split=split,
            source=source,
            operator=operator,
            rejected_by=rejected_by,
            limit=limit + 1,
        )
        shown = found[:limit]
        reports = {report.task_id: report for report in catalog.list_reports()}
    rows = [_row(task, reports.get(task.id)) for task in shown]

    def show() -> None:
        print_table(list(_ROW), [tuple(row.values()) for row in rows], empty=_nothing(counts))
        if len(found) > limit:
            print(f"... and more: --limit {limit * 2} shows further ones.")

    session.emit(rows, show)


@app.command(name="show")
def show_task(id: str, *, gold: Annotated[bool, Parameter(negative="")] = False, session: InSession) -> None:
    """Show one task: verdict first, then gates, solve rates, statement and history.

    Parameters
    ----------
    id
        Id of the task.
    gold
        Show the gold patch, too. It is for reviewers: an agent that sees it learns nothing.
    """
    with session.catalog() as catalog:
        task = catalog.get_task(id)
        report = catalog.find_report(id)
        candidates = catalog.find_candidates(id)
        patch = catalog.blobs.get(task.solution).decode(errors="replace") if gold else None
    value: dict[str, Any] = {
        "task": task.model_dump(mode="json"),
        "report": report.model_dump(mode="json") if report else None,
        "candidates": len(candidates.candidates) if candidates else None,
    }
    if patch is not None:
        value["gold"] = patch

    def show() -> None:
        _print_task(task, report, candidates)
        if patch is not None:
            print(f"\nGold patch\n{textwrap.indent(clean(patch), '  ')}")

    session.emit(value, show)


@app.command(name="report")
def write_report(
    *,
    out: Annotated[Path, Parameter(alias="-o")] = Path("report.html"),
    source: str | None = None,
    session: InSession,
) -> None:
    """Write the quality report of all tasks: one HTML file that needs nothing else.

    Parameters
    ----------
    out
        The file.
    source
        Only tasks of this source.
    """
    from envfactory.report import write

    with session.catalog() as catalog:
        written = write(catalog, out, source=source)
    session.emit(
        {"file": str(out.resolve()), "tasks": written},
        lambda: print(f"{out.resolve()}: {written} tasks"),
    )


_ROW = ("id", "status", "split", "kind", "operator", "function", "solved", "rejected by")


def _row(task: Task, report: QualityReport | None) -> dict[str, Any]:
    solved = None
    if report and report.solve_rates:
        rate = report.solve_rates[-1]
        solved = f"{rate.passed}/{rate.attempts}"
    origin = task.origin
    rejected = report.rejected_by if report else None
    values = (task.id, task.status.value, task.split, origin.kind, origin.operator, origin.function)
    return dict(zip(_ROW, (*values, solved, rejected), strict=True))


def _nothing(counts: dict[str, int]) -> str:
    if not counts:
        return "There are no tasks yet: make some with `posttrain tasks synth pypi:boltons`."
    have = ", ".join(f"{number} {status}" for status, number in counts.items())
    return f"No task matches; there are {have}."


def _print_task(task: Task, report: QualityReport | None, candidates: CandidateSet | None) -> None:
    why = ""
    if report and report.rejected_by:
        gate = next(g for g in report.gates if g.name == report.rejected_by)
        why = f": gate {gate.name} failed, {gate.evidence}"
    print(clean(f"{task.id}  {task.status.value}{why}"))
    origin = task.origin
    place = " ".join(part for part in (origin.path, origin.function) if part)
    print(clean(f"from {origin.source} {origin.revision}, {origin.kind} {origin.operator or ''} {place}"))
    if report:
        print("\nGates")
        for gate in report.gates:
            print(clean(f"  {MARKS[gate.passed]:12} {gate.name:16} {gate.cost_s:6.1f} s  {gate.evidence}"))
    if report and report.solve_rates:
        print("\nSolve rates")
        for rate in report.solve_rates:
            low, high = rate.interval
            effort = f" at effort {rate.effort}" if rate.effort is not None else ""
            interval = f"95 % [{low:.2f}, {high:.2f}]"
            print(f"  {clean(rate.solver)}{effort}: {rate.passed}/{rate.attempts}, {interval}")
    if candidates:
        count = len(candidates.candidates)
        print(f"\n{count} repair candidates; a blind pick passes with probability {candidates.chance:.3f}")
    tests = task.verifier
    print(f"\nTests: {len(tests.fail_to_pass)} fail to pass, {len(tests.pass_to_pass)} pass to pass")
    print(f"\nStatement\n{textwrap.indent(clean(task.problem.statement.strip()), '  ')}")
    if report and report.history:
        print("\nHistory")
        for entry in report.history:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.at))
            print(clean(f"  {when}  {entry.actor} {entry.action}: {entry.reason}"))
