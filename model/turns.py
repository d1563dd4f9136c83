"""Turns with reasoning and tool calls, written as the text of messages, whole or incrementally; torch-free.

An assistant's turn is `<think>reasoning</think>content`, then its calls in the release's form:

    <|DSML|tool_calls>
    <|DSML|invoke name="run">
    <|DSML|parameter name="command" string="true">ls</|DSML|parameter>
    </|DSML|invoke>
    </|DSML|tool_calls>

A turn without either is its content alone, which is what `model.chat` renders; empty reasoning is none. With
tools, all reasoning stays; without, reasoning of earlier turns goes when the user speaks again. `Transcript`
renders step by step what `messages` and `ChatFormat.render` give at once, and says how much of the tokens
before stays valid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from model.chat import ChatFormat, Message, Role

THINK, THOUGHT = "<think>", "</think>"
_MARK = "|DSML|"
_CALLS, _CALLS_END = f"<{_MARK}tool_calls>", f"</{_MARK}tool_calls>"
_NAME = r"[A-Za-z_][\w.-]*"
_M = re.escape(_MARK)
_VALUE = rf"(?:(?!{_M}).)*"
"""No mark inside, so that what is malformed fails at once instead of by trying every split."""
_HEAD = rf'\n<{_M}parameter name="({_NAME})" string="(true|false)">'
_PARAMETER = re.compile(rf"{_HEAD}({_VALUE})</{_M}parameter>", re.DOTALL)
_INVOKE = re.compile(
    rf'\n<{_M}invoke name="({_NAME})">((?:\n<{_M}parameter {_VALUE}</{_M}parameter>)*)\n</{_M}invoke>',
    re.DOTALL,
)


class Call(NamedTuple):
    """One tool call."""

    name: str
    arguments: Mapping[str, Any]
    """JSON values by name."""


class Tool(NamedTuple):
    """What an assistant may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""


@dataclass(frozen=True)
class Turn:
    """One turn; only an assistant reasons and calls.

    Raises:
        ValueError: another role does.
    """

    role: Role
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()

    def __post_init__(self) -> None:
        if self.role != "assistant" and (self.reasoning or self.calls):
            raise ValueError(f"a turn of role {self.role} holds reasoning or calls: only an assistant's may")


def write(turn: Turn, *, reasoning: bool = True) -> Message:
    """A turn as a message; `read` is the inverse for an assistant's.

    Args:
        reasoning: False leaves it out.

    Raises:
        ValueError: the text holds a mark that would end it early, or a name is no identifier.
    """
    if turn.role != "assistant":
        return Message(turn.role, turn.content)
    if THOUGHT in turn.reasoning:
        raise ValueError(f"the reasoning holds {THOUGHT}, which would end it: leave that out")
    if turn.content.startswith(THINK) or _CALLS in turn.content:
        raise ValueError(
            f"the content holds {THINK} at its start, or {_CALLS}: give it as reasoning or calls"
        )
    thought = f"{THINK}{turn.reasoning}{THOUGHT}" if turn.reasoning and reasoning else ""
    return Message("assistant", thought + turn.content + _write_calls(turn.calls))


def read(text: str) -> Turn:
    """An assistant's turn from what it said, without its stop token.

    Raises:
        ValueError: reasoning that has no end, or calls that are not in the form above.
    """
    reasoning = ""
    if text.startswith(THINK):
        reasoning, found, text = text.removeprefix(THINK).partition(THOUGHT)
        if not found:
            raise ValueError(f"the reasoning has no end: {THOUGHT} is missing")
    content, found, block = text.partition(_CALLS)
    return Turn("assistant", content, reasoning, _read_calls(block) if found else ())


def messages(turns: Sequence[Turn], tools: Sequence[Tool] = ()) -> list[Message]:
    """The whole conversation; tools are described in the first system turn, which is added if need be."""
    turns = _described(turns, tools)
    last_user = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=-1)
    return [write(turn, reasoning=bool(tools) or i > last_user) for i, turn in enumerate(turns)]


class Step(NamedTuple):
    """How a prompt follows from the tokens before: the first `keep` of them, then `ids`."""

    keep: int
    ids: list[int]


