"""The quality report: one HTML file about all tasks of a catalog, to be read and passed on.

    write(catalog, Path("report.html"))

Everything is in the file: style and pictures are inline, nothing is fetched, no script runs (the content
security policy forbids both). Text of tasks is hostile: Jinja escapes all of it, and characters that
reorder or hide text are shown as their code. Gold patches stand in a collapsed section for reviewers.

Left out: trajectories, and filtering beyond status; the served pages of `console` do that.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from catalog.atomic import write_atomic
from catalog.blobs import BlobCorrupt, BlobMissing, Blobs
from catalog.models import CandidateSet, QualityReport, Task
from catalog.store import Catalog
from envfactory import charts

LONGEST_TEXT = 20_000
"""Characters of one text that are shown; a longer one is cut, and the report says so."""
_STATUS_ICONS = {"accepted": "✓", "validated": "◐", "draft": "○", "quarantined": "!", "retired": "–"}
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# Controls, and the bidirectional and zero-width marks that make code read as what it is not.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


@dataclass(frozen=True)
class DiffLine:
    """A line of a patch and what it is: `add`, `del`, `hunk`, `file` or `same`."""

    kind: str
    text: str


@dataclass(frozen=True)
class TaskView:
    """One task, ready for the template."""

    anchor: str
    """A name of ours: ids of tasks are not trusted in addresses."""
    task: Task
    report: QualityReport
    verdict: str
    """Why the task is where it is, in one sentence."""
    icon: str
    chance: float | None
    gold: tuple[DiffLine, ...]


def write(
    catalog: Catalog,
    out: Path,
    *,
    source: str | None = None,
    title: str = "Task quality",
) -> int:
    """Write the report of all tasks (of one source) to `out`, atomically; returns their number.

    The funnel of a whole catalog begins with the proposals that never became a task.
    """
    tasks = catalog.list_tasks(source=source)
    known = {report.task_id: report for report in catalog.list_reports()}
    reports = [known.get(task.id) or QualityReport(task_id=task.id) for task in tasks]
    candidates = {found.task_id: found for found in catalog.list_candidates()}
    head = proposals(catalog, len(tasks)) if source is None else []
    html = render(tasks, reports, candidates, catalog.blobs, head=head, title=title, now=time.time())
    write_atomic(out, html.encode(errors="replace"))
    return len(tasks)


def proposals(catalog: Catalog, tasks: int) -> list[tuple[str, int]]:
    """Steps of the funnel before there were tasks: what was proposed, and what is left after each reason."""
    made = catalog.stages.list("proposal").values()
    reasons = Counter(str(one["reason"]) for one in made if one["task"] is None)
    left = tasks + reasons.total()
    steps = [("proposals", left)] if reasons else []
    for reason, count in reasons.most_common():
        left -= count
        steps.append((f"not: {reason}", left))
    return steps


def render(
    tasks: Sequence[Task],
    reports: Sequence[QualityReport],
    candidates: dict[str, CandidateSet],
    blobs: Blobs,
    *,
    head: Sequence[tuple[str, int]] = (),
    title: str = "Task quality",
    now: float,
) -> str:
    """The page as text. `reports[i]` is of `tasks[i]`; `now` is in seconds since the epoch."""
    rows = charts.solver_rows(reports)
    repeated = [row for row in rows if row.attempts > row.tasks]
    shown_solver = (repeated or rows)[-1].solver if rows else None
    views = [
        _view(number, task, report, candidates.get(task.id), blobs)
        for number, (task, report) in enumerate(zip(tasks, reports, strict=True))
    ]
    return _environment().get_template("report.html.j2").render(
        title=title,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now)),
        sources=sorted({f"{task.origin.source} {task.origin.revision}" for task in tasks}),
        counts=_counts(tasks),
        icons=_STATUS_ICONS,
        steps=charts.funnel(tasks, reports, head),
        gates=charts.gate_bars(reports),
        solvers=rows,
        bin_names=charts.BIN_NAMES,
        whisker_solver=shown_solver,
        whiskers=charts.whiskers(reports, shown_solver) if shown_solver else [],
        operators=_operators(tasks),
        views=views,
        solver_name=charts.solver_name,
    )  # fmt: skip


def visible(text: object, limit: int = LONGEST_TEXT) -> str:
    """Text with colours removed, hidden characters shown as their code, and its length bounded."""
    shown = _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", _ANSI.sub("", str(text)))
    if len(shown) > limit:
        return f"{shown[:limit]}\n... {len(shown) - limit:,} more characters are not shown"
    return shown


def diff_lines(patch: str) -> tuple[DiffLine, ...]:
    """A unified diff, line by line, for colouring."""
    kinds = {"+": "add", "-": "del", "@": "hunk", " ": "same"}
    lines: list[DiffLine] = []
    in_hunk = False
    for line in patch.splitlines():
        in_hunk = line.startswith("@@") or (in_hunk and not line.startswith("diff "))
        lines.append(DiffLine(kinds.get(line[:1], "file") if in_hunk else "file", line))
    return tuple(lines)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("envfactory", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = visible
    environment.filters["day"] = lambda at: time.strftime("%Y-%m-%d %H:%M", time.gmtime(at))
    return environment


def _view(
    number: int, task: Task, report: QualityReport, candidates: CandidateSet | None, blobs: Blobs
) -> TaskView:
    try:
        gold = diff_lines(visible(blobs.get(task.solution).decode(errors="replace")))
    except (BlobMissing, BlobCorrupt) as error:
        gold = (DiffLine("file", f"The patch cannot be shown: {error}"),)
    return TaskView(
        anchor=f"task-{number + 1}",
        task=task,
        report=report,
        verdict=_verdict(task, report),
        icon=_STATUS_ICONS[task.status.value],
        chance=candidates.chance if candidates and candidates.candidates else None,
        gold=gold,
    )


def _verdict(task: Task, report: QualityReport) -> str:
    failed = [gate for gate in report.gates if gate.passed is False]
    if failed:
        return f"Gate {failed[0].name} failed: {failed[0].evidence}"
    last = report.history[-1] if report.history else None
    if task.status not in ("accepted", "validated", "draft") and last:
        return f"{last.action} by {last.actor}: {last.reason}"
    unknown = [gate.name for gate in report.gates if gate.passed is None]
    if unknown:
        return f"Not judged yet by {', '.join(unknown)}: our machinery failed there, which is no rejection."
    if not report.gates:
        return "No gate has looked at it yet."
    return f"All {len(report.gates)} gates passed."


def _counts(tasks: Sequence[Task]) -> dict[str, int]:
    counts = {status: sum(task.status == status for task in tasks) for status in _STATUS_ICONS}
    return {status: count for status, count in counts.items() if count}


def _operators(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    names = sorted({task.origin.operator or task.origin.kind for task in tasks})
    rows: list[dict[str, Any]] = []
    for name in names:
        mine = [task for task in tasks if (task.origin.operator or task.origin.kind) == name]
        accepted = sum(task.status == "accepted" for task in mine)
        held_out = sum(task.split == "test" for task in mine)
        rows.append({"name": name, "found": len(mine), "accepted": accepted, "held_out": held_out})
    return sorted(rows, key=lambda row: (-row["found"], row["name"]))
