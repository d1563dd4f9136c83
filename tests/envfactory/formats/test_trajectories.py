"""Trajectories out and back, ours and others'."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catalog.models import Failure, Verdict
from catalog.trajectory import Segment, ToolCall, Trajectory, Turn
from envfactory.formats.fields import FormatError
from envfactory.formats.registry import TRAJECTORIES

_text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
_chances = st.floats(-20, 0, allow_nan=False)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """A trajectory of any shape: turns in any order, calls that a turn shows and calls that none shows."""
    ids: list[int] = []
    sampled: list[bool] = []
    turns: list[Turn] = []
    calls: list[ToolCall] = []
    for role in draw(
        st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=7)
    ):
        start = len(ids)
        for own in draw(st.lists(st.booleans() if role == "assistant" else st.just(False), max_size=4)):
            ids.append(draw(st.integers(0, 4095)))
            sampled.append(own)
        text = draw(_text)
        if role == "tool" and draw(st.booleans()):
            result = text if draw(st.booleans()) else draw(_text)
            arguments = draw(st.dictionaries(_text, _text | st.integers(), max_size=2))
            calls.append(
                ToolCall(name="bash", arguments=arguments, result=result, outcome="exited", exit_code=1)
            )
        turns.append(Turn(role=role, text=text, start=start, end=len(ids)))
    verdict = draw(st.sampled_from([None, Verdict(reward=1.0, evidence="all"), Verdict(reward=0.0)]))
    return Trajectory(
        id="run.1-p0.s0",
        task_id="calc-1",
        run_id="run.1",
        agent="bash",
        policy="flash",
        effort=draw(st.none() | st.integers(1, 100)),
        turns=tuple(turns),
        token_ids=tuple(ids),
        sampled=tuple(sampled),
        logprobs=tuple(draw(_chances) if own else None for own in sampled),
        versions=tuple(draw(st.integers(0, 9)) if own else None for own in sampled),
        segments=(Segment(kind="decode", start=0, end=len(ids), version=1, kv_version=0),),
        tool_calls=tuple(calls),
        verdict=verdict,
        failure=draw(st.none() | st.just(Failure(boundary="engine", kind="lost", message="gone"))),
        patch=draw(st.none() | st.binary(max_size=20).map(lambda data: base64.b64encode(data).decode())),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trajectory=trajectories())
def test_out_and_back_is_the_same(trajectory: Trajectory, tmp_path: Path) -> None:
    other = trajectory.model_copy(update={"id": "run.1-p0.s1"})
    for name, format in TRAJECTORIES.items():
        path = tmp_path / f"{name}.jsonl"
        path.unlink(missing_ok=True)
        assert format.write([trajectory, other], path) == 2
        assert list(format.read(path)) == [trajectory, other]


def simple() -> Trajectory:
    return Trajectory(
        id="run.1-p0.s0",
        task_id="calc-1",
        run_id="run.1",
        agent="bash",
        policy="flash",
        turns=(
            Turn(role="user", text="mend it", start=0, end=2),
            Turn(role="assistant", text="```bash\nls\n```", start=2, end=4),
            Turn(role="tool", text="calc\n[exit 0]", start=4, end=4),
            Turn(role="assistant", text="submit", start=4, end=5),
        ),
        token_ids=(1, 2, 3, 4, 5),
        sampled=(False, False, False, True, True),
        logprobs=(None, None, None, -0.5, -0.25),
        versions=(None, None, None, 3, 4),
        tool_calls=(
            ToolCall(
                name="bash",
                arguments={"command": "ls"},
                result="calc\n[exit 0]",
                outcome="exited",
                exit_code=0,
            ),
        ),
        verdict=Verdict(reward=1.0),
        patch=base64.b64encode(b"diff --git a/x b/x\n").decode(),
    )


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_a_folder_holds_one_document_each(name: str, tmp_path: Path) -> None:
    format = TRAJECTORIES[name]
    format.write([simple()], tmp_path / "out")
    assert list(format.read(tmp_path / "out")) == [simple()]
    with pytest.raises(FormatError, match="exists already"):
        format.write([simple()], tmp_path / "out")
    with pytest.raises(FormatError, match="twice"):
        format.write([simple(), simple()], tmp_path / "other")
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_atif_steps_say_what_others_need(tmp_path: Path) -> None:
    TRAJECTORIES["atif"].write([simple()], tmp_path / "x.jsonl")
    document = json.loads((tmp_path / "x.jsonl").read_text())
    first = document["steps"][1]
    assert first["tool_calls"][0]["arguments"] == {"command": "ls"}
    assert first["observation"]["results"] == [{"content": "calc\n[exit 0]", "source_call_id": "call_0"}]
    assert first["metrics"] == {"completion_tokens": 1, "completion_token_ids": [4], "logprobs": [-0.5]}
    assert "logprobs" not in document["extra"]["posttrain"]
    document["steps"][1]["metrics"]["completion_token_ids"] = [7]
    (tmp_path / "x.jsonl").write_text(json.dumps(document))
    (back,) = TRAJECTORIES["atif"].read(tmp_path / "x.jsonl")
    assert back.token_ids == (1, 2, 3, 7, 5)
    document["steps"][1]["metrics"]["completion_token_ids"] = []
    (tmp_path / "x.jsonl").write_text(json.dumps(document))
    with pytest.raises(FormatError, match="number of sampled tokens"):
        list(TRAJECTORIES["atif"].read(tmp_path / "x.jsonl"))


FOREIGN_ATIF: dict[str, Any] = {
    "schema_version": "ATIF-v1.6",
    "session_id": "s-1",
    "agent": {"name": "terminus", "version": "2", "model_name": "big", "extra": {"x": 1}},
    "steps": [
        {
            "step_id": 1,
            "source": "user",
            "message": [{"type": "text", "text": "hi"}],
            "timestamp": "2026-01-01T00:00:00Z",
        },
        {
            "step_id": 2,
            "source": "agent",
            "message": "look",
            "reasoning_content": "hm",
            "tool_calls": [{"tool_call_id": "a", "function_name": "bash", "arguments": {"keystrokes": "ls"}}],
            "observation": {"results": [{"source_call_id": "a", "content": "x.py"}, {"content": None}]},
            "metrics": {
                "prompt_token_ids": [1, 2],
                "completion_token_ids": [3],
                "logprobs": [-1.0],
                "cost_usd": 0.1,
            },
        },
        {
            "step_id": 3,
            "source": "agent",
            "message": "done",
            "metrics": {
                "prompt_token_ids": [1, 2, 3, 9],
                "completion_token_ids": [4, 5],
                "logprobs": [-1.0, -2.0],
            },
        },
    ],
    "final_metrics": {"total_cost_usd": 0.1},
    "notes": "a run",
}


def test_foreign_atif_is_kept_whole_with_its_tokens(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(FOREIGN_ATIF))
    (one,) = TRAJECTORIES["atif"].read(tmp_path / "t.json")
    assert [(turn.role, turn.text) for turn in one.turns] == [
        ("user", "hi"), ("assistant", "look"), ("tool", "x.py"), ("tool", ""), ("assistant", "done"),
    ]  # fmt: skip
    assert one.token_ids == (1, 2, 3, 9, 4, 5)
    assert [one.token_ids[t.start : t.end] for t in one.turns if t.role == "assistant"] == [(3,), (4, 5)]
    assert one.sampled == (False, False, True, False, True, True)
    assert one.tool_calls[0].result == "x.py"
    TRAJECTORIES["atif"].write([one], tmp_path / "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text()) == FOREIGN_ATIF
    broken = json.loads(json.dumps(FOREIGN_ATIF))
    broken["steps"][2]["metrics"]["prompt_token_ids"][0] = 8
    (tmp_path / "t.json").write_text(json.dumps(broken))
    (other,) = TRAJECTORIES["atif"].read(tmp_path / "t.json")
    assert other.token_ids == ()


FOREIGN_MINI: dict[str, Any] = {
    "info": {
        "model_stats": {"instance_cost": 0.25, "api_calls": 2},
        "config": {"model": {"model_name": "big"}, "agent": {"step_limit": 3}},
        "mini_version": "2.4.6",
        "exit_status": "Submitted",
        "submission": "diff --git a/x b/x\n",
    },
    "messages": [
        {"role": "system", "content": "you are"},
        {"role": "user", "content": "mend"},
        {"role": "assistant", "content": "ls", "extra": {"actions": [{"command": "ls"}], "cost": 0.1}},
        {
            "role": "tool",
            "tool_call_id": "a",
            "content": "out",
            "extra": {"raw_output": "x.py\n", "returncode": 0},
        },
        {"role": "exit", "content": "", "extra": {"exit_status": "Submitted", "submission": "diff"}},
    ],
    "trajectory_format": "mini-swe-agent-1.1",
    "instance_id": "octo__calc-1",
}


def test_foreign_mini_swe_agent_is_kept_whole_with_its_submission(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/a.traj.json").write_text(json.dumps(FOREIGN_MINI))
    (one,) = TRAJECTORIES["mini-swe-agent"].read(tmp_path)
    assert [turn.role for turn in one.turns] == ["system", "user", "assistant", "tool"]
    assert one.task_id == "octo__calc-1"
    assert one.tool_calls[0].arguments == {"command": "ls"}
    assert one.patch is not None
    assert base64.b64decode(one.patch) == b"diff --git a/x b/x\n"
    TRAJECTORIES["mini-swe-agent"].write([one], tmp_path / "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text()) == FOREIGN_MINI