class Transcript:
    """A conversation that grows; `ids` is its full rendering, given replies that are spelt as `write` does.

        transcript = Transcript(chat, tools)
        step = transcript.prompt([Turn("user", "List the files.")])
        transcript.reply(sampled, read(decode(sampled)))
        step = transcript.prompt([Turn("tool", "setup.py")])

    Sampled ids stay as they are as long as their turn does, so `keep` is everything with tools.

    Args:
        chat: the family's way to write turns.
        tools: what the assistant may call; fixed for the conversation.
    """

    def __init__(self, chat: ChatFormat, tools: Sequence[Tool] = ()) -> None:
        self.ids: list[int] = []
        self._chat = chat
        self._tools = tuple(tools)
        self._turns: list[Turn] = []
        self._begins: list[int] = []
        """First token of each turn."""
        self._prefix = chat.render([])
        self._stopped = True
        self._open = False

    def prompt(self, turns: Sequence[Turn]) -> Step:
        """Add turns, then the header after which the assistant speaks.

        Raises:
            ValueError: nothing to begin with, or the assistant's reply to the last prompt is missing.
        """
        if self._open:
            raise ValueError("the last prompt has no reply: call reply before the next prompt")
        before = len(self.ids)
        if not self._turns:
            if not turns:
                raise ValueError("a conversation begins with at least one turn")
            turns = _described(turns, self._tools)
            self.ids = list(self._prefix)
        elif self._turns[-1].role == "assistant":
            self.ids += self._chat.delta([], open=False, stopped=self._stopped)
        keep = min(before, self._rewind(turns))
        self._append(turns)
        self.ids += self._chat.render([], open=True)[len(self._prefix) :]
        self._open = True
        return Step(keep, self.ids[keep:])

    def reply(self, sampled: Sequence[int], turn: Turn) -> None:
        """What the assistant said to the last prompt: its ids, the stop token if it came, and their turn.

        Raises:
            ValueError: no prompt waits for a reply, or the turn is not an assistant's.
        """
        if not self._open or turn.role != "assistant":
            raise ValueError("a reply is an assistant's turn that follows a prompt")
        self._open = False
        header = len(self._chat.render([], open=True)) - len(self._prefix)
        self._begins.append(len(self.ids) - header)
        self._turns.append(turn)
        self._stopped = bool(sampled) and sampled[-1] in self._chat.stop_ids
        self.ids += sampled

    def _rewind(self, turns: Sequence[Turn]) -> int:
        """Write turns anew from the first whose reasoning the user's next turn drops; tokens that stay."""
        if self._tools or all(turn.role != "user" for turn in turns):
            return len(self.ids)
        for index, turn in enumerate(self._turns):
            if turn.reasoning:
                keep, rest = self._begins[index], self._turns[index:]
                del self.ids[keep:], self._turns[index:], self._begins[index:]
                self._append([Turn(t.role, t.content, "", t.calls) for t in rest])
                return keep
        return len(self.ids)

    def _append(self, turns: Sequence[Turn]) -> None:
        last_user = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=-1)
        for index, turn in enumerate(turns):
            stays = bool(self._tools) or index > last_user
            kept = turn if stays else Turn(turn.role, turn.content, "", turn.calls)
            self._begins.append(len(self.ids))
            self._turns.append(kept)
            self.ids += self._chat.render([write(kept)])[len(self._prefix) :]
        self._stopped = True


def _described(turns: Sequence[Turn], tools: Sequence[Tool]) -> list[Turn]:
    if not tools:
        return list(turns)
    schemas = [
        json.dumps({"name": t.name, "description": t.description, "parameters": t.parameters}, sort_keys=True)
        for t in tools
    ]
    text = "Tools, one JSON schema a line:\n" + "\n".join(schemas)
    if turns and turns[0].role == "system":
        return [Turn("system", f"{turns[0].content}\n\n{text}"), *turns[1:]]
    return [Turn("system", text), *turns]


def _write_calls(calls: Sequence[Call]) -> str:
    if not calls:
        return ""
    lines = [_CALLS]
    for call in calls:
        for name in (call.name, *call.arguments):
            if not re.fullmatch(_NAME, name):
                raise ValueError(f"{name!r} cannot name a tool or an argument: use letters, digits and . _ -")
        lines.append(f'<{_MARK}invoke name="{call.name}">')
        for name, value in call.arguments.items():
            plain = isinstance(value, str) and _MARK not in value
            text = value if plain else json.dumps(value, ensure_ascii=False, allow_nan=False)
            # A bar inside JSON stands in a string, where its escape means the same and no mark can be forged.
            text = text.replace(_MARK, "\\u007cDSML|")
            kind = "true" if plain else "false"
            lines.append(f'<{_MARK}parameter name="{name}" string="{kind}">{text}</{_MARK}parameter>')
        lines.append(f"</{_MARK}invoke>")
    return "\n".join([*lines, _CALLS_END])


def _read_calls(block: str) -> tuple[Call, ...]:
    calls: list[Call] = []
    at = 0
    while found := _INVOKE.match(block, at):
        arguments: dict[str, Any] = {}
        for name, kind, text in _PARAMETER.findall(found[2]):
            if name in arguments:
                raise ValueError(f"the call of {found[1]} gives {name} twice")
            arguments[name] = text if kind == "true" else json.loads(text)
        if _PARAMETER.sub("", found[2]):
            raise ValueError(f"the call of {found[1]} has a parameter without a name or kind")
        calls.append(Call(found[1], arguments))
        at = found.end()
    if not calls or block[at:] != f"\n{_CALLS_END}":
        raise ValueError(f"the tool calls are not whole: {block[at : at + 40]!r} is no call and no end")
    return tuple(calls)
