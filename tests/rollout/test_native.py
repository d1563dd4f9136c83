"""The native engine: batching, forking, sessions, pauses, updates, replay."""

import asyncio
import itertools
import threading
from random import Random

import pytest
import torch

from catalog.trajectory import Segment
from rollout.config import EngineConfig
from rollout.engine import EngineError, Request, RequestError
from rollout.native import NativeEngine
from tests.rollout.fakes import FakePolicy

PROMPT = tuple(range(20, 40))


def request(ids=PROMPT, n=12, **options):
    return Request(ids=tuple(ids), max_tokens=n, **options)


class Opened:
    """A native engine over the fake policy, closed at the end of the test."""

    def __init__(self, policy=None, **settings):
        self.policy = policy or FakePolicy()
        self.settings = {"slots": 4, "max_tokens": 128, "compute": "inline", **settings}

    async def __aenter__(self):
        self.engine = NativeEngine(self.policy, EngineConfig(**self.settings))
        return self.engine

    async def __aexit__(self, *exc):
        await self.engine.close()


def ids(completion):
    return [token.id for token in completion.tokens]


async def test_same_seed_gives_the_same_tokens_alone_and_in_a_crowd():
    async with Opened() as engine:
        alone = await engine.generate(request(seed=7))
    async with Opened(slots=8, compute="thread") as engine:
        others = [engine.generate(request(range(10, 10 + n), seed=n)) for n in (3, 30, 31)]
        crowd = (await asyncio.gather(*others, engine.generate(request(seed=7))))[-1]
    assert ids(alone) == ids(crowd)
    assert [t.logprob for t in alone.tokens] == pytest.approx([t.logprob for t in crowd.tokens])
    assert all(token.version == 0 for token in alone.tokens)


async def test_logprobs_are_those_of_the_processed_distribution():
    policy = FakePolicy()
    async with Opened(policy) as engine:
        done = await engine.generate(request(temperature=0.7, seed=3))
    check = policy.open_cache(1, 128)
    policy.module.requires_grad_(False)
    logits = check.extend([0], [list(PROMPT)])
    for token in done.tokens:
        expected = torch.log_softmax(logits[0] / 0.7, dim=-1)[token.id]
        assert token.logprob == pytest.approx(float(expected), abs=1e-5)
        logits = check.extend([0], [[token.id]])


async def test_generation_ends_with_a_stop_id_or_the_limit():
    async with Opened() as engine:
        found = await engine.generate(request(n=100, stop_ids=frozenset(range(128)), seed=1))
        assert (len(found.tokens), found.finish) == (1, "stop")
        capped = await engine.generate(request(n=5, seed=1))
        assert (len(capped.tokens), capped.finish) == (5, "length")
        full = await engine.generate(request(range(10, 120), n=100, seed=1))
        assert (len(full.tokens), full.finish) == (128 - 110, "length")
        with pytest.raises(RequestError, match="context of 128"):
            await engine.generate(request([20] * 128))


async def test_samples_of_a_prompt_are_forked_and_equal_those_computed_apart():
    async with Opened() as engine:
        apart = [await engine.generate(request(seed=seed)) for seed in range(4)]
    async with Opened() as engine:
        forked = await asyncio.gather(
            *(engine.generate(request(seed=seed, prefix=len(PROMPT))) for seed in range(4))
        )
        assert engine.stats().forked_tokens == 4 * len(PROMPT)
        assert engine.stats().prefill_tokens == len(PROMPT)
    assert [ids(done) for done in forked] == [ids(done) for done in apart]
    assert len({tuple(ids(done)) for done in forked}) == 4


async def test_more_groups_than_prefix_slots_wait_a_step_and_still_share():
    async with Opened(slots=12, prefix_slots=2) as engine:
        prompts = [[*PROMPT, place] for place in range(60, 66)]
        done = await asyncio.gather(
            *(
                engine.generate(request(prompt, seed=seed, prefix=len(prompt)))
                for prompt in prompts
                for seed in range(2)
            )
        )
        assert engine.stats().prefill_tokens == sum(map(len, prompts))
    async with Opened() as engine:
        apart = [await engine.generate(request(p, seed=seed)) for p in prompts for seed in range(2)]
    assert [ids(one) for one in done] == [ids(one) for one in apart]


