"""The demo's pure parts: who learns from what, and the settings it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catalog.errors import UserError
from catalog.models import (
    Candidate,
    CandidateSet,
    Environment,
    Origin,
    Problem,
    Task,
    TestStatus,
    VerifierSpec,
)
from catalog.store import Catalog
from console.demo.config import DemoConfig
from console.demo.run import claim, domains, require
from console.demo.split import divide, function_of
from console.workshop import epochs

BLOB = "sha256:" + "0" * 64


def task(number: int, split: str, path: str, operator: str = "comparison_negate") -> Task:
    return Task.model_validate(
        {
            "id": f"t{number}",
            "origin": Origin(
                kind="procedural",
                source="x",
                revision="1",
                path=path,
                function=f"f{number % 7}",
                operator=operator,
            ),
            "problem": Problem(statement="s"),
            "environment": Environment(image=BLOB, tree=BLOB),
            "verifier": VerifierSpec(
                fail_to_pass=("a::b",),
                pass_to_pass=(),
                expected={"a::b": TestStatus.PASSED},
                arguments=("a",),
                protected=BLOB,
                allowed=("p/",),
            ),
            "solution": BLOB,
            "split": split,
        }
    )


def choices(task_id: str) -> CandidateSet:
    one = Candidate(operator="o", path="p", line=1, before="a", after="b", content=BLOB)
    return CandidateSet(task_id=task_id, candidates=(one,), passes_visible=(True,), passes=(True,), tried=1)


@settings(max_examples=50, deadline=None)
@given(count=st.integers(0, 60), seed=st.integers(0, 3), share=st.floats(0.05, 0.3))
def test_sft_and_rl_share_no_function_and_sft_keeps_to_its_share(count: int, seed: int, share: float) -> None:
    tasks = [task(i, "train", f"p/{i % 5}.py") for i in range(count)]
    sets = {one.id: choices(one.id) for one in tasks}
    parts = divide(tasks, sets, sft_share=share, seed=seed)
    sft, rl = ({function_of(one) for one in some} for some in (parts.sft, parts.rl))
    assert not sft & rl
    assert len(sft) <= share * len(sft | rl)
    assert {one.id for one in (*parts.sft, *parts.rl)} == sets.keys()


def test_tasks_without_a_choice_are_left_out_and_splits_stay_apart() -> None:
    tasks = [
        task(0, "train", "p/a.py"),
        task(1, "test", "p/b.py"),
        task(2, "dev", "p/c.py"),
        task(3, "test", "p/b.py"),
    ]
    parts = divide(tasks, {one.id: choices(one.id) for one in tasks[:3]}, sft_share=0.3, seed=0)
    assert [one.id for one in parts.test] == ["t1"]
    assert [one.id for one in parts.dev] == ["t2"]
    with pytest.raises(UserError, match="No task is left for sft"):
        require(parts)


def test_every_epoch_has_every_task_once_in_the_same_order_in_every_process() -> None:
    tasks = [task(i, "train", "p/a.py") for i in range(5)]
    order = [epochs(tasks, 3)(prompt).id for prompt in range(10)]
    assert order == [epochs(tasks, 3)(prompt).id for prompt in range(10)]
    assert sorted(order[:5]) == sorted(order[5:]) == [one.id for one in tasks]
    assert order[:5] != order[5:]


def test_domains_follow_the_kind_of_bug() -> None:
    tasks = [task(0, "train", "p/a.py"), task(1, "train", "p/b.py", "slice_widen")]
    parts = divide(tasks, {one.id: choices(one.id) for one in tasks}, sft_share=0.3, seed=0)
    assert domains(parts) == {"t0": "logic", "t1": "data"}


def test_a_folder_belongs_to_its_settings(tmp_path: Path) -> None:
    claim(tmp_path, DemoConfig())
    claim(tmp_path, DemoConfig())
    claim(tmp_path, DemoConfig(seed=1))  # nothing is there yet that they could mix with
    with Catalog.open(tmp_path / "home") as catalog:
        catalog.put_task(task(0, "train", "p/a.py"))
    with pytest.raises(UserError, match="other settings"):
        claim(tmp_path, DemoConfig())
    claim(tmp_path, DemoConfig(seed=1))
