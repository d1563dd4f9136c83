"""mini-swe-agent trajectories (`mini-swe-agent-1.1`): `ID/ID.traj.json` in a folder, or a .jsonl file.

The last message has the role `exit` and the submitted diff. Tokens, log-probabilities and the verdict have no
place there: ours travel in `info.posttrain`. Documents of others are kept whole and written again as they
were; their submission can be graded with `posttrain regrade`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from catalog.trajectory import ToolCall, Trajectory
from envfactory.formats.base import FIELD
from envfactory.formats.fields import Fields, FormatError
from envfactory.formats.trajectories import made, no_twins, read_documents, thick, thin, write_documents

name = "mini-swe-agent"
summary = "mini-swe-agent trajectories: a folder with ID/ID.traj.json, or a .jsonl file"
missing = ("tokens, log-probabilities and policy versions", "the verdict")
FORMAT = "mini-swe-agent-1.1"


def read(path: Path) -> Iterator[Trajectory]:
    """The trajectories of a file or folder. Raises FormatError."""
    return no_twins(map(trajectory_of, read_documents(path, "*.traj.json")), str(path))


def write(trajectories: Iterable[Trajectory], path: Path) -> int:
    """Write a new folder or .jsonl file. Raises FormatError."""
    return write_documents(((one.id, document_of(one)) for one in trajectories), path, ".traj.json")


def document_of(trajectory: Trajectory) -> dict[str, Any]:
    """The document of a trajectory."""
    if trajectory.foreign.get("format") == name:
        return trajectory.foreign["document"]
    submission = ""
    if trajectory.patch is not None:
        submission = base64.b64decode(trajectory.patch).decode(errors="replace")
    status = trajectory.failure.kind if trajectory.failure else "Submitted"
    ending = {"exit_status": status, "submission": submission}
    return {
        "info": {
            "model_stats": {
                "instance_cost": 0.0,
                "api_calls": sum(turn.role == "assistant" for turn in trajectory.turns),
            },
            "config": {
                "agent": {},
                "agent_type": f"posttrain.{trajectory.agent}",
                "model": {"model_name": trajectory.policy},
                "environment": {},
            },
            "mini_version": "2",
            **ending,
            FIELD: thin(trajectory),
        },
        "messages": [*_messages(trajectory), {"role": "exit", "content": submission, "extra": ending}],
        "trajectory_format": FORMAT,
        "instance_id": trajectory.task_id,
    }


def _messages(trajectory: Trajectory) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    calls = list(trajectory.tool_calls)
    for turn in trajectory.turns:
        role = "user" if turn.role == "tool" else turn.role
        message: dict[str, Any] = {"role": role, "content": turn.text, "extra": {"turn": turn.role}}
        if turn.role == "tool" and calls and calls[0].result == turn.text:
            call = calls.pop(0)
            message["extra"] |= {"raw_output": call.result, "returncode": call.exit_code}
            _add_action(messages, call)
        messages.append(message)
    return messages


def _add_action(messages: list[dict[str, Any]], call: ToolCall) -> None:
    last = next((one for one in reversed(messages) if one["role"] == "assistant"), None)
    if last is not None:
        command = call.arguments.get("command", f"{call.name} {call.arguments}")
        last["extra"].setdefault("actions", []).append({"command": command})


def trajectory_of(document: Fields) -> Trajectory:
    """The trajectory of a document. Raises FormatError."""
    if not document.text("trajectory_format").startswith("mini-swe-agent-1"):
        raise FormatError(f"{document.place}: trajectory_format must be {FORMAT}")
    messages = document.get("messages")
    if not isinstance(messages, list):
        raise FormatError(f"{document.place}: messages must be a list")
    fields = [Fields.of(one, f"{document.place}, message {n}") for n, one in enumerate(messages, start=1)]
    spoken = [one for one in fields if one.text("role") != "exit"]
    info = document.object("info")
    if info.get(FIELD) is not None:
        return thick(info.object(FIELD), [_content(one) for one in spoken])
    return _foreign(document, info, spoken)


def _foreign(document: Fields, info: Fields, spoken: list[Fields]) -> Trajectory:
    turns: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    actions: list[Fields] = []
    for message in spoken:
        role, extra = message.text("role"), message.object("extra")
        if "raw_output" in extra.value or "returncode" in extra.value:
            role = "tool"
            command = actions.pop(0).value.get("command", "") if actions else ""
            code = extra.get("returncode")
            calls.append(
                {
                    "name": "bash",
                    "arguments": {"command": command},
                    "result": extra.text("raw_output", ""),
                    "outcome": "exited",
                    "exit_code": code if isinstance(code, int) else None,
                }
            )
        elif role == "assistant":
            found = extra.get("actions") or []
            if not isinstance(found, list):
                raise FormatError(f"{message.place}: extra.actions must be a list")
            actions = [Fields.of(one, message.place) for one in found]
        if role not in ("system", "user", "assistant", "tool"):
            raise FormatError(f"{message.place}: role must be system, user, assistant, tool or exit")
        turns.append({"role": role, "text": _content(message), "start": 0, "end": 0})
    id = document.text("instance_id", "trajectory")
    submission = info.text("submission", "")
    record = {
        "id": id,
        "task_id": id,
        "run_id": "mini-swe-agent",
        "agent": "mini-swe-agent",
        "policy": info.object("config").object("model").text("model_name", "unknown"),
        "turns": turns,
        "tool_calls": calls,
        "patch": base64.b64encode(submission.encode()).decode() if submission.strip() else None,
        "foreign": {"format": name, "document": document.value},
    }
    return made(record, document.place)


def _content(message: Fields) -> str:
    """Text of a message; of one in parts, their texts."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise FormatError(f"{message.place}: content must be text or a list of parts")
    return "\n".join(Fields.of(part, message.place).text("text", "") for part in content)
