"""One sample in flight: the agent's side of a conversation with the policy, token for token.

An agent says things (`say`), lets the policy act (`act`) and calls tools (`call`). The session keeps the
exact ids: the next prompt is what was there plus the ids of what is new, and sampled ids are never
decoded and encoded again. Everything goes to the journal first. A session opened on a journal that holds
something answers from it until it ends, so the agent's code needs no notion of resuming; that code must
be a pure function of what the session and its tools gave it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from catalog.models import Failure, Verdict
from catalog.trajectory import Segment, ToolCall, Trajectory, Turn
from rollout.config import SamplingConfig
from rollout.engine import Engine, FinishReason, Request, Token
from rollout.journal import Journal


class Message(NamedTuple):
    """One turn of a conversation; the shape that chat formats take."""

    role: str
    content: str


class ChatFormat(Protocol):
    """How a policy's family writes turns (`model.chat`)."""

    @property
    def stop_ids(self) -> Sequence[int]: ...

    def render(self, messages: Sequence[Any], *, open: bool = False) -> list[int]: ...

    def delta(self, messages: Sequence[Any], *, open: bool = True, stopped: bool = True) -> list[int]: ...


class TextCodec(Protocol):
    """What a session needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class ReplayMismatch(Exception):
    """The agent asked for something else than its journal answers: its code is not deterministic, or
    changed since. The sample fails (boundary `scaffold`)."""


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Which sample: everything that its id and its random numbers depend on."""

    run_id: str
    prompt: int
    """Number of the prompt in the run."""
    sample: int
    """Number within the prompt's group."""
    task_id: str
    effort: int | None
    seed: int
    group_size: int = 1
    epoch: int = 0

    @property
    def id(self) -> str:
        return f"{self.run_id}-p{self.prompt:05d}-s{self.sample:02d}"

    @property
    def group(self) -> str:
        return f"{self.run_id}-p{self.prompt:05d}"

    def header(self) -> dict[str, Any]:
        """First line of the sample's journal."""
        return {
            "id": self.id,
            "task": self.task_id,
            "effort": self.effort,
            "seed": self.seed,
            "epoch": self.epoch,
        }


class Act(NamedTuple):
    """What the policy said in one turn, without its stop token."""

    text: str
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class ToolReply:
    """What a tool gave back; `result` is the text that the policy will read."""

    result: str
    outcome: str = "exited"
    exit_code: int | None = None
    duration_s: float = 0.0
    cached: bool = False


