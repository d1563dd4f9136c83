"""Sessions: exact ids, one execution of each tool call, and going on after a crash at any byte."""

import pytest

from catalog.models import Verdict
from catalog.trajectory import Segment
from rollout.agents.base import Outcome, attempt
from rollout.config import EngineConfig, SamplingConfig
from rollout.journal import Journal
from rollout.native import NativeEngine
from rollout.session import SampleSpec, Session, ToolReply, chunk_ends
from tests.rollout.fakes import STOP, Characters, Chat, FakePolicy, ScriptedEngine, make_task

SPEC = SampleSpec(run_id="run", prompt=3, sample=1, task_id="task-one", effort=50, seed=11)


class Echo:
    """Two turns with a tool call between them; remembers what it executed."""

    name = "echo"
    fresh = True

    def __init__(self):
        self.executed = []

    async def run(self, task, session):
        await session.say(("system", "be brief"), ("user", "hello"))
        act = await session.act(6)

        async def tool(key):
            self.executed.append(key)
            return ToolReply(f"heard {len(act.text)}", exit_code=0)

        for _ in range(2):
            reply = await session.call("echo", {"text": act.text}, tool)
            await session.say(("tool", reply.result))
            act = await session.act(6)
        return Outcome(Verdict(reward=1.0))


def scripted(texts):
    return ScriptedEngine(lambda request, turn: texts[turn])


def session_of(engine, journal=None, spec=SPEC, **options):
    return Session(spec, engine, Chat(), Characters(), journal=journal, **options)


async def test_a_trajectory_holds_the_exact_ids_and_who_said_them():
    engine = scripted(["one", "two", "three"])
    done = await attempt(Echo(), make_task(), session_of(engine), policy="p")
    assert done.id == "run-p00003-s01"
    assert (done.group, done.effort, done.reward, done.failure) == ("run-p00003", 50, 1.0, None)
    assert [turn.role for turn in done.turns] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [turn.text for turn in done.turns if turn.role == "assistant"] == ["one", "two", "three"]
    assert [a.end for a in done.turns[:-1]] == [b.start for b in done.turns[1:]]
    assert done.turns[-1].end == len(done.token_ids)
    # what the engine saw is what the trajectory says, token for token
    assert done.token_ids[: len(engine.requests[-1].ids)] == engine.requests[-1].ids
    sampled = [id for id, is_sampled in zip(done.token_ids, done.sampled, strict=True) if is_sampled]
    assert Characters().decode(sampled) == "onetwothree"
    assert sampled.count(STOP) == 3
    whole = Chat().render([(turn.role, turn.text) for turn in done.turns])
    assert list(done.token_ids) == whole
    assert [call.result for call in done.tool_calls] == ["heard 3", "heard 3"]


async def test_a_turn_cut_by_its_limit_gets_a_stop_mark_that_was_not_sampled():
    engine = scripted(["a long turn", "b", "c"])
    done = await attempt(Echo(), make_task(), session_of(engine), policy="p")
    first = next(turn for turn in done.turns if turn.role == "assistant")
    assert first.text == "a long"
    assert done.token_ids[first.end] == STOP
    assert not done.sampled[first.end]


async def test_a_context_without_room_is_truncated_not_an_error():
    engine = scripted(["x"])
    engine.max_tokens = 20
    session = session_of(engine)
    await session.say(("user", "a" * 30))
    assert await session.act(5) == ("", "length")
    assert session.trajectory(agent="a", policy="p").truncated


async def roll(folder, agent, exact=True):
    """One attempt with the native engine and a journal; the journal stays."""
    engine = NativeEngine(FakePolicy(), EngineConfig(slots=2, max_tokens=256, compute="inline", exact=exact))
    journal = Journal(folder / "s.jsonl", SPEC.header())
    session = session_of(engine, journal, sampling=SamplingConfig(temperature=1.0))
    try:
        return await attempt(agent, make_task(), session, policy="p"), engine.stats()
    finally:
        journal.close()
        await engine.close()


def essence(done):
    kinds = [segment for segment in done.segments if segment.kind == "prefill"]
    calls = [(call.name, call.arguments, call.result) for call in done.tool_calls]
    return (done.token_ids, done.sampled, done.logprobs, done.versions, done.turns, calls, kinds[0])


