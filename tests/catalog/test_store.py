"""The catalog on real SQLite files."""

from __future__ import annotations

from pathlib import Path

import pytest

from catalog.errors import UnknownId, UserError
from catalog.jsonl import Position
from catalog.models import (
    Candidate,
    CandidateSet,
    Decision,
    Environment,
    Failure,
    Gate,
    Origin,
    Problem,
    QualityReport,
    Run,
    RunKind,
    Status,
    Task,
    TestStatus,
    Verdict,
    VerifierSpec,
)
from catalog.store import Catalog
from catalog.trajectory import Trajectory, Turn

REF = "sha256:" + "0" * 64


def make_task(name: str = "a", **changes: object) -> Task:
    task = Task(
        id=Task.make_id("demo", name),
        origin=Origin(kind="procedural", source="pypi:demo", revision="1.0", operator="compare"),
        problem=Problem(statement=f"repair {name}"),
        environment=Environment(image=REF, tree=REF),
        verifier=VerifierSpec(
            fail_to_pass=("t.py::a",),
            pass_to_pass=(),
            expected={"t.py::a": TestStatus.PASSED},
            arguments=("t.py",),
            protected=REF,
            allowed=("demo",),
        ),
        solution=REF,
    )
    return task.model_copy(update=changes)


def make_run(id: str = "run-1") -> Run:
    return Run(id=id, kind=RunKind.RL, folder="runs/x", config={}, seed=0, created=1.0)


def make_trajectory(id: str, task: Task) -> Trajectory:
    return Trajectory(
        id=id,
        task_id=task.id,
        run_id="run-1",
        agent="bash",
        policy="flash-nano",
        turns=(Turn(role="assistant", text="é", start=0, end=2),),
        token_ids=(1, 2),
        sampled=(False, True),
        logprobs=(None, -0.5),
        versions=(None, 3),
        verdict=Verdict(reward=1.0),
    )


def test_tasks_are_kept_whole_replaced_by_id_and_filtered(tmp_path: Path) -> None:
    with Catalog.open(tmp_path) as catalog:
        first, second = make_task("a"), make_task("b", status=Status.ACCEPTED, split="test")
        for task in (first, second, second):
            catalog.put_task(task)
        assert catalog.get_task(first.id) == first
        assert catalog.list_tasks(status="accepted", split="test") == [second]
        assert catalog.list_tasks(source="pypi:other") == []
        assert [t.id for t in catalog.list_tasks()] == sorted([first.id, second.id])
        assert catalog.count_tasks() == {"accepted": 1, "draft": 1}
    with Catalog.open(tmp_path) as again:
        assert again.get_task(second.id) == second


def test_an_unknown_id_names_the_closest_one(tmp_path: Path) -> None:
    with Catalog.open(tmp_path) as catalog:
        task = make_task()
        catalog.put_task(task)
        with pytest.raises(UnknownId, match=f"Did you mean {task.id}"):
            catalog.get_task(task.id[:-1])
        assert catalog.find_task("nothing") is None


def test_a_report_needs_its_task_and_counts_by_first_failed_gate(tmp_path: Path) -> None:
    with Catalog.open(tmp_path) as catalog:
        task = make_task()
        gates = (
            Gate(name="builds", passed=True, evidence="ok"),
            Gate(name="noop", passed=False, evidence="passes"),
            Gate(name="leak", passed=False, evidence="leaks"),
        )
        report = QualityReport(task_id=task.id, gates=gates)
        with pytest.raises(UserError, match="Put the task before"):
            catalog.put_report(report)
        catalog.put_task(task)
        catalog.put_report(report)
        assert catalog.find_report(task.id) == report
        assert catalog.count_rejections() == {"noop": 1}
        assert catalog.count_rejections(source="pypi:other") == {}
        assert catalog.list_tasks(rejected_by="noop") == [task]
        assert catalog.list_reports(accepted=True) == []


def test_a_decision_moves_status_and_history_together_and_once(tmp_path: Path) -> None:
    with Catalog.open(tmp_path) as catalog:
        task = make_task()
        catalog.put_task(task)
        for at in (1.0, 2.0):
            decision = Decision(actor="inspector", action="accepted", reason="all gates pass", at=at)
            catalog.decide(task.id, Status.ACCEPTED, decision)
        report = catalog.find_report(task.id)
        assert report is not None
        assert [d.at for d in report.history] == [1.0]
        assert catalog.get_task(task.id).status is Status.ACCEPTED


def test_a_failed_transaction_leaves_nothing(tmp_path: Path) -> None:
    with Catalog.open(tmp_path) as catalog:

        def interrupted() -> None:
            with catalog.transaction():
                catalog.put_task(make_task("a"))
                assert catalog.count_tasks() == {"draft": 1}, "a transaction reads its own writes"
                raise RuntimeError("interrupted")

        with pytest.raises(RuntimeError, match="interrupted"):
            interrupted()
        assert catalog.count_tasks() == {}