async def test_a_shared_prefix_may_be_shorter_than_the_prompt():
    async with Opened() as engine:
        first, second = await asyncio.gather(
            engine.generate(request(seed=1, prefix=8)),
            engine.generate(request([*PROMPT[:8], 50, 51], seed=2, prefix=8)),
        )
        assert engine.stats().prefill_tokens == 8 + 12 + 2
        assert first.segments[0] == Segment(kind="prefill", start=0, end=20, version=0, kv_version=0)
    assert ids(first) != ids(second)


async def test_a_session_keeps_its_cache_between_turns():
    policy = FakePolicy()
    async with Opened(policy) as engine:
        first = await engine.generate(request(session="s", seed=5, n=6))
        context = [*PROMPT, *ids(first), 60, 61, 62]
        before = engine.stats().prefill_tokens
        second = await engine.generate(request(context, session="s", seed=5, n=6))
        assert engine.stats().prefill_tokens - before == 4  # the last sampled token and three new ones
        assert engine.stats().replayed_tokens == 0
        assert second.segments[0] == Segment(kind="prefill", start=25, end=29, version=0, kv_version=0)
        with pytest.raises(ValueError, match="rewritten history"):
            await engine.generate(request([1, *context], session="s"))
        engine.release("s")
        engine.release("s")
        assert ids(await engine.generate(request(session="s", seed=5, n=6))) == ids(first)
    assert [segment.kind for segment in second.segments] == ["prefill", "decode"]


async def test_an_evicted_session_is_computed_again_from_its_exact_ids():
    """Two slots, three sessions: the idle one loses its slot, and goes on as if it had not."""

    async def turns(slots, exact):
        async with Opened(slots=slots, exact=exact) as engine:
            contexts = {name: [*PROMPT, place] for place, name in enumerate("abc", 50)}
            for turn in range(3):
                for name, context in contexts.items():
                    done = await engine.generate(request(context, session=name, seed=turn, n=4))
                    contexts[name] = [*context, *ids(done), 70 + turn]
            return contexts, engine.stats().replayed_tokens

    for exact in (False, True):
        roomy, none = await turns(3, exact)
        tight, replayed = await turns(2, exact)
        assert none == 0
        assert replayed > 0
        assert roomy == tight


async def test_pause_stops_at_a_token_and_resume_goes_on_without_prefill():
    policy = FakePolicy()
    async with Opened(policy) as engine:
        whole = await engine.generate(request(seed=9, n=40))
    async with Opened(policy) as engine:
        task = asyncio.create_task(engine.generate(request(seed=9, n=40)))
        while engine.stats().sampled_tokens < 5:
            await asyncio.sleep(0)
        await engine.pause()
        frozen = engine.stats().sampled_tokens
        await asyncio.sleep(0.02)
        assert engine.stats().sampled_tokens == frozen
        assert not task.done()
        await engine.resume()
        cut = await task
        stats = engine.stats()
    assert ids(cut) == ids(whole)
    assert stats.prefill_tokens == len(PROMPT)
    assert stats.paused_s > 0
    assert [s.kind for s in cut.segments] == ["prefill", "decode", "decode"]
    assert [s.interrupted for s in cut.segments] == [False, True, False]
    assert cut.segments[1].end == cut.segments[2].start == len(PROMPT) + frozen


@pytest.mark.parametrize("cache", ["keep", "replay"])
async def test_new_weights_stamp_versions_and_keep_or_replay_the_cache(cache):
    policy, newer = FakePolicy(seed=0), FakePolicy(seed=1).module.state_dict()
    async with Opened(policy) as engine:
        task = asyncio.create_task(engine.generate(request(seed=9, n=40)))
        while engine.stats().sampled_tokens < 5:
            await asyncio.sleep(0)
        await engine.pause()
        await engine.update_weights(newer, 3, cache=cache)
        await engine.resume()
        done = await task
    versions = [token.version for token in done.tokens]
    assert versions == sorted(versions)
    assert set(versions) == {0, 3}
    assert engine.version == 3
    last = done.segments[-1]
    assert (last.kind, last.version) == ("decode", 3)
    cut = len(PROMPT) + versions.count(0)
    if cache == "keep":
        assert last.kv_version == 0
        assert [s.kind for s in done.segments] == ["prefill", "decode", "decode"]
    else:
        assert last.kv_version == 3
        replay = done.segments[2]
        assert (replay.kind, replay.start, replay.end, replay.window_hit) == ("replay", 0, cut - 1, False)
        # with the whole context computed anew, the rest is what the new policy would have said
        fresh = FakePolicy(seed=1)
        async with Opened(fresh) as engine:
            again = await engine.generate(
                request(
                    [*PROMPT, *ids(done)[: versions.count(0)]],
                    seed=9,
                    n=versions.count(3),
                    chunks=(len(PROMPT),),
                )
            )
        assert ids(again) == ids(done)[versions.count(0) :]


