"""The seam between the rollout service and whatever generates tokens.

An engine takes token ids and gives token ids, each with the log-probability of the distribution that it
was really drawn from and with the policy version that drew it. It stamps both itself: a version read by
the caller after the reply mislabels the tokens around an update. Text never crosses this seam, so that
nothing is ever tokenised twice.

No torch here: agents, service and journal import this file. Implementations: `rollout.native`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from catalog.trajectory import Segment

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["keep", "abort", "drain"]


class EngineError(Exception):
    """The engine cannot go on: bad weights, lost device. Fatal for the service."""


class RequestError(Exception):
    """This one request failed (logits that are not finite, context too long); its siblings go on."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Request:
    """One generation: everything the policy has seen so far, and how to go on."""

    ids: tuple[int, ...]
    """The complete context. With a session it must begin with all that the session already computed."""
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    """Generation ends with the first of these; it is part of the completion."""
    temperature: float = 1.0
    """0 takes the likeliest token; its log-probability is then that of a certain choice, 0."""
    top_p: float = 1.0
    seed: int = 0
    """The random number of a token depends on this and on its position alone, so a generation that is cut
    anywhere and resumed draws what it would have drawn in one piece."""
    session: str | None = None
    """Requests with the same session share one cache slot, across turns, until `release`."""
    prefix: int = 0
    """So many leading ids are shared with sibling requests: computed once and forked. 0: not shared."""
    chunks: tuple[int, ...] = ()
    """End offsets of the pieces in which the context was first computed. After the loss of a cache they
    are computed again in the same pieces, because where the first piece ends decides where the decoder's
    bounded replay starts. Empty: one piece."""


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token."""

    id: int
    logprob: float
    """Natural logarithm of its probability after temperature and top-p."""
    version: int
    kept: tuple[int, ...] | None = None
    """The ids that top-p left to choose from, ascending; None when it cut nothing."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled. Offsets of segments count from the first id of the request's context."""

    tokens: tuple[Token, ...]
    segments: tuple[Segment, ...]
    finish: FinishReason


class Sink(Protocol):
    """Hears of every token and every closed segment before the completion exists (the journal does)."""

    def token(self, token: Token) -> None: ...

    def segment(self, segment: Segment) -> None: ...


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was opened; times in seconds."""

    slots: int
    busy_s: float = 0.0
    """Slot-seconds in which a slot's request was generating (neither waiting for a tool nor paused)."""
    available_s: float = 0.0
    """Slot-seconds since the first request, paused or not."""
    paused_s: float = 0.0
    """Slot-seconds of it in which the engine was paused."""
    compute_s: float = 0.0
    sampled_tokens: int = 0
    prefill_tokens: int = 0
    replayed_tokens: int = 0
    forked_tokens: int = 0
    """Prompt tokens that a fork saved from being computed."""
    steps: int = 0
    pauses: int = 0
    finished: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def utilisation(self) -> float:
        """Slot-seconds generating / slot-seconds available while the job ran."""
        return self.busy_s / self.available_s if self.available_s else 0.0

    @property
    def utilisation_unpaused(self) -> float:
        """The same without the time that training held the device."""
        free = self.available_s - self.paused_s
        return self.busy_s / free if free > 0 else 0.0


@runtime_checkable
class Engine(Protocol):
    """Tokens in, tokens with log-probabilities and versions out."""

    @property
    def version(self) -> int:
        """Publication number of the weights now loaded."""
        ...

    @property
    def max_tokens(self) -> int:
        """Longest context of one session, in tokens."""
        ...

    @property
    def exact(self) -> bool:
        """A token depends on its own session alone, bit for bit, also after the loss of a cache."""
        ...

    async def generate(self, request: Request, sink: Sink | None = None) -> Completion:
        """Raises ValueError for a context that contradicts the session's, RequestError if this request
        fails, EngineError if the engine does. Cancelling it stops the generation."""
        ...

    def release(self, session: str) -> None:
        """Free what the session holds. Unknown sessions are ignored: releasing twice is harmless."""
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop at the next token boundary and return when nothing computes. `keep` leaves requests where
        they stand, `abort` returns them unfinished, `drain` first lets the running ones finish."""
        ...

    async def resume(self) -> None: ...

    async def update_weights(
        self, weights: Any, version: int, *, cache: Literal["keep", "replay"] = "keep"
    ) -> None:
        """New weights: a state dict or a folder. Call it between pause and resume. `keep` leaves the
        sessions' key-values as the old weights wrote them (segments say so), `replay` drops them, and each
        session is computed again from its exact ids when it goes on."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...
