"""ATIF 1.8, Harbor's trajectories: a JSON document each (a folder of them, or one a line in a .jsonl file).

A step of the agent carries its sampled tokens and their log-probabilities (`metrics`), its tool calls and
what came back. Given tokens, versions of the policy, segments and the verdict go into `extra.posttrain`. A
document of others is kept whole with the trajectory and written again as it was; its tokens are taken over
where each call's prompt continues the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from catalog.trajectory import ToolCall, Trajectory
from envfactory.formats.base import FIELD
from envfactory.formats.fields import Fields, FormatError
from envfactory.formats.trajectories import made, no_twins, read_documents, thick, thin, write_documents

name = "atif"
summary = "ATIF 1.8 trajectories: a folder of .json files, or a .jsonl file"
missing = ("policy versions and segments of tokens", "the verdict")
VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(9))


def read(path: Path) -> Iterator[Trajectory]:
    """The trajectories of a file or folder. Raises FormatError."""
    return no_twins(map(trajectory_of, read_documents(path, "*.json")), str(path))


def write(trajectories: Iterable[Trajectory], path: Path) -> int:
    """Write a new folder or .jsonl file. Raises FormatError."""
    return write_documents(((one.id, document_of(one)) for one in trajectories), path, ".json")


def document_of(trajectory: Trajectory) -> dict[str, Any]:
    """The document of a trajectory."""
    if trajectory.foreign.get("format") == name:
        return trajectory.foreign["document"]
    if not trajectory.turns:
        raise FormatError(f"{trajectory.id} has no turns, and an ATIF document needs one step")
    sampled = trajectory.sampled_tokens
    return {
        "schema_version": VERSIONS[-1],
        "session_id": trajectory.run_id,
        "trajectory_id": trajectory.id,
        "agent": {"name": trajectory.agent, "version": "1", "model_name": trajectory.policy},
        "steps": _steps(trajectory),
        "final_metrics": {"total_completion_tokens": sampled},
        "extra": {FIELD: _without_sampled(thin(trajectory), trajectory)},
    }


def _without_sampled(record: dict[str, Any], trajectory: Trajectory) -> dict[str, Any]:
    """The record without the tokens that the steps hold."""
    if not trajectory.token_ids:
        return record
    given = [token for token, own in zip(trajectory.token_ids, trajectory.sampled, strict=True) if not own]
    return {k: v for k, v in record.items() if k != "logprobs"} | {"token_ids": given}


def _with_sampled(record: Fields, steps: list[Fields]) -> dict[str, Any]:
    """The inverse of `_without_sampled`."""
    sampled = record.value.get("sampled", [])
    given, ids, logprobs = list(record.value.get("token_ids", [])), list[Any](), list[Any]()
    for step in steps:
        metrics = step.object("metrics").value
        ids += metrics.get("completion_token_ids") or []
        logprobs += metrics.get("logprobs") or []
    if not isinstance(sampled, list) or len(ids) != len(logprobs) or len(ids) != sum(map(bool, sampled)):
        raise FormatError(f"{record.place}: the steps hold another number of sampled tokens than it says")
    if len(given) != len(sampled) - len(ids):
        raise FormatError(f"{record.place}: it holds another number of given tokens than it says")
    mixed: dict[str, list[Any]] = {"token_ids": [], "logprobs": []}
    own, others = iter(zip(ids, logprobs, strict=True)), iter(given)
    for is_sampled in sampled:
        token, logprob = next(own) if is_sampled else (next(others), None)
        mixed["token_ids"].append(token)
        mixed["logprobs"].append(logprob)
    return record.value | (mixed if sampled else {})


def _steps(trajectory: Trajectory) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    calls = list(enumerate(trajectory.tool_calls))
    for turn in trajectory.turns:
        if turn.role == "tool" and steps and steps[-1]["source"] == "agent":
            _observe(steps[-1], turn.text, calls)
            continue
        source = {"assistant": "agent", "tool": "user"}.get(turn.role, turn.role)
        step: dict[str, Any] = {"step_id": len(steps) + 1, "source": source, "message": turn.text}
        if turn.role == "assistant":
            if trajectory.effort is not None:
                step["reasoning_effort"] = float(trajectory.effort)
            places = [place for place in range(turn.start, turn.end) if trajectory.sampled[place]]
            step["metrics"] = {
                "completion_tokens": len(places),
                "completion_token_ids": [trajectory.token_ids[place] for place in places],
                "logprobs": [trajectory.logprobs[place] for place in places],
            }
        steps.append(step)
    return steps


def _observe(step: dict[str, Any], text: str, calls: list[tuple[int, ToolCall]]) -> None:
    """Add what came back to the agent's step, with the call that it answers where there is one."""
    result: dict[str, Any] = {"content": text}
    if calls and calls[0][1].result == text:
        number, call = calls.pop(0)
        result["source_call_id"] = f"call_{number}"
        step.setdefault("tool_calls", []).append(
            {"tool_call_id": f"call_{number}", "function_name": call.name, "arguments": call.arguments}
        )
    step.setdefault("observation", {"results": []})["results"].append(result)


