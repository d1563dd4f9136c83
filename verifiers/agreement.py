"""How far a judge agrees with people's labels: what must be known before its verdicts count.

    report = await measure(grader.grade, labelled)

Any verifier can be measured so, rubrics above all. What could not be judged is counted apart: it agrees with
nobody and contradicts nobody.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from catalog.models import Record, Task, Verdict, wilson


@dataclass(frozen=True)
class Labelled:
    """A change with the verdict that a person gave it."""

    task: Task
    diff: bytes
    passes: bool


class Agreement(Record):
    """Counts over a labelled set."""

    total: int
    agree: int
    false_passes: int
    """Passed by the judge, failed by the label."""
    false_failures: int
    unjudged: int
    accuracy: float | None
    """Of what was judged; None where nothing was."""
    interval: tuple[float, float]
    """Wilson 95 % interval of the accuracy. For independent changes only."""
    kappa: float | None
    """Cohen's kappa (1960): agreement beyond chance. None where one side gives one answer only."""


async def measure(
    grade: Callable[[Task, bytes], Awaitable[Verdict]], labelled: Sequence[Labelled]
) -> Agreement:
    """Judge every change, one after the other, and compare. Raises ValueError for an empty set."""
    verdicts = [await grade(one.task, one.diff) for one in labelled]
    return compare([one.passes for one in labelled], [verdict.reward for verdict in verdicts])


def compare(labels: Sequence[bool], rewards: Sequence[float | None]) -> Agreement:
    """Pure. A reward counts as passed from 1.0 on. Raises ValueError for an empty set or unequal lengths."""
    if not labels:
        raise ValueError("a labelled set needs at least one change")
    pairs = [
        (label, reward >= 1) for label, reward in zip(labels, rewards, strict=True) if reward is not None
    ]
    n = len(pairs)
    agree = sum(label == passed for label, passed in pairs)
    return Agreement(
        total=len(labels),
        agree=agree,
        false_passes=sum(passed and not label for label, passed in pairs),
        false_failures=sum(label and not passed for label, passed in pairs),
        unjudged=len(labels) - n,
        accuracy=agree / n if n else None,
        interval=wilson(agree, n),
        kappa=_kappa(pairs),
    )


def _kappa(pairs: Sequence[tuple[bool, bool]]) -> float | None:
    n = len(pairs)
    labels, passed = sum(label for label, _ in pairs), sum(one for _, one in pairs)
    if labels in (0, n) or passed in (0, n):
        return None
    observed = sum(label == one for label, one in pairs) / n
    chance = (labels * passed + (n - labels) * (n - passed)) / n**2
    return (observed - chance) / (1 - chance)