async def test_prompts_under_new_weights_never_read_an_old_prefix():
    policy = FakePolicy(seed=0)
    async with Opened(policy) as engine:
        await engine.generate(request(seed=1, prefix=len(PROMPT)))
        await engine.update_weights(FakePolicy(seed=1).module.state_dict(), 1)
        after = await engine.generate(request(seed=1, prefix=len(PROMPT)))
    async with Opened(FakePolicy(seed=1)) as engine:
        assert ids(after) == ids(await engine.generate(request(seed=1)))


async def test_abort_gives_the_partial_completion_and_a_second_engine_goes_on():
    async with Opened() as engine:
        whole = await engine.generate(request(seed=4, n=30))
    async with Opened() as engine:
        task = asyncio.create_task(engine.generate(request(seed=4, n=30, session="s")))
        while engine.stats().sampled_tokens < 7:
            await asyncio.sleep(0)
        await engine.pause("abort")
        part = await task
    assert part.finish == "abort"
    async with Opened(exact=True) as engine:
        rest = await engine.generate(
            request([*PROMPT, *ids(part)], seed=4, n=30 - len(part.tokens), chunks=(len(PROMPT),))
        )
        assert rest.segments[0].kind == "replay"
    assert ids(part) + ids(rest) == ids(whole)


async def test_drain_finishes_what_runs_and_holds_back_what_waits():
    async with Opened(slots=1) as engine:
        running = asyncio.create_task(engine.generate(request(seed=1, n=20)))
        while engine.stats().sampled_tokens < 2:
            await asyncio.sleep(0)
        waiting = asyncio.create_task(engine.generate(request(seed=2, n=3)))
        await asyncio.sleep(0)
        await engine.pause("drain")
        assert running.done()
        assert not waiting.done()
        await engine.resume()
        assert len((await waiting).tokens) == 3


async def test_more_requests_than_slots_all_finish():
    async with Opened(slots=3, prefill_tokens=25, compute="thread") as engine:
        done = await asyncio.gather(*(engine.generate(request(seed=seed)) for seed in range(10)))
        stats = engine.stats()
    assert len(done) == 10
    assert stats.finished["length"] == 10
    assert 0 < stats.utilisation <= 1
    assert stats.busy_s <= stats.available_s


async def test_cancelling_one_request_leaves_the_others():
    async with Opened(slots=2) as engine:
        alone = await engine.generate(request(seed=2, n=20))
        doomed = asyncio.create_task(engine.generate(request(seed=1, n=100, session="d")))
        other = asyncio.create_task(engine.generate(request(seed=2, n=20)))
        while engine.stats().sampled_tokens < 25:
            await asyncio.sleep(0)
        doomed.cancel()
        assert ids(await other) == ids(alone)
        again = await engine.generate(request(seed=1, n=5, session="d"))
        assert len(again.tokens) == 5


async def test_giving_up_while_the_network_computes_harms_nobody():
    """The worker thread is inside the cache when a caller leaves; its slot goes to the next one."""
    policy = FakePolicy()
    entered, leave = threading.Event(), threading.Event()
    async with Opened(policy) as engine:
        alone = await engine.generate(request(seed=2))
    async with Opened(policy, slots=2, compute="thread") as engine:
        extend = policy.cache.extend

        def slow(slots, tokens):
            entered.set()
            assert leave.wait(5)
            return extend(slots, tokens)

        policy.cache.extend = slow
        doomed = asyncio.create_task(engine.generate(request(seed=1, session="d", prefix=len(PROMPT))))
        other = asyncio.create_task(engine.generate(request(seed=2)))
        await asyncio.to_thread(entered.wait, 5)
        doomed.cancel()
        await asyncio.sleep(0)
        engine.release("d")
        third = asyncio.create_task(engine.generate(request(seed=2)))
        leave.set()
        assert ids(await other) == ids(await third) == ids(alone)


