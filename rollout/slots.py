"""Which session holds which cache slot, and what its cache still lacks. No torch here."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from catalog.trajectory import Segment
from rollout.config import EngineConfig
from rollout.engine import Completion, Request, Sink, Token


@dataclass(slots=True, eq=False)
class SessionState:
    """What the engine knows of a session between its turns."""

    key: str
    slot: int | None = None
    ids: list[int] = field(default_factory=list[int])
    """The ids whose key-values the slot holds."""
    kv_version: int = 0
    """Publication that wrote the oldest of them."""
    chunks: list[int] = field(default_factory=list[int])
    """End offsets of the pieces computed so far, kept when the slot is lost."""
    busy: bool = False


class Counted(NamedTuple):
    """Context tokens by how they got into the cache."""

    prefill: int
    replay: int
    forked: int


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way: its context grows by one token a step."""

    request: Request
    sink: Sink | None
    future: asyncio.Future[Completion]
    session: SessionState
    context: list[int] = field(default_factory=list[int])
    tokens: list[Token] = field(default_factory=list[Token])
    segments: list[Segment] = field(default_factory=list[Segment])
    pieces: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    """What this step feeds, in order; set by `SlotTable.schedule`."""
    fork_from: int | None = None
    place: int = -1
    """The slot that this step computes in. The session may lose it meanwhile (its caller gave up): the step
    then ends in a slot that is freed before its next use, and its result is ignored."""
    decode_start: int | None = None
    decode_kv: int = 0
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.context = list(self.request.ids)

    @property
    def slot(self) -> int | None:
        return self.session.slot

    def computed(self, version: int) -> Counted:
        """The pieces are in the cache: bring the session up to date and record what was computed."""
        session, end = self.session, len(self.context)
        done = len(session.ids)
        replayed = session.chunks[-1] if session.chunks and done == 0 else 0
        forked = self.request.prefix if self.fork_from is not None else 0
        if done == 0:
            session.kv_version = version
        if replayed:
            self._add("replay", 0, replayed, version, version)
        start = max(done, replayed)
        prefilled = not self.tokens and (start == 0 or end - start > 1)
        if prefilled:
            self._add("prefill", start, end, version, session.kv_version)
        if 0 < forked < end:
            session.chunks.append(forked)
        session.chunks.append(end)
        session.ids = list(self.context)
        self.pieces, self.fork_from = [], None
        return Counted(end - start - forked if prefilled else 0, replayed, forked)

    def sampled(self, token: Token) -> None:
        if self.decode_start is None:
            self.decode_start, self.decode_kv = len(self.context), self.session.kv_version
        self.tokens.append(token)
        self.context.append(token.id)
        if self.sink:
            self.sink.token(token)

    def close_decode(self, *, interrupted: bool) -> None:
        """End the running decode segment, if there is one."""
        if self.decode_start is None:
            return
        start, self.decode_start = self.decode_start, None
        self._add("decode", start, len(self.context), self.tokens[-1].version, self.decode_kv, interrupted)

    def _add(
        self,
        kind: Literal["prefill", "decode", "replay"],
        start: int,
        end: int,
        version: int,
        kv_version: int,
        interrupted: bool = False,
    ) -> None:
        segment = Segment(
            kind=kind,
            start=start,
            end=end,
            version=version,
            kv_version=kv_version,
            window_hit=False if kind == "replay" else None,
            interrupted=interrupted,
        )
        self.segments.append(segment)
        if self.sink:
            self.sink.segment(segment)


