"""Geometry of the report's pictures: numbers in, rectangles and lines out. The templates draw them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from catalog.models import QualityReport, SolveRate, Task, wilson


@dataclass(frozen=True)
class Step:
    """One bar of the funnel."""

    label: str
    count: int
    lost: int
    """How many the step removed."""
    width: float
    """Share of the widest bar, 0..1."""


@dataclass(frozen=True)
class GateBar:
    """How often one gate passed, failed, or could not be judged."""

    name: str
    passed: int
    failed: int
    unknown: int
    seconds: float
    """Time that this gate took over all tasks."""

    @property
    def total(self) -> int:
        return self.passed + self.failed + self.unknown


@dataclass(frozen=True)
class SolverRow:
    """Solve rates of one solver over all tasks that it tried."""

    solver: str
    tasks: int
    attempts: int
    mean: float
    """Mean over tasks of their solve rates."""
    low: float
    high: float
    """95 % interval of the mean: Wilson for one draw a task, otherwise a bootstrap over tasks."""
    bins: tuple[int, ...]
    """Tasks with rate 0, in (0, 1/4], (1/4, 1/2], (1/2, 3/4], (3/4, 1), and 1."""


@dataclass(frozen=True)
class Whisker:
    """One task of the interval picture, in the order of the picture."""

    task_id: str
    rate: float
    low: float
    high: float
    passed: int
    attempts: int


BIN_NAMES = ("never", "up to 1/4", "up to 1/2", "up to 3/4", "nearly always", "always")


def gate_order(reports: Sequence[QualityReport]) -> list[str]:
    """Gate names in the order in which tasks met them."""
    places: dict[str, list[int]] = {}
    for report in reports:
        for place, gate in enumerate(report.gates):
            places.setdefault(gate.name, []).append(place)
    return sorted(places, key=lambda name: (fmean(places[name]), name))


def funnel(
    tasks: Sequence[Task], reports: Sequence[QualityReport], head: Sequence[tuple[str, int]] = ()
) -> list[Step]:
    """From what was found to what was accepted. A task leaves at the first gate that it failed.

    `head` holds steps before there were tasks, such as ("edits tried", 2000).
    """
    rejected = Counter(report.rejected_by for report in reports if report.rejected_by)
    counts = [*head, ("tasks", len(tasks))]
    for gate in gate_order(reports):
        if rejected[gate]:
            counts.append((f"pass {gate}", counts[-1][1] - rejected[gate]))
    accepted = sum(task.status == "accepted" for task in tasks)
    counts.append(("accepted", accepted))
    widest = max((count for _, count in counts), default=0) or 1
    previous = counts[0][1]
    steps: list[Step] = []
    for label, count in counts:
        steps.append(Step(label, count, max(0, previous - count), count / widest))
        previous = count
    return steps


def gate_bars(reports: Sequence[QualityReport]) -> list[GateBar]:
    """One bar a gate, in gate order."""
    bars: list[GateBar] = []
    for name in gate_order(reports):
        gates = [gate for report in reports for gate in report.gates if gate.name == name]
        results = Counter(gate.passed for gate in gates)
        seconds = sum(gate.cost_s for gate in gates)
        bars.append(GateBar(name, results[True], results[False], results[None], seconds))
    return bars


def solver_rows(reports: Sequence[QualityReport]) -> list[SolverRow]:
    """One row a solver (and effort), weakest first."""
    by_solver: dict[str, list[SolveRate]] = {}
    for report in reports:
        for rate in report.solve_rates:
            if rate.attempts:
                by_solver.setdefault(solver_name(rate), []).append(rate)
    rows: list[SolverRow] = []
    for solver, rates in by_solver.items():
        shares = [rate.passed / rate.attempts for rate in rates]
        low, high = mean_interval(rates)
        bins = Counter(_bin(share) for share in shares)
        attempts = sum(rate.attempts for rate in rates)
        filled = tuple(bins[n] for n in range(len(BIN_NAMES)))
        rows.append(SolverRow(solver, len(rates), attempts, fmean(shares), low, high, filled))
    return sorted(rows, key=lambda row: (row.mean, row.solver))


def whiskers(reports: Sequence[QualityReport], solver: str) -> list[Whisker]:
    """Every task that this solver tried, hardest first, with Wilson intervals."""
    found: list[Whisker] = []
    for report in reports:
        for rate in report.solve_rates:
            if rate.attempts and solver_name(rate) == solver:
                share = rate.passed / rate.attempts
                found.append(Whisker(report.task_id, share, *rate.interval, rate.passed, rate.attempts))
    return sorted(found, key=lambda w: (w.rate, w.low, w.task_id))


def solver_name(rate: SolveRate) -> str:
    """Solver and effort in one label."""
    return rate.solver if rate.effort is None else f"{rate.solver}, effort {rate.effort}"


def mean_interval(rates: Sequence[SolveRate], *, resamples: int = 1000) -> tuple[float, float]:
    """95 % interval of the mean over tasks of their solve rates.

    Attempts at one task are not independent, so Wilson's interval is for one attempt a task, and for
    means of 0 or 1, where a bootstrap would claim certainty. The seed is fixed: the same tasks give the
    same report.
    """
    shares = [rate.passed / rate.attempts for rate in rates]
    if set(shares) <= {0.0} or set(shares) <= {1.0} or all(rate.attempts == 1 for rate in rates):
        return wilson(round(sum(shares)), len(shares))
    if len(shares) < 2:
        return rates[0].interval
    generator = random.Random(0)
    means = sorted(fmean(generator.choices(shares, k=len(shares))) for _ in range(resamples))
    return means[int(0.025 * resamples)], means[int(0.975 * resamples) - 1]


def _bin(share: float) -> int:
    if share == 0:
        return 0
    if share == 1:
        return 5
    return 1 + min(3, int(-(-share * 4 // 1)) - 1)
