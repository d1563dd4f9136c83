"""The verifier that is made of others: weights, parts that must pass, and a threshold.

Settings: `WeightedSettings`. Every part judges the same change, each in places of its own. A part that could
not be judged never counts as 0: the whole is passed or failed only where that part could not turn it, and
could not be judged otherwise. Parts stop being judged once the outcome is certain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, model_validator

from catalog.models import Failure, Record, Task, TestStatus, Verdict, VerifierSpec
from verifiers.judging import Bench, Change, settings_of

_ROUNDING = 1e-9
Share = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Part(Record):
    """One verifier of several."""

    name: str = Field(min_length=1)
    verifier: VerifierSpec
    """Of any kind. What may be changed stands in the whole verifier; here it does not count."""
    weight: Share = 1.0
    required: bool = False
    """Where it does not pass in full, nothing does."""


class WeightedSettings(Record):
    """Settings of a `weighted` verifier."""

    parts: tuple[Part, ...] = Field(min_length=1, max_length=32)
    threshold: float | None = Field(default=1.0, gt=0, le=1)
    """Passed from this weighted mean on; None: the mean itself is the reward."""

    @model_validator(mode="after")
    def _names_differ(self) -> WeightedSettings:
        if len({part.name for part in self.parts}) != len(self.parts):
            raise ValueError("two parts have one name")
        return self


async def judge(bench: Bench, task: Task, change: Change) -> Verdict:
    """Judge by the parts, in order. Raises Unjudgeable for settings that are none."""
    settings = settings_of(task, WeightedSettings)
    verdicts: dict[str, Verdict] = {}
    for part in settings.parts:
        spec = part.verifier.model_copy(update={"allowed": task.verifier.allowed})
        verdicts[part.name] = await bench.part(task.model_copy(update={"verifier": spec}), change)
        if combine(settings, verdicts).reward is not None:
            break
    return combine(settings, verdicts)


def combine(settings: WeightedSettings, verdicts: Mapping[str, Verdict]) -> Verdict:
    """The whole from its parts: pure.

    Args:
        verdicts: by name of the part; a part without one was not judged yet, and may turn out either way.

    Returns reward 0.0 for a required part that failed, else by threshold or mean; None with the failure of
    the first part that could not be judged where that part could still turn the outcome.
    """
    total = sum(part.weight for part in settings.parts)
    low = high = 0.0
    open_parts: list[str] = []
    required_open = required_failed = False
    for part in settings.parts:
        verdict = verdicts.get(part.name)
        reward = None if verdict is None else verdict.reward
        low += part.weight / total * (reward or 0.0)
        high += part.weight / total * (1.0 if reward is None else reward)
        if reward is None:
            open_parts.append(part.name)
            required_open |= part.required
        else:
            required_failed |= part.required and reward < 1
    reward = decide(settings.threshold, low, high)
    if required_failed:
        reward = 0.0
    elif required_open and reward != 0:
        reward = None
    failure = None if reward is not None else _failure(open_parts, verdicts)
    return Verdict(
        reward=reward,
        failure=failure,
        tests=_tests(verdicts),
        evidence=_evidence(settings, verdicts),
        duration_s=sum(verdict.duration_s for verdict in verdicts.values()),
    )


def decide(threshold: float | None, low: float, high: float) -> float | None:
    """The outcome of a mean that lies between `low` and `high`; None where it could still turn."""
    if threshold is None:
        return min(1.0, low) if high - low < _ROUNDING else None
    if low >= threshold - _ROUNDING:
        return 1.0
    return 0.0 if high < threshold - _ROUNDING else None


def _failure(open_parts: list[str], verdicts: Mapping[str, Verdict]) -> Failure:
    for name in open_parts:
        failure = verdicts[name].failure if name in verdicts else None
        if failure is not None:
            return failure.model_copy(update={"message": f"{name}: {failure.message}"})
    return Failure(boundary="verifier", kind="not-run", message=f"{', '.join(open_parts)}: not judged yet")


def _tests(verdicts: Mapping[str, Verdict]) -> dict[str, TestStatus]:
    return {f"{name}: {id}": s for name, verdict in verdicts.items() for id, s in verdict.tests.items()}


def _evidence(settings: WeightedSettings, verdicts: Mapping[str, Verdict]) -> str:
    said: list[str] = []
    for part in settings.parts:
        verdict = verdicts.get(part.name)
        if verdict is None:
            outcome = "not needed"
        elif verdict.reward is None:
            outcome = "could not be judged"
        else:
            outcome = f"{verdict.reward:g}. {verdict.evidence}"
        said.append(f"{part.name} (weight {part.weight:g}): {outcome}")
    return "\n".join(said)