class SlotTable:
    """Sessions, their slots, and the slots that hold shared prompts."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._sessions: OrderedDict[str, SessionState] = OrderedDict()  # least recently used first
        self._free = list(range(config.slots))[::-1]
        self._prefixes: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._free_prefixes = list(range(config.slots, config.slots + config.prefix_slots))[::-1]
        self._dirty: set[int] = set()
        self._anonymous = 0
        self.admitting = True

    def session(self, request: Request) -> SessionState:
        """The session of a request, checked against what it already holds.

        Raises ValueError if the session is busy or the request rewrites its history.
        """
        key = request.session
        if key is None:
            self._anonymous += 1
            key = f"\0{self._anonymous}"
        state = self._sessions.setdefault(key, SessionState(key))
        if state.busy:
            raise ValueError(f"session {key!r} is already generating")
        if len(state.ids) >= len(request.ids) or state.ids != list(request.ids[: len(state.ids)]):
            raise ValueError(
                f"session {key!r} holds {len(state.ids)} ids that the request does not continue; "
                "a rewritten history needs a new session"
            )
        if not state.ids and not state.chunks:
            state.chunks = [end for end in request.chunks if end < len(request.ids)]
        state.busy = True
        self._sessions.move_to_end(key)
        return state

    def release(self, key: str) -> None:
        state = self._sessions.pop(key, None)
        if state is not None:
            self._drop(state)

    def forget(self, state: SessionState) -> None:
        """Its cache is of no use any more; it may start again from its ids."""
        self._drop(state)
        state.busy = False

    def drop_caches(self) -> None:
        for state in self._sessions.values():
            self._drop(state)

    def drop_prefixes(self) -> None:
        for slot in self._prefixes.values():
            self._dirty.add(slot)
            self._free_prefixes.append(slot)
        self._prefixes.clear()

    def take_dirty(self) -> list[int]:
        """Slots to be freed in the cache before their next use."""
        dirty, self._dirty = sorted(self._dirty), set()
        return dirty

    def schedule(self, jobs: list[Job]) -> list[Job]:
        """The jobs of the next step, each with the pieces that its cache lacks; oldest first."""
        chosen: list[Job] = []
        budget = self._config.prefill_tokens
        in_use: set[int] = set()
        for job in jobs:
            cost = self._cost(job)
            if cost > max(1, budget) and budget < self._config.prefill_tokens:
                continue
            if not self._prefix_room(job, in_use):
                continue
            if job.slot is None and not self._take_slot(job.session):
                continue
            job.fork_from = self._prefix_slot(job, in_use)
            job.pieces = self._pieces(job)
            assert job.slot is not None
            job.place = job.slot
            budget -= cost if cost > 1 else 0
            chosen.append(job)
        return chosen

    def _cost(self, job: Job) -> int:
        """Tokens to compute for it, not counting a shared prompt that a slot holds already."""
        shared = job.request.ids[: job.request.prefix]
        known = len(shared) if not job.session.ids and shared in self._prefixes else len(job.session.ids)
        return len(job.context) - known

    def _pieces(self, job: Job) -> list[tuple[int, ...]]:
        done = len(job.session.ids)
        if job.fork_from is not None:
            done = job.request.prefix
        ends = [end for end in job.session.chunks if end > done] if not job.session.ids else []
        if not self._config.exact:
            ends = ends[:1]
        bounds = [done, *(end for end in ends if end < len(job.context)), len(job.context)]
        pairs = itertools.pairwise(bounds)
        return [tuple(job.context[start:end]) for start, end in pairs if end > start]

    def _take_slot(self, state: SessionState) -> bool:
        if not self.admitting:
            return False
        if not self._free:
            idle = next((s for s in self._sessions.values() if s.slot is not None and not s.busy), None)
            if idle is None:
                return False
            self._drop(idle)
        state.slot = self._free.pop()
        return True

    def _forks(self, job: Job) -> bool:
        return bool(job.request.prefix and not job.session.ids and not job.session.chunks)

    def _prefix_room(self, job: Job, in_use: set[int]) -> bool:
        """Whether this step can serve the job's shared prompt; else it waits for the next one."""
        if not self._forks(job) or job.request.ids[: job.request.prefix] in self._prefixes:
            return True
        return bool(self._free_prefixes) or any(slot not in in_use for slot in self._prefixes.values())

    def _prefix_slot(self, job: Job, in_use: set[int]) -> int | None:
        """The slot that holds or will hold this job's shared prompt; None: it shares nothing."""
        if not self._forks(job):
            return None
        key = job.request.ids[: job.request.prefix]
        slot = self._prefixes.get(key)
        if slot is None:
            slot = self._prefixes[key] = self._claim_prefix(in_use)
        self._prefixes.move_to_end(key)
        in_use.add(slot)
        return slot

    def _claim_prefix(self, in_use: set[int]) -> int:
        if self._free_prefixes:
            return self._free_prefixes.pop()
        oldest = next(key for key, slot in self._prefixes.items() if slot not in in_use)
        slot = self._prefixes.pop(oldest)
        self._dirty.add(slot)
        return slot

    def _drop(self, state: SessionState) -> None:
        if state.slot is not None:
            self._dirty.add(state.slot)
            self._free.append(state.slot)
        state.slot, state.ids = None, []
