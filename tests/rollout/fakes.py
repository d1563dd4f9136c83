"""Hand-made parts: a policy whose logits depend on every token and on the weights that read it, a
character tokenizer, an engine that follows a script, tools and a grader that remember what they did."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import nn

from catalog.models import (
    Candidate,
    CandidateSet,
    Environment,
    Origin,
    Problem,
    Task,
    TestStatus,
    Verdict,
    VerifierSpec,
)
from catalog.trajectory import Segment as EngineSegment
from rollout.agents.repair_choice import VisibleResult
from rollout.engine import Completion, EngineStats, Request, Sink, Token

STOP = 3
ROLES = {"system": 0, "user": 1, "assistant": 2, "tool": 4}
VOCAB = 128


class Characters:
    """One id a character; ids below 8 are marks of the chat."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) if 8 <= ord(letter) < VOCAB else ord("?") for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(id) if id >= 8 else "" for id in ids)


class Chat:
    """Role mark, characters, stop mark."""

    stop_ids = (STOP,)

    def render(self, messages, *, open=False):
        ids: list[int] = []
        for role, content in messages:
            ids += [ROLES[role], *Characters().encode(content), STOP]
        return [*ids, ROLES["assistant"]] if open else ids

    def delta(self, messages, *, open=True, stopped=True):
        return ([] if stopped else [STOP]) + self.render(messages, open=open)


class FakeCache:
    """Per slot the tokens and what the weights of their time made of them."""

    def __init__(self, policy: FakePolicy, slots: int, max_tokens: int) -> None:
        self.policy = policy
        self.states: list[torch.Tensor | None] = [None] * slots
        self.lengths = [0] * slots
        self.max_tokens = max_tokens
        self.first_pieces: list[int] = [0] * slots
        self.calls: list[list[int]] = []

    def extend(self, slots, tokens):
        assert len(set(slots)) == len(slots)
        assert all(tokens)
        self.calls.append([len(piece) for piece in tokens])
        net = self.policy.module
        rows = []
        for slot, piece in zip(slots, tokens, strict=True):
            state = self.states[slot]
            if state is None:
                assert self.lengths[slot] == 0
                state = torch.zeros(net.width, dtype=torch.float64)
                self.first_pieces[slot] = len(piece)
            for token in piece:
                state = state + net.read(token, self.lengths[slot])
                self.lengths[slot] += 1
            assert self.lengths[slot] <= self.max_tokens
            self.states[slot] = state
            rows.append(net.write(state, self.first_pieces[slot]))
        return torch.stack(rows).float()

    def fork(self, src, dst):
        assert self.lengths[dst] == 0, "fork into a slot that is not free"
        self.states[dst], self.lengths[dst] = self.states[src], self.lengths[src]
        self.first_pieces[dst] = self.first_pieces[src]

    def free(self, slot):
        self.states[slot], self.lengths[slot] = None, 0

    def length(self, slot):
        return self.lengths[slot]


class FakeNet(nn.Module):
    width = 16

    def __init__(self, seed: int = 0, sharpness: float = 2.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(VOCAB, self.width, generator=generator, dtype=torch.float64))
        self.head = nn.Parameter(torch.randn(VOCAB, self.width, generator=generator, dtype=torch.float64))
        self.sharpness = sharpness

    def read(self, token, position):
        return self.embed[token] * math.cos(position)

    def write(self, state, first_piece):
        """The first piece's length matters, as it does with a decoder's bounded replay."""
        logits = self.sharpness * torch.tanh(state + 0.01 * first_piece) @ self.head.T
        logits[STOP] += 1.0
        return logits


class FakePolicy:
    name = "fake"

    def __init__(self, seed: int = 0, sharpness: float = 2.0) -> None:
        self.module = FakeNet(seed, sharpness)
        self.chat, self.tokenizer = Chat(), Characters()
        self.cache: FakeCache | None = None

    def open_cache(self, slots, max_tokens):
        self.cache = FakeCache(self, slots, max_tokens)
        return self.cache