class Session:
    """See the module. `progress` is called whenever something happened (the watchdog listens)."""

    def __init__(
        self,
        spec: SampleSpec,
        engine: Engine,
        chat: ChatFormat,
        tokenizer: TextCodec,
        *,
        sampling: SamplingConfig | None = None,
        journal: Journal | None = None,
        progress: Callable[[], None] | None = None,
    ) -> None:
        self.spec = spec
        self.truncated = False
        self._engine, self._chat, self._tokenizer = engine, chat, tokenizer
        self._sampling = sampling or SamplingConfig()
        self._journal = journal
        self._logged = list(journal.entries)[::-1] if journal else []  # next entry last
        self._progress = progress or (lambda: None)
        self._ids: list[int] = []
        self._tokens: dict[int, Token] = {}
        self._segments: list[Segment] = []
        self._turns: list[Turn] = []
        self._tool_calls: list[ToolCall] = []
        self._header_start = 0
        self._stopped = True
        self._started = time.monotonic()

    @property
    def effort(self) -> int | None:
        return self.spec.effort

    @property
    def length(self) -> int:
        """Tokens of context so far."""
        return len(self._ids)

    def count(self, text: str) -> int:
        """Tokens of a text in the policy's own tokenizer, for prompts that have a budget."""
        return len(self._tokenizer.encode(text))

    async def say(self, *messages: tuple[str, str]) -> None:
        """Give the policy messages (role, content); it speaks next."""
        first = not self._ids

        def render(part: Sequence[Message], open: bool) -> list[int]:
            if first:
                return self._chat.render(part, open=open)
            return self._chat.delta(part, open=open, stopped=self._stopped)

        given = [Message(*message) for message in messages]
        ids = render(given, True)
        entry = {"given": ids}
        if self._logged:
            logged = self._logged.pop()
            if logged != entry:
                raise ReplayMismatch(f"{self.spec.id}: the journal has another turn at {len(self._ids)}")
        else:
            self._write(entry, turn=True)
        offset = len(self._ids)
        ends = [offset + len(render(given[: i + 1], False)) for i in range(len(given))]
        for message, start, end in zip(given, [offset, *ends], ends, strict=False):
            self._turns.append(Turn(role=message.role, text=message.content, start=start, end=end))  # pyright: ignore[reportArgumentType]
        self._ids += ids
        self._header_start = ends[-1]

    async def act(self, max_tokens: int) -> Act:
        """Let the policy speak up to `max_tokens` tokens.

        A context without room for one more token gives `Act("", "length")`, and `truncated` is set.
        """
        start = len(self._ids)
        finish, logged = self._replay_act(start, max_tokens)
        while finish is None or finish == "abort":
            room = min(max_tokens - (len(self._ids) - start), self._engine.max_tokens - len(self._ids))
            if room < 1:
                finish = "length"
                break
            finish = (await self._engine.generate(self._request(room), self)).finish
        if not logged:
            self._write({"act": finish}, turn=True)
        self.truncated |= finish == "length" and len(self._ids) >= self._engine.max_tokens
        self._stopped = finish == "stop"
        said = self._ids[start : len(self._ids) - self._stopped]
        text = self._tokenizer.decode(said)
        self._turns.append(Turn(role="assistant", text=text, start=self._header_start, end=len(self._ids)))
        return Act(text, finish)

    async def call(
        self, name: str, arguments: dict[str, Any], run: Callable[[str], Awaitable[ToolReply]]
    ) -> ToolReply:
        """Run a tool once in the life of this sample. `run` gets a key that is unique to the call."""
        key = f"{self.spec.id}:{len(self._tool_calls)}"
        identity = {"tool": key, "name": name, "arguments": arguments}
        if self._logged:
            logged = self._logged.pop()
            reply = ToolReply(**logged.pop("reply", {"result": ""}))
            if logged != identity:
                raise ReplayMismatch(f"{self.spec.id}: the journal has another call than {name} {arguments}")
        else:
            reply = await run(key)
            fields = {field: getattr(reply, field) for field in ToolReply.__dataclass_fields__}
            self._write({**identity, "reply": fields}, turn=True)
        self._tool_calls.append(
            ToolCall(
                name=name,
                arguments=arguments,
                result=reply.result,
                outcome=reply.outcome,
                exit_code=reply.exit_code,
                duration_s=reply.duration_s,
                cached=reply.cached,
            )
        )
        self._progress()
        return reply

    @property
    def replaying(self) -> bool:
        """Whether the next answer comes from the journal."""
        return bool(self._logged)

    # --- the engine's sink ----------------------------------------------------------------------------

    def token(self, token: Token) -> None:
        kept = {} if token.kept is None else {"kept": token.kept}
        self._write({"token": token.id, "logprob": token.logprob, "version": token.version, **kept})
        self._take(token)

    def segment(self, segment: Segment) -> None:
        self._write({"segment": segment.model_dump(mode="json")})
        self._segments.append(segment)

    # --- inside ---------------------------------------------------------------------------------------

    def _request(self, max_tokens: int) -> Request:
        shared = len(self._ids) if self.spec.group_size > 1 and not self._segments else 0
        return Request(
            ids=tuple(self._ids),
            max_tokens=max_tokens,
            stop_ids=frozenset(self._chat.stop_ids),
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            seed=self.spec.seed,
            session=self.spec.id,
            prefix=shared,
            chunks=chunk_ends(self._segments),
        )

    def _replay_act(self, start: int, max_tokens: int) -> tuple[FinishReason | None, bool]:
        """Take the logged tokens of this turn. None: it is not over; True: the log says how it ended."""
        if not self._logged:
            return None, False
        while self._logged:
            entry = self._logged.pop()
            if "token" in entry:
                kept = tuple(entry["kept"]) if "kept" in entry else None
                self._take(Token(entry["token"], entry["logprob"], entry["version"], kept))
            elif "segment" in entry:
                self._segments.append(Segment.model_validate(entry["segment"]))
            elif "act" in entry:
                return entry["act"], True
            else:
                raise ReplayMismatch(f"{self.spec.id}: the journal has no turn of the policy at {start}")
        finish: FinishReason | None = None
        if len(self._ids) > start and self._ids[-1] in self._chat.stop_ids:
            finish = "stop"
        elif len(self._ids) - start >= max_tokens:
            finish = "length"
        self._close_torn(start, interrupted=finish is None)
        return finish, False

    def _close_torn(self, start: int, *, interrupted: bool) -> None:
        """Give the tokens that were logged after the last segment one of their own."""
        ends = [segment.end for segment in self._segments if segment.kind == "decode"]
        covered = max([start, *ends])
        if covered < len(self._ids):
            last = self._tokens[len(self._ids) - 1]
            kv_version = self._segments[-1].kv_version if self._segments else last.version
            self.segment(
                Segment(
                    kind="decode",
                    start=covered,
                    end=len(self._ids),
                    version=last.version,
                    kv_version=kv_version,
                    interrupted=interrupted,
                )
            )

    def _take(self, token: Token) -> None:
        self._tokens[len(self._ids)] = token
        self._ids.append(token.id)
        self._progress()

    def _write(self, entry: dict[str, Any], *, turn: bool = False) -> None:
        if self._journal:
            self._journal.append(entry, turn=turn)

    def trajectory(
        self,
        *,
        agent: str,
        policy: str,
        verdict: Verdict | None = None,
        failure: Failure | None = None,
        repercussion: bool = False,
        patch: str | None = None,
        submitted: Mapping[str, str] | None = None,
    ) -> Trajectory:
        """The record of this sample as it stands."""
        places = range(len(self._ids))
        tokens = [self._tokens.get(place) for place in places]
        kept = tuple(token.kept if token else None for token in tokens)
        return Trajectory(
            id=self.spec.id,
            task_id=self.spec.task_id,
            run_id=self.spec.run_id,
            agent=agent,
            policy=policy,
            effort=self.spec.effort,
            group=self.spec.group,
            seed=self.spec.seed,
            temperature=self._sampling.temperature,
            turns=tuple(self._turns),
            token_ids=tuple(self._ids),
            sampled=tuple(token is not None for token in tokens),
            logprobs=tuple(token.logprob if token else None for token in tokens),
            versions=tuple(token.version if token else None for token in tokens),
            kept=kept if any(ids is not None for ids in kept) else None,
            segments=tuple(self._segments),
            tool_calls=tuple(self._tool_calls),
            verdict=verdict,
            failure=failure,
            repercussion=repercussion,
            truncated=self.truncated,
            config_epoch=self.spec.epoch,
            cost_s=time.monotonic() - self._started,
            patch=patch,
            submitted=dict(submitted or {}),
        )


def chunk_ends(segments: Sequence[Segment]) -> tuple[int, ...]:
    """End offsets of the pieces in which a context was first computed, from its segments.

    A prefill is one piece. A decoded token is fed when the next one is drawn, so each token of a decode
    segment but the last ends a piece; the last is fed with the tool result that follows, or, after an
    interruption, alone.
    """
    ends: list[int] = []
    for segment in segments:
        if segment.kind == "prefill":
            ends = [end for end in ends if end <= segment.start] + [segment.end]
        elif segment.kind == "decode":
            ends += range(segment.start + 1, segment.end + 1)
    return tuple(ends)