async def test_logits_that_are_not_finite_fail_one_request_only():
    class Poisoned(FakePolicy):
        def open_cache(self, slots, max_tokens):
            cache = super().open_cache(slots, max_tokens)
            extend = cache.extend

            def poisoned(slots, tokens):
                rows = extend(slots, tokens)
                for row, piece in zip(rows, tokens, strict=True):
                    if 99 in piece:
                        row.fill_(float("nan"))
                return rows

            cache.extend = poisoned
            return cache

    async with Opened(Poisoned()) as engine:
        bad, good = await asyncio.gather(
            engine.generate(request([99, 98], seed=1)),
            engine.generate(request(seed=1)),
            return_exceptions=True,
        )
    assert isinstance(bad, RequestError)
    assert bad.kind == "not_finite"
    assert len(good.tokens) == 12


async def test_a_broken_engine_tells_everybody():
    policy = FakePolicy()
    async with Opened(policy, slots=1) as engine:
        policy.cache.extend = lambda slots, tokens: 1 / 0
        results = await asyncio.gather(
            *(engine.generate(request(seed=seed)) for seed in range(2)), return_exceptions=True
        )
        assert all(isinstance(result, EngineError) for result in results)
        with pytest.raises(EngineError, match="division by zero"):
            await engine.generate(request())


async def test_top_p_records_what_it_kept_and_renormalises():
    async with Opened(FakePolicy(sharpness=1.0)) as engine:
        done = await engine.generate(request(seed=5, top_p=0.5, n=8))
    kept = [token.kept for token in done.tokens]
    assert all(token.id in token.kept for token in done.tokens)
    assert all(0 < len(ids) < 128 for ids in kept)
    assert all(a < b for ids in kept for a, b in itertools.pairwise(ids))


async def test_greedy_is_certain():
    async with Opened() as engine:
        first = await engine.generate(request(temperature=0, seed=1))
        second = await engine.generate(request(temperature=0, seed=2))
    assert ids(first) == ids(second)
    assert {token.logprob for token in first.tokens} == {0.0}


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_a_session_says_what_it_says_alone(seed):
    """Three-turn sessions among random pauses, replays of all caches, evictions and callers that give up."""
    policy, random = FakePolicy(), Random(seed)
    weights = {name: value.clone() for name, value in policy.module.state_dict().items()}

    def turn_of(number, context, turn):
        return request(context, seed=number, n=5, session=f"s{number}", prefix=0 if turn else len(PROMPT))

    async def alone(number):
        async with Opened(slots=1, prefix_slots=1) as engine:
            context = list(PROMPT)
            for turn in range(3):
                done = await engine.generate(turn_of(number, context, turn))
                context += [*ids(done), 70 + turn]
            return context

    async def troubled(engine, number):
        context = list(PROMPT)
        for turn in range(3):
            while True:
                task = asyncio.create_task(engine.generate(turn_of(number, context, turn)))
                if random.random() < 0.3:
                    await asyncio.sleep(random.random() * 0.004)
                    if not task.done():
                        task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    break
            context += [*ids(task.result()), 70 + turn]
            await asyncio.sleep(random.random() * 0.003)
        engine.release(f"s{number}")
        return context

    async def disturb(engine):
        while True:
            await asyncio.sleep(random.random() * 0.004)
            await engine.pause()
            if random.random() < 0.5:
                cache = random.choice(["keep", "replay"])
                await engine.update_weights(weights, engine.version + 1, cache=cache)
            await asyncio.sleep(random.random() * 0.002)
            await engine.resume()

    settings = {"slots": 4, "prefix_slots": 1, "prefill_tokens": 30, "compute": "thread"}
    async with Opened(policy, **settings) as engine:
        trouble = asyncio.create_task(disturb(engine))
        found = await asyncio.gather(*(troubled(engine, number) for number in range(10)))
        trouble.cancel()
        await asyncio.wait([trouble])
        assert engine.stats().replayed_tokens > 0
    assert found == [await alone(number) for number in range(10)]