class ScriptedEngine:
    """An engine without a network: `script(request, turn)` is the text of each turn.

    It gives one token a loop iteration, keeps the pause, and stamps versions, as a real one does.
    """

    exact = True
    max_tokens = 4096

    def __init__(
        self, script: Callable[[Request, int], str], *, delay: float = 0.0, version: int = 0
    ) -> None:
        self.script, self.delay, self.version = script, delay, version
        self.turns: Counter[str] = Counter()
        self.running = asyncio.Event()
        self.running.set()
        self.requests: list[Request] = []
        self.released: list[str] = []
        self.loaded: list[object] = []
        self.active = self.most_active = 0

    async def generate(self, request: Request, sink: Sink | None = None) -> Completion:
        self.requests.append(request)
        key = request.session or ""
        text = [*Characters().encode(self.script(request, self.turns[key])), STOP]
        self.turns[key] += 1
        start = len(request.ids)
        segments = [EngineSegment(kind="prefill", start=0, end=start, version=self.version, kv_version=0)]
        if sink:
            sink.segment(segments[0])
        tokens: list[Token] = []
        self.active += 1
        self.most_active = max(self.active, self.most_active)
        try:
            for id in text[: request.max_tokens]:
                await asyncio.sleep(self.delay)
                await self.running.wait()
                tokens.append(Token(id, -0.5, self.version))
                if sink:
                    sink.token(tokens[-1])
        finally:
            self.active -= 1
        end = start + len(tokens)
        segments.append(
            EngineSegment(kind="decode", start=start, end=end, version=self.version, kv_version=0)
        )
        if sink:
            sink.segment(segments[-1])
        return Completion(tuple(tokens), tuple(segments), "stop" if tokens[-1].id == STOP else "length")

    def release(self, session):
        self.released.append(session)

    async def pause(self, mode="keep"):
        self.running.clear()

    async def resume(self):
        self.running.set()

    async def update_weights(self, weights, version, *, cache="keep"):
        assert not self.running.is_set(), "weights changed while generating"
        self.loaded.append(weights)
        self.version = version

    def stats(self):
        return EngineStats(slots=8)

    async def close(self):
        pass


class MemoryBlobs(dict):
    """Blobs by a reference that the test chooses."""

    def get(self, ref):
        return self[ref]


class FakeTests:
    """Visible tests: content `good` passes. Remembers what ran."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, bytes]] = []
        self.error: Exception | None = None

    async def run(self, task: Task, files: Mapping[str, bytes | None]) -> VisibleResult:
        await asyncio.sleep(0)
        if self.error:
            raise self.error
        (content,) = files.values()
        self.ran.append((task.id, content or b""))
        passed = content == b"good"
        return VisibleResult(passed, "" if passed else "E       ValueError: still broken")


class FakeGrader:
    """Content `good` has reward 1. Remembers whether it was asked for a fresh verdict."""

    def __init__(self) -> None:
        self.fresh: list[bool] = []
        self.diffs: list[bytes] = []
        self.verdict: Verdict | None = None

    async def grade_files(self, task, files, *, fresh=False):
        self.fresh.append(fresh)
        if self.verdict:
            return self.verdict
        (content,) = files.values()
        return Verdict(reward=float(content == b"good"))

    async def grade(self, task, diff, *, fresh=False):
        self.fresh.append(fresh)
        self.diffs.append(diff)
        return self.verdict or Verdict(reward=float(b"+" in diff))


def ref(name: str) -> str:
    import hashlib

    return "sha256:" + hashlib.sha256(name.encode()).hexdigest()


def make_task(name: str = "one", image: str = "", allowed: tuple[str, ...] = ("pkg",)) -> Task:
    test = "tests/test_pkg.py::test_first"
    return Task(
        id=f"task-{name}",
        origin=Origin(kind="procedural", source="pypi:pkg", revision="1.0"),
        problem=Problem(statement="test_first fails; mend pkg.", visible_tests=(test,)),
        environment=Environment(image=image or ref("image"), tree=ref("tree")),
        verifier=VerifierSpec(
            fail_to_pass=(test,),
            pass_to_pass=(),
            expected={test: TestStatus.PASSED},
            arguments=("tests/test_pkg.py",),
            protected=ref("protected"),
            allowed=allowed,
        ),
        solution=ref("gold"),
    )


def make_choices(task: Task, good: int = 3, n: int = 8) -> tuple[CandidateSet, MemoryBlobs]:
    """Candidate number `good` (from 1) is the only one that passes."""
    blobs = MemoryBlobs()
    candidates = []
    for number in range(1, n + 1):
        content = ref(f"{task.id} {number}")
        blobs[content] = b"good" if number == good else f"bad {number}".encode()
        candidates.append(
            Candidate(
                operator="compare",
                path="pkg/core.py",
                line=10 + number,
                before=f"if a < {number}:",
                after=f"if a <= {number}:",
                content=content,
            )
        )
    passes = tuple(number == good for number in range(1, n + 1))
    choices = CandidateSet(
        task_id=task.id,
        candidates=tuple(candidates),
        passes_visible=passes,
        passes=passes,
        tried=40,
        test_source="def test_first():\n    assert first([]) is None\n",
        failure="E       IndexError: list index out of range",
    )
    return choices, blobs