def test_candidate_sets(tmp_path: Path) -> None:
    with Catalog.open(tmp_path) as catalog:
        task = make_task()
        catalog.put_task(task)
        candidate = Candidate(operator="compare", path="a.py", line=1, before="<", after="<=", content=REF)
        both = CandidateSet(
            task_id=task.id, candidates=(candidate, candidate), passes_visible=(True, True),
            passes=(True, False), tried=9,
        )  # fmt: skip
        catalog.put_candidates(both)
        assert catalog.find_candidates(task.id) == both
        assert catalog.list_candidates() == [both]
        assert catalog.find_candidates("other") is None


def test_trajectories_come_back_from_a_blob_or_a_line_of_a_file(tmp_path: Path) -> None:
    with Catalog.open(tmp_path) as catalog:
        task = make_task()
        trajectory = make_trajectory("t1", task)
        with pytest.raises(UserError, match="Put the task or run"):
            catalog.put_trajectory(trajectory)
        catalog.put_task(task)
        catalog.put_run(make_run())
        catalog.put_trajectory(trajectory)
        assert catalog.get_trajectory("t1") == trajectory

        line = make_trajectory("t2", task).model_dump_json().encode()
        file = tmp_path / "trajectories.jsonl"
        file.write_bytes(b"xx\n" + line + b"\n")
        catalog.put_trajectory(make_trajectory("t2", task), at=Position(str(file), 3, len(line)))
        assert catalog.get_trajectory("t2").id == "t2"
        rows = catalog.list_trajectories(run_id="run-1", task_id=task.id)
        assert [(row.id, row.reward, row.sampled_tokens) for row in rows] == [("t1", 1.0, 1), ("t2", 1.0, 1)]
        file.unlink()
        with pytest.raises(UserError, match="which is gone"):
            catalog.get_trajectory("t2")


def test_runs_newest_first(tmp_path: Path) -> None:
    with Catalog.open(tmp_path) as catalog:
        old, new = make_run("run-1"), make_run("run-2").model_copy(update={"created": 2.0})
        catalog.put_run(old)
        catalog.put_run(new)
        done = old.model_copy(update={"state": "finished", "summary": {"reward": 1.0}})
        catalog.put_run(done)
        assert catalog.list_runs() == [new, done]
        assert catalog.list_runs(state="finished", kind=RunKind.RL) == [done]
        with pytest.raises(UnknownId, match="Did you mean run-"):
            catalog.get_run("run-3")


def test_cached_verdicts_count_their_hits_and_refuse_failures(tmp_path: Path) -> None:
    with Catalog.open(tmp_path) as catalog:
        assert catalog.verdicts.get("k") is None
        catalog.verdicts.put("k", Verdict(reward=0.0, evidence="first"))
        catalog.verdicts.put("k", Verdict(reward=1.0, evidence="second"))
        for _ in range(2):
            found = catalog.verdicts.get("k")
            assert found is not None
            assert (found.reward, found.cached) == (0.0, True)
        assert catalog.verdicts.stats() == (1, 2)
        assert catalog.verdicts.hits("k") == 2
        failure = Failure(boundary="sandbox", kind="lost", message="gone")
        with pytest.raises(ValueError, match="infrastructure"):
            catalog.verdicts.put("k2", Verdict(reward=None, failure=failure))


def test_a_stage_runs_once_for_the_same_inputs(tmp_path: Path) -> None:
    calls: list[str] = []

    def work(name: str) -> dict[str, str]:
        calls.append(name)
        return {"made": name}

    with Catalog.open(tmp_path) as catalog:
        for name in ("a", "a", "b"):
            assert catalog.stages.once("build", ["pypi", name], lambda n=name: work(n)) == {"made": name}
        assert calls == ["a", "b"]
        assert catalog.stages.count() == {"build": 2}
        assert list(catalog.stages.list("build").values()) == [{"made": "a"}, {"made": "b"}]
        key = catalog.stages.key("pypi", "a")
        assert catalog.stages.put("build", key, {"made": "other"}) == {"made": "a"}, "the first result stands"
        assert catalog.stages.forget("build", key) == 1
        assert catalog.stages.get("build", key) is None


@pytest.mark.parametrize("spoilt", [b"not a database at all" * 400, None])
def test_a_damaged_database_is_one_sentence(tmp_path: Path, spoilt: bytes | None) -> None:
    with Catalog.open(tmp_path) as catalog:
        catalog.put_task(make_task())
    place = tmp_path / "catalog.db"
    place.write_bytes(spoilt or place.read_bytes()[:4096] + bytes(range(256)) * 400)
    with pytest.raises(UserError, match=r"restore a copy of catalog\.db"), Catalog.open(tmp_path) as catalog:
        catalog.list_tasks()
