"""Composition of verifiers: what could not be judged is never a 0."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from catalog.models import Failure, Verdict, VerifierSpec
from sandbox.trees import pack_files
from tests.verifiers.tasks import BUGGY, FIXED, WORKSPACE, Blobs, make_task
from verifiers.grading import Grader
from verifiers.weighted import Part, WeightedSettings, combine

SPEC = VerifierSpec(kind="state", protected="sha256:" + "0" * 64, allowed=(".",))
BROKEN = Verdict(reward=None, failure=Failure(boundary="sandbox", kind="SandboxLost", message="gone"))
PASSED, FAILED = Verdict(reward=1.0), Verdict(reward=0.0)


def settings(*weights: float, threshold: float | None = 1.0, required: str = "") -> WeightedSettings:
    parts = [
        Part(name=name, verifier=SPEC, weight=weight, required=name in required)
        for name, weight in zip("abcdefghij", weights, strict=False)
    ]
    return WeightedSettings(parts=tuple(parts), threshold=threshold)


@pytest.mark.parametrize(
    ("weights", "threshold", "verdicts", "reward"),
    [
        ((1, 1), 1.0, "pp", 1.0),
        ((1, 1), 1.0, "pf", 0.0),
        ((1, 1), 1.0, "f?", 0.0),
        ((1, 1), 1.0, "p?", None),
        ((3, 1), 0.75, "p?", 1.0),
        ((3, 1), 0.75, "pf", 1.0),
        ((3, 1), 0.75, "?p", None),
        ((3, 1), 0.76, "fp", 0.0),
        ((3, 1), None, "pf", 0.75),
        ((3, 1), None, "p?", None),
        ((3, 1), None, "f?", None),
        ((0.1,) * 10, 1.0, "pppppppppp", 1.0),
        ((0.1,) * 10, None, "pppppppppp", 1.0),
    ],
)
def test_an_unjudged_part_counts_as_either(weights, threshold, verdicts, reward):
    kinds = {"p": PASSED, "f": FAILED, "?": BROKEN}
    given = {name: kinds[v] for name, v in zip("abcdefghij", verdicts, strict=False)}
    found = combine(settings(*weights, threshold=threshold), given)
    assert found.reward == (pytest.approx(reward) if reward is not None else None)
    if reward is None:
        assert (found.failure.boundary, found.failure.kind) == ("sandbox", "SandboxLost")
        assert found.failure.message.endswith(": gone")


def test_required_parts_decide_alone():
    loose = settings(1, 9, threshold=0.5, required="a")
    assert combine(loose, {"a": FAILED, "b": PASSED}).reward == 0.0
    assert combine(loose, {"a": Verdict(reward=0.9), "b": PASSED}).reward == 0.0
    assert combine(loose, {"a": BROKEN, "b": PASSED}).reward is None
    assert combine(loose, {"a": BROKEN, "b": FAILED}).reward == 0.0
    assert combine(loose, {"a": PASSED, "b": PASSED}).reward == 1.0
    assert combine(loose, {"b": PASSED}).failure.kind == "not-run"
    assert combine(settings(1, 9, threshold=None, required="a"), {"a": FAILED, "b": PASSED}).reward == 0.0


def test_settings_that_make_no_sense_are_refused():
    part = Part(name="a", verifier=SPEC)
    for wrong in ({"parts": ()}, {"parts": (part, part)}, {"parts": (part,), "threshold": 0}):
        with pytest.raises(ValidationError):
            WeightedSettings(**wrong)
    with pytest.raises(ValidationError):
        Part(name="a", verifier=SPEC, weight=0)


async def test_tests_a_state_and_a_script_together(sandboxes, images, task_of):
    """Every kind judges the same change; a repair that also touches the README fails by its state alone."""
    async with Grader(sandboxes, images.store, task_of.blobs) as grader:
        good = await grader.grade_files(task_of.task, {"pkg/numbers.py": FIXED})
        assert good.reward == 1.0, good
        assert any(name.startswith("tests: tests/test_first.py") for name in good.tests)
        more = await grader.grade_files(task_of.task, {"pkg/numbers.py": FIXED, "README.md": b"x"})
        assert more.reward == 0.0
        assert "README.md differs" in more.evidence
        none = await grader.grade_files(task_of.task, {"pkg/numbers.py": BUGGY})
        assert none.reward == 0.0
        assert "script (weight 1): not needed" in none.evidence


class _Made:
    def __init__(self, images) -> None:
        self.blobs = Blobs()
        plain = make_task(images.workspace(WORKSPACE), self.blobs)
        empty = self.blobs.put(pack_files({}))
        script = b"grep -c 'low), high)' pkg/numbers.py > /logs/verifier/reward.txt"
        kinds = {
            "tests": plain.verifier,
            "state": VerifierSpec(
                kind="state",
                settings={"expected": empty, "files": [{"path": "pkg/*", "compare": "ignore"}]},
                protected=empty,
                allowed=(),
            ),
            "script": VerifierSpec(
                kind="command",
                settings={"tests": self.blobs.put(pack_files({"test.sh": script}))},
                protected=empty,
                allowed=(),
            ),
        }
        parts = [{"name": name, "verifier": spec.model_dump(mode="json")} for name, spec in kinds.items()]
        whole = VerifierSpec(kind="weighted", settings={"parts": parts}, protected=empty, allowed=(".",))
        self.task = plain.model_copy(update={"verifier": whole})


@pytest.fixture
def task_of(images) -> _Made:
    return _Made(images)
