"""Stored trajectories graded again with the real grader after their task's verifier became stricter."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

from catalog.jsonl import JsonLines, read_lines
from catalog.models import Failure, Task, TestStatus
from catalog.trajectory import Trajectory
from rollout.agents.base import attempt
from rollout.agents.bash import BashAgent
from rollout.agents.repair_choice import RepairChoice
from rollout.regrade import Leftovers, Regraded, regrade, results, summary
from rollout.session import SampleSpec, Session
from rollout.visible import GraderVisibleTests
from tests.rollout.conftest import TESTS, Room
from tests.rollout.fakes import Characters, Chat, ScriptedEngine

SPECIAL = "```bash\nprintf 'def first(items):\\n    return 3 if items else None\\n' > pkg/core.py\n```"
MENDED = "```bash\nsed -i 's/>= 0/> 0/' pkg/core.py\n```"
HIDDEN = "tests/test_core.py::test_other"


def session_of(task: Task, texts: list[str], sample: int) -> Session:
    engine = ScriptedEngine(lambda request, turn: texts[turn])
    spec = SampleSpec(run_id="r", prompt=0, sample=sample, task_id=task.id, effort=50, seed=1)
    return Session(spec, engine, Chat(), Characters())


def stricter(room: Room) -> Task:
    """The task with one more test, which a special case does not pass."""
    text = f"{TESTS}\n\ndef test_other():\n    assert first([5]) == 5\n"
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo("tests/test_core.py")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text.encode()))
    spec = room.task.verifier
    changes: dict[str, Any] = {
        "protected": room.blobs.put(archive.getvalue()),
        "pass_to_pass": (*spec.pass_to_pass, HIDDEN),
        "expected": {**spec.expected, HIDDEN: TestStatus.PASSED},
    }
    return room.task.model_copy(update={"verifier": spec.model_copy(update=changes)})


async def graded(
    trajectories: list[Trajectory], task: Task, room: Room, path: Path, **options: bool
) -> list[Regraded]:
    change = Leftovers(room.grader, room.sandboxes, room.blobs)
    tasks = {task.id: task}
    with JsonLines(path) as log:
        return [one async for one in regrade(trajectories, tasks.get, change, log, **options)]


async def test_a_stricter_verifier_flips_what_a_weak_one_let_pass(room: Room, tmp_path: Path) -> None:
    bash = BashAgent(room.sandboxes, room.grader)
    choice = RepairChoice(
        lambda id: room.choices, room.blobs, GraderVisibleTests(room.grader, cache=True), room.grader
    )
    played = [
        await attempt(agent, room.task, session_of(room.task, texts, number), policy="p")
        for number, (agent, texts) in enumerate(
            [
                (bash, [SPECIAL, "submit"]),
                (bash, [MENDED, "submit"]),
                (bash, ["submit"]),
                (choice, ["submit 3"]),
                (choice, ["try 9"]),
            ]
        )
    ]
    assert [one.reward for one in played] == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert played[0].patch is not None
    # A bash agent's trajectory of the time before it kept its diff: its commands run again.
    older = played[0].model_copy(update={"id": "older", "patch": None})
    lost = played[1].model_copy(
        update={"id": "lost", "verdict": None, "failure": Failure(boundary="verifier", kind="x", message="x")}
    )
    every = [*played, older, lost, played[0].model_copy(update={"id": "strange", "task_id": "other"})]

    weak = await graded(every[:5], room.task, room, tmp_path / "weak.jsonl")
    assert summary(weak) == {"same": 5}

    task, log = stricter(room), tmp_path / "regrade.jsonl"
    lines = {line.trajectory_id: line for line in await graded(every, task, room, log)}
    outcomes = [lines[one.id].outcome for one in every]
    assert outcomes == ["lost", "same", "same", "same", "same", "lost", "judged", "skipped"]
    assert HIDDEN in lines[played[0].id].evidence
    assert lines["lost"].after == 1.0
    kept = results(read_lines(log), {task.id: task.verifier.digest()})
    assert summary(kept) == {"judged": 1, "lost": 2, "same": 4}
    assert not results(read_lines(log), {task.id: room.task.verifier.digest()})

    # Again: only what is not settled; fresh: everything; then back to the weak verifier: gained.
    again = await graded(every, task, room, log)
    assert [line.trajectory_id for line in again] == ["strange"]
    assert len(await graded(every, task, room, log, fresh=True)) == len(every)
    failed = played[0].model_copy(update={"verdict": played[2].verdict})
    (back,) = await graded([failed], room.task, room, log)
    assert (back.before, back.after, back.outcome) == (0.0, 1.0, "gained")


async def test_what_cannot_be_judged_is_no_reward_and_is_tried_again(room: Room, tmp_path: Path) -> None:
    bash = BashAgent(room.sandboxes, room.grader)
    played = await attempt(bash, room.task, session_of(room.task, [MENDED, "submit"], 0), policy="p")
    gone = room.task.model_copy(
        update={"verifier": room.task.verifier.model_copy(update={"protected": "sha256:" + "0" * 64})}
    )
    for _ in range(2):
        (line,) = await graded([played], gone, room, tmp_path / "x.jsonl")
        assert (line.outcome, line.after) == ("unjudged", None)
    other = played.tool_calls[0].model_copy(update={"exit_code": 7})
    changed = played.model_copy(update={"patch": None, "tool_calls": (other,)})
    (line,) = await graded([changed], room.task, room, tmp_path / "y.jsonl")
    assert line.outcome == "unjudged"
    assert "cannot be rebuilt" in line.evidence
    assert not list(read_lines(tmp_path / "x.jsonl"))


async def test_a_destroyed_environment_keeps_its_verdict(room: Room, tmp_path: Path) -> None:
    bash = BashAgent(room.sandboxes, room.grader)
    played = await attempt(bash, room.task, session_of(room.task, ["submit"], 0), policy="p")
    gone = played.model_copy(update={"repercussion": True})
    (line,) = await graded([gone], stricter(room), room, tmp_path / "x.jsonl")
    assert (line.outcome, line.after) == ("same", 0.0)
