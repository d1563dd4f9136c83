"""The native engine over the real network: what it samples is what a trainer rebuilds."""

import asyncio

import pytest
import torch

from model.batch import Sequence, pack
from model.policy import load_policy, replay_start
from rollout.config import EngineConfig, SamplingConfig
from rollout.engine import Request
from rollout.native import NativeEngine
from rollout.session import SampleSpec, Session

PROMPT = "def middle(items):\n    return items[len(items) // 2]\n" * 9
"""More tokens than the decoder's window, so that its bounded replay matters."""


@pytest.fixture(scope="module")
def policy():
    torch.set_num_threads(2)
    policy = load_policy("flash-nano", seed=3)
    policy.module.eval()
    return policy


def session_of(policy, engine, sample=0, group_size=1):
    spec = SampleSpec("r", 0, sample, "t", None, seed=sample, group_size=group_size)
    return Session(spec, engine, policy.chat, policy.tokenizer, sampling=SamplingConfig(temperature=0.9))


async def converse(policy, engine, sample=0, group_size=1, cut=None):
    session = session_of(policy, engine, sample, group_size)
    await session.say(("user", PROMPT))
    await session.act(6)
    if cut:
        await cut()
    await session.say(("tool", "2 fails: ValueError"))
    await session.act(6)
    return session.trajectory(agent="a", policy=policy.name)


def recomputed(policy, trajectory):
    """Log-probabilities of the sampled tokens as a trainer computes them."""
    first = next(segment for segment in trajectory.segments if segment.kind == "prefill")
    sequence = Sequence(trajectory.token_ids, replay_start(first.end))
    (batch,) = pack([sequence], 1024)
    with torch.no_grad():
        hidden = policy.hidden(batch)[0]
    logprobs = torch.log_softmax((hidden @ policy.head().detach().T).float() / trajectory.temperature, dim=-1)
    return {
        place: float(logprobs[place - 1, trajectory.token_ids[place]])
        for place, sampled in enumerate(trajectory.sampled)
        if sampled
    }


def assert_rebuilt(policy, trajectory):
    for place, logprob in recomputed(policy, trajectory).items():
        assert trajectory.logprobs[place] == pytest.approx(logprob, abs=2e-3), place


async def test_logprobs_equal_the_trainers_alone_forked_and_batched(policy):
    engine = NativeEngine(policy, EngineConfig(slots=6, max_tokens=512))
    alone = await converse(policy, engine)
    assert alone.segments[0].end > 128
    assert_rebuilt(policy, alone)
    group = await asyncio.gather(*(converse(policy, engine, n, group_size=5) for n in range(1, 6)))
    assert engine.stats().forked_tokens == 5 * alone.segments[0].end
    for trajectory in group:
        assert_rebuilt(policy, trajectory)
    await engine.close()


async def test_loss_of_the_cache_and_pauses_do_not_change_what_is_said(policy):
    whole_engine = NativeEngine(policy, EngineConfig(slots=1, max_tokens=512, exact=True))
    whole = await converse(policy, whole_engine, 7)
    await whole_engine.close()
    for exact in (True, False):
        engine = NativeEngine(policy, EngineConfig(slots=1, max_tokens=512, exact=exact))

        async def cut(engine=engine):
            await engine.pause()
            await engine.update_weights(policy.module.state_dict(), 0, cache="replay")
            await engine.resume()
            # one slot: another session takes it, so the first one is computed again in any case
            await engine.generate(Request((20, 21, 22), 2, session="other"))

        again = await converse(policy, engine, 7, cut=cut)
        stats = engine.stats()
        await engine.close()
        assert stats.replayed_tokens > whole.segments[0].end
        assert again.token_ids == whole.token_ids
        assert_rebuilt(policy, again)
        if exact:
            assert again.logprobs == whole.logprobs
