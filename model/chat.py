"""Messages to token ids, whole or turn by turn, with equal results; torch-free.

    render(messages[:2], open=True) + sampled + delta(messages[3:], open=True) == render(messages, open=True)

where `sampled` are the assistant's own tokens, its stop token last. Content is encoded as plain text: special
tokens written in it stay bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from model.tokenizer import Tokenizer

Role = Literal["system", "user", "assistant", "tool"]


class Message(NamedTuple):
    """One turn."""

    role: Role
    content: str


class Rendered(NamedTuple):
    """Token ids, and for each whether the assistant says it (its content and its stop token)."""

    ids: list[int]
    said: list[bool]


class ChatFormat(Protocol):
    """A family's way to write turns."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant's turn; the first is the one that `render` writes."""
        ...

    def render(self, messages: Sequence[Message], *, open: bool = False) -> list[int]:
        """Ids of the whole conversation; `open` adds the header after which the assistant speaks."""
        ...

    def render_said(self, messages: Sequence[Message]) -> Rendered:
        """`render(messages)` with the mask of the assistant's own tokens, for supervised losses."""
        ...

    def delta(self, messages: Sequence[Message], *, open: bool = True, stopped: bool = True) -> list[int]:
        """What follows an assistant's sampled tokens: these messages, then the header if `open`.

        Args:
            stopped: the sampled tokens ended with a stop token; otherwise one is added first.
        """
        ...


@dataclass(frozen=True)
class FlashChat:
    """`<|bos|>`, then each turn as its role's token, its text, `<|end|>`."""

    tokenizer: Tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`<|end|>`, or `<|eos|>`."""
        return (self.tokenizer.end, self.tokenizer.eos)

    def render(self, messages: Sequence[Message], *, open: bool = False) -> list[int]:
        """See `ChatFormat.render`."""
        ids = self.render_said(messages).ids
        return [*ids, self.tokenizer.assistant] if open else ids

    def render_said(self, messages: Sequence[Message]) -> Rendered:
        """See `ChatFormat.render_said`."""
        ids, said = [self.tokenizer.bos], [False]
        for message in messages:
            _append_turn(
                ids, said, message, self._header(message), self.tokenizer.encode, [self.tokenizer.end], []
            )
        return Rendered(ids, said)

    def delta(self, messages: Sequence[Message], *, open: bool = True, stopped: bool = True) -> list[int]:
        """See `ChatFormat.delta`."""
        ids: list[int] = [] if stopped else [self.tokenizer.end]
        return ids + self.render(messages, open=open)[1:]

    def _header(self, message: Message) -> list[int]:
        return [self.tokenizer.special(f"<|{message.role}|>")]


@dataclass(frozen=True)
class ChatML:
    """`<|im_start|>role`, line break, text, `<|im_end|>`, line break (SmolLM2, Qwen).

    A tool's result is a turn of the user, since these templates know no tool role.

    Args:
        encode: plain text to ids, without special tokens.
        im_start, im_end: the ids of the two marks.
    """

    encode: Callable[[str], list[int]]
    im_start: int
    im_end: int

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`<|im_end|>`."""
        return (self.im_end,)

    def render(self, messages: Sequence[Message], *, open: bool = False) -> list[int]:
        """See `ChatFormat.render`."""
        ids = self.render_said(messages).ids
        return ids + self._header("assistant") if open else ids

    def render_said(self, messages: Sequence[Message]) -> Rendered:
        """See `ChatFormat.render_said`."""
        ids: list[int] = []
        said: list[bool] = []
        newline = self.encode("\n")
        for message in messages:
            role = "user" if message.role == "tool" else message.role
            _append_turn(ids, said, message, self._header(role), self.encode, [self.im_end], newline)
        return Rendered(ids, said)

    def delta(self, messages: Sequence[Message], *, open: bool = True, stopped: bool = True) -> list[int]:
        """See `ChatFormat.delta`."""
        closing = [] if stopped else [self.im_end]
        return closing + self.encode("\n") + self.render(messages, open=open)

    def _header(self, role: str) -> list[int]:
        return [self.im_start, *self.encode(f"{role}\n")]


def _append_turn(
    ids: list[int],
    said: list[bool],
    message: Message,
    header: list[int],
    encode: Callable[[str], list[int]],
    stop: list[int],
    trailer: list[int],
) -> None:
    body = encode(message.content) + stop
    ids += header + body + trailer
    said += [False] * len(header) + [message.role == "assistant"] * len(body) + [False] * len(trailer)