async def test_killed_at_any_line_or_inside_one_it_goes_on_at_the_very_token(tmp_path):
    """Bit for bit with an exact engine: same ids, same log-probabilities, each tool executed once."""
    agent = Echo()
    (tmp_path / "whole").mkdir()
    whole, _ = await roll(tmp_path / "whole", agent)
    assert agent.executed == ["run-p00003-s01:0", "run-p00003-s01:1"]
    data = (tmp_path / "whole" / "s.jsonl").read_bytes()
    lines = data.splitlines(keepends=True)
    assert len(lines) > 20
    for n in range(len(lines) + 1):
        kept = b"".join(lines[:n])
        logged_calls = sum(b'"tool"' in line for line in lines[:n])
        logged_tokens = sum(b'"token"' in line for line in lines[:n])
        again, folder = Echo(), tmp_path / f"cut{n}"
        folder.mkdir()
        (folder / "s.jsonl").write_bytes(kept + data[len(kept) : len(kept) + 5 * (n % 3)])
        resumed, stats = await roll(folder, again)
        assert essence(resumed) == essence(whole), n
        assert len(again.executed) == 2 - logged_calls
        assert stats.sampled_tokens == sum(whole.sampled) - logged_tokens  # none is generated twice


async def test_a_resumed_sample_records_the_replay(tmp_path):
    whole, _ = await roll(tmp_path, Echo())
    path = tmp_path / "s.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    token_lines = [n for n, line in enumerate(lines) if b'"token"' in line]
    path.write_bytes(b"".join(lines[: token_lines[2] + 1]))
    resumed, stats = await roll(tmp_path, Echo())
    prompt = whole.segments[0].end
    kinds = [(s.kind, s.start, s.end, s.interrupted) for s in resumed.segments[:4]]
    assert kinds[0] == ("prefill", 0, prompt, False)
    assert kinds[1] == ("decode", prompt, prompt + 3, True)
    assert kinds[2][:3] == ("replay", 0, prompt + 2)
    assert kinds[3][:2] == ("decode", prompt + 3)
    assert stats.replayed_tokens == prompt + 2


async def test_an_agent_that_does_not_repeat_itself_fails_as_scaffold(tmp_path):
    class Moody(Echo):
        async def run(self, task, session):
            await session.say(("user", "something else"))
            await session.act(3)
            return Outcome(Verdict(reward=1.0))

    await roll(tmp_path, Echo())
    done, _ = await roll(tmp_path, Moody())
    assert (done.failure.boundary, done.failure.kind, done.reward) == ("scaffold", "replay", None)


async def test_another_tool_call_than_the_logged_one_is_not_answered_from_the_log(tmp_path):
    class Other(Echo):
        async def run(self, task, session):
            await session.say(("system", "be brief"), ("user", "hello"))
            await session.act(6)

            async def tool(key):
                return ToolReply("x")

            await session.call("rm", {}, tool)
            return Outcome(Verdict(reward=1.0))

    await roll(tmp_path, Echo())
    done, _ = await roll(tmp_path, Other())
    assert done.failure.kind == "replay"


def test_pieces_of_a_context_from_its_segments():
    def segment(kind, start, end):
        return Segment(kind=kind, start=start, end=end, version=0, kv_version=0)

    first = [segment("prefill", 0, 10), segment("decode", 10, 13)]
    assert chunk_ends(first) == (10, 11, 12, 13)
    # a tool result is fed with the last sampled token
    second = [*first, segment("prefill", 12, 20), segment("decode", 20, 22)]
    assert chunk_ends(second) == (10, 11, 12, 20, 21, 22)
    # an interruption: the last sampled token is fed alone
    cut = [*first, segment("replay", 0, 12), segment("decode", 13, 15)]
    assert chunk_ends(cut) == (10, 11, 12, 13, 14, 15)


@pytest.mark.parametrize("top_p", [1.0, 0.6])
async def test_kept_sets_survive_the_journal(tmp_path, top_p):
    engine = NativeEngine(FakePolicy(), EngineConfig(slots=1, max_tokens=256, compute="inline"))
    for name in ("first", "second"):
        journal = Journal(tmp_path / "s.jsonl", SPEC.header())
        session = session_of(engine, journal, sampling=SamplingConfig(top_p=top_p))
        await session.say(("user", "hello"))
        await session.act(4)
        done = session.trajectory(agent="a", policy=name)
        journal.close()
        assert (done.kept is None) == (top_p == 1.0)
        if done.kept:
            pairs = [(i, ids) for i, ids in zip(done.token_ids, done.kept, strict=True) if ids is not None]
            assert pairs
            assert all(i in ids for i, ids in pairs)
    await engine.close()