def trajectory_of(document: Fields) -> Trajectory:
    """The trajectory of a document. Raises FormatError."""
    place = document.place
    if document.text("schema_version") not in VERSIONS:
        raise FormatError(f"{place}: schema_version must be one of ATIF-v1.0 to {VERSIONS[-1]}")
    steps = document.get("steps")
    if not isinstance(steps, list) or not steps:
        raise FormatError(f"{place}: steps must be a list with at least one step")
    fields = [Fields.of(step, f"{place}, step {number}") for number, step in enumerate(steps, start=1)]
    for number, step in enumerate(fields, start=1):
        if step.get("step_id") != number:
            raise FormatError(f"{step.place}: step_id must be {number}")
    texts = [text for step in fields for text in _texts(step)]
    extra = document.object("extra")
    if extra.get(FIELD) is not None:
        record = extra.object(FIELD)
        return thick(Fields.of(_with_sampled(record, fields), record.place), texts)
    return _foreign(document, fields)


def _texts(step: Fields) -> list[str]:
    return [_plain(step.get("message"), step), *(_plain(one.get("content"), one) for one in _results(step))]


def _results(step: Fields) -> list[Fields]:
    results = step.object("observation").get("results") or []
    if not isinstance(results, list):
        raise FormatError(f"{step.place}: observation.results must be a list")
    return [Fields.of(one, f"{step.place}, result {number}") for number, one in enumerate(results, start=1)]


def _plain(content: object, step: Fields) -> str:
    """Text of a message; of one with pictures the text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise FormatError(f"{step.place}: a message must be text or a list of parts")
    parts = [Fields.of(one, step.place) for one in content]
    return "\n".join(
        part.text("text") if part.get("type") == "text" else f"[{part.get('type')}]" for part in parts
    )


def _foreign(document: Fields, steps: list[Fields]) -> Trajectory:
    agent = document.object("agent")
    turns: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    tokens = _tokens(steps)
    for step, span in zip(steps, tokens.spans, strict=True):
        source = step.text("source")
        if source not in ("system", "user", "agent"):
            raise FormatError(f"{step.place}: source must be system, user or agent")
        role = "assistant" if source == "agent" else source
        given = span[0] if turns else 0
        if turns and turns[-1]["end"] < given:
            turns[-1]["end"] = given  # what the prompt added belongs to what stands before the step
        turns.append(
            {"role": role, "text": _plain(step.get("message"), step), "start": given, "end": span[1]}
        )
        calls += _calls(step)
        turns += [
            {"role": "tool", "text": _plain(one.get("content"), one), "start": span[1], "end": span[1]}
            for one in _results(step)
        ]
    task = document.object("extra").get("task_id") or document.get("session_id") or "unknown"
    id = document.get("trajectory_id") or document.get("session_id") or "trajectory"
    effort = next((s.get("reasoning_effort") for s in steps if s.get("reasoning_effort") is not None), None)
    record = {
        "id": id,
        "task_id": task,
        "run_id": document.get("session_id") or id,
        "agent": agent.text("name"),
        "policy": agent.text("model_name", "unknown"),
        "effort": int(effort) if isinstance(effort, int | float) and 1 <= effort <= 100 else None,
        "turns": turns,
        "tool_calls": calls,
        "foreign": {"format": name, "document": document.value},
        **tokens.record(),
    }
    return made(record, document.place)


def _calls(step: Fields) -> list[dict[str, Any]]:
    answers = {one.get("source_call_id"): _plain(one.get("content"), one) for one in _results(step)}
    calls = step.get("tool_calls") or []
    if not isinstance(calls, list):
        raise FormatError(f"{step.place}: tool_calls must be a list")
    found: list[dict[str, Any]] = []
    for one in (Fields.of(call, step.place) for call in calls):
        result = answers.get(one.get("tool_call_id"), "")
        arguments = one.object("arguments").value
        found.append(
            {"name": one.text("function_name"), "arguments": arguments, "result": result, "outcome": "exited"}
        )
    return found


class _Tokens:
    """Tokens of a foreign document, if each call of the model says all and continues the one before."""

    def __init__(self, count: int) -> None:
        self.spans = [(0, 0)] * count
        self.ids: list[int] = []
        self.sampled: list[bool] = []
        self.logprobs: list[float | None] = []

    def record(self) -> dict[str, Any]:
        versions = [0 if one else None for one in self.sampled]
        named = {"token_ids": self.ids, "sampled": self.sampled, "logprobs": self.logprobs}
        return named | {"versions": versions}


def _tokens(steps: list[Fields]) -> _Tokens:
    found = _Tokens(len(steps))
    for number, step in enumerate(steps):
        start = len(found.ids)
        if step.get("source") == "agent" and not _extend(found, step.object("metrics").value):
            return _Tokens(len(steps))
        found.spans[number] = (start, len(found.ids)) if len(found.ids) == start else _sampled(found, start)
    return found


def _sampled(found: _Tokens, start: int) -> tuple[int, int]:
    first = next(place for place in range(start, len(found.ids)) if found.sampled[place])
    return first, len(found.ids)


def _extend(found: _Tokens, metrics: dict[str, Any]) -> bool:
    prompt = _integers(metrics.get("prompt_token_ids"))
    completion = _integers(metrics.get("completion_token_ids"))
    logprobs = metrics.get("logprobs")
    if prompt is None or not completion or not isinstance(logprobs, list):
        return False
    known = len(found.ids)
    if len(logprobs) != len(completion) or prompt[:known] != found.ids:
        return False
    found.ids += [*prompt[known:], *completion]
    found.sampled += [False] * (len(prompt) - known) + [True] * len(completion)
    found.logprobs += [None] * (len(prompt) - known) + logprobs
    return True


def _integers(value: object) -> list[int] | None:
    """The list, if it is one of whole numbers."""
    good = isinstance(value, list) and all(type(one) is int for one in value)
    return value if good else None  # pyright: ignore[reportReturnType]
