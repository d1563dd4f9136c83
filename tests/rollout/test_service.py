"""The service: dispatch, batches, staleness, preemption, failures, watchdog, resumption."""

import asyncio
import itertools
from collections import Counter

import pytest

from catalog.models import Failure, Verdict
from rollout.agents.base import AgentFailure, Outcome
from rollout.config import EngineConfig, ServiceConfig
from rollout.engine import EngineError
from rollout.native import NativeEngine
from rollout.samples import Speaker
from rollout.service import (
    PromptsExhausted,
    RolloutError,
    RolloutService,
    RolloutStalled,
    RolloutUnhealthy,
)
from sandbox.base import SandboxLost
from tests.rollout.fakes import Characters, Chat, FakePolicy, ScriptedEngine, make_task

TASKS = [make_task(str(number)) for number in range(5)]


def order(prompt):
    return TASKS[prompt % len(TASKS)]


class Talker:
    """One turn; reward 1 if it began with `g`. `behave(session)` runs first."""

    name = "talker"
    fresh = True

    def __init__(self, behave=None, limit=40):
        self.behave, self.limit = behave, limit
        self.started = Counter()

    async def run(self, task, session):
        self.started[session.spec.id] += 1
        if self.behave:
            await self.behave(session)
        await session.say(("user", task.id))
        act = await session.act(self.limit)
        return Outcome(Verdict(reward=float(act.text.startswith("g"))))


def scripted(lengths=lambda request, turn: "good", **options):
    return ScriptedEngine(lengths, **options)


def service(tmp_path, engine, agent=None, *, order=order, trained=0, run="run", **settings):
    defaults = {"in_flight": 8, "batch_prompts": 2, "samples": 2}
    config = ServiceConfig(**{**defaults, **settings})
    speaker = Speaker(engine, Chat(), Characters(), "fake")
    return RolloutService(
        speaker,
        agent or Talker(),
        order,
        folder=tmp_path / "run",
        run_id=run,
        config=config,
        trained=trained,
    )


async def train(rollout, steps):
    for version in range(1, steps + 1):
        await rollout.next_batch()
        await rollout.publish({}, version)


async def test_a_loop_of_one_page_trains_on_whole_groups(tmp_path):
    engine = scripted()
    async with service(tmp_path, engine, efforts=(25, 100), in_flight=16) as rollout:
        for step in range(1, 4):
            batch = await rollout.next_batch()
            assert batch.number == step
            assert not engine.running.is_set()  # training has the device
            subgroups = Counter((t.group, t.effort) for t in batch.trajectories)
            assert set(subgroups.values()) == {2}
            assert len(batch.trajectories) == len(batch.masks) == 8
            for trajectory, mask in zip(batch.trajectories, batch.masks, strict=True):
                assert mask == trajectory.sampled
            assert batch.metrics["reward_mean"] == 1.0
            await rollout.publish({"step": step}, step)
            assert engine.running.is_set()
        assert engine.loaded == [{"step": 1}, {"step": 2}, {"step": 3}]
    ids = [t.id for t in batch.trajectories]
    assert len(set(ids)) == 8


async def test_the_bound_on_samples_in_flight_holds_and_slow_samples_hold_up_nobody(tmp_path):
    """Prompt 0 has one endless sample; all others go on and batches fill without it."""
    release = asyncio.Event()

    async def behave(session):
        if session.spec.id.endswith("p00000-s00"):
            await release.wait()

    engine = scripted(delay=0.001)
    async with service(tmp_path, engine, Talker(behave), in_flight=6, max_staleness=4) as rollout:
        seen = []
        for version in range(1, 4):
            batch = await rollout.next_batch()
            seen += [t.group for t in batch.trajectories]
            assert rollout.in_flight <= 6
            await rollout.publish({}, version)
        assert "run-p00000" not in seen
        release.set()
        for version in range(4, 8):
            batch = await rollout.next_batch()
            seen += [t.group for t in batch.trajectories]
            await rollout.publish({}, version)
        assert "run-p00000" in seen
    assert engine.most_active <= 6


async def test_dispatch_counts_finished_samples_of_any_group(tmp_path):
    """A prompt of two starts when two samples have finished, though of different groups."""
    gates = {name: asyncio.Event() for name in ("p00000-s00", "p00000-s01", "p00001-s00", "p00001-s01")}

    async def behave(session):
        gate = gates.get(session.spec.id.removeprefix("run-"))
        if gate:
            await gate.wait()

    agent = Talker(behave)
    async with service(tmp_path, scripted(), agent, in_flight=4, max_staleness=8) as rollout:
        await asyncio.sleep(0.01)
        assert rollout.in_flight == 4
        gates["p00000-s00"].set()
        await asyncio.sleep(0.01)
        assert rollout.in_flight == 3
        assert not any("p00002" in id for id in agent.started)
        gates["p00001-s01"].set()
        await asyncio.sleep(0.01)
        assert {"run-p00002-s00", "run-p00002-s01"} <= agent.started.keys()


async def test_samples_in_flight_go_on_under_new_weights_and_stale_tokens_are_masked(tmp_path):
    """A long sample sees three publications; only its fresh enough tokens bear loss."""
    long = "x" * 30

    def script(request, turn):
        return long if "p00001-s00" in request.session else "good"

    engine = scripted(script, delay=0.002)
    options = {"in_flight": 8, "max_staleness": 1, "batch_prompts": 1}
    async with service(tmp_path, engine, **options) as rollout:
        version, stale = 0, None
        while stale is None:
            batch = await rollout.next_batch()
            version += 1
            for trajectory, mask in zip(batch.trajectories, batch.masks, strict=True):
                versions = trajectory.versions
                sampled = {v for v in versions if v is not None}
                for at, bears in zip(versions, mask, strict=True):
                    assert bears == (at is not None and batch.version - at <= 1)
                if len(sampled) > 2:
                    stale = (trajectory, mask, batch)
            await asyncio.sleep(0.005)
            await rollout.publish({}, version)
            assert version < 60
    trajectory, mask, batch = stale
    assert sum(mask) < trajectory.sampled_tokens
    assert max(batch.staleness) <= 1
    assert batch.metrics["masked_tokens"] > 0
    assert batch.metrics["max_staleness"] == max(batch.staleness)


async def test_a_sample_wholly_beyond_the_bound_is_dropped_and_counted(tmp_path):
    async def behave(session):
        if session.spec.id.endswith("p00000-s01"):
            await late.wait()

    late = asyncio.Event()
    options = {"batch_prompts": 1, "max_staleness": 1, "in_flight": 4}
    async with service(tmp_path, scripted(), Talker(behave), **options) as rollout:
        for version in (1, 2):
            assert (await rollout.next_batch()).dropped == ()
            await rollout.publish({}, version)
        late.set()
        dropped = []
        for version in range(3, 6):
            batch = await rollout.next_batch()
            dropped += batch.dropped
            assert all(t.id not in batch.dropped for t in batch.trajectories)
            await rollout.publish({}, version)
        assert "run-p00000-s00" in dropped
        assert rollout.counts["dropped_stale"] == len(dropped)


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5])
async def test_the_off_policy_ratio_of_every_batch_is_bounded(tmp_path, ratio):
    lengths = itertools.cycle([3, 30, 7, 12, 1, 22])

    def script(request, turn):
        return "g" * next(lengths)

    engine = scripted(script, delay=0.0005)
    options = {"off_policy_ratio": ratio, "max_staleness": 3, "in_flight": 16, "batch_prompts": 3}
    ratios, waits = [], 0.0
    async with service(tmp_path, engine, **options) as rollout:
        for version in range(1, 8):
            batch = await rollout.next_batch()
            ratios.append(batch.metrics["off_policy_ratio"])
            waits = batch.metrics["dispatch_waits"]
            await asyncio.sleep(0.003)
            await rollout.publish({}, version)
    assert max(ratios) <= ratio + 1e-9
    assert waits > 0
    if ratio == 0.5:
        assert max(ratios) > 0  # it is asynchronous, not merely bounded


async def test_infrastructure_failures_are_typed_and_kept_from_loss_and_baseline(tmp_path):
    async def behave(session):
        if session.spec.sample == 0:
            raise SandboxLost("the host took it")
        if session.spec.sample == 1:
            raise AgentFailure("no_candidates", "none")

    options = {"samples": 4, "batch_prompts": 1, "max_failure_share": 0.9}
    async with service(tmp_path, scripted(), Talker(behave), **options) as rollout:
        batch = await rollout.next_batch()
    assert [t.failure.boundary for t in batch.failed] == ["sandbox", "scaffold"]
    assert all(t.reward is None for t in batch.failed)
    assert len(batch.trajectories) == 2
    assert batch.metrics["reward_mean"] == 1.0
    assert rollout.counts["failed_sandbox"] >= 1


async def test_too_many_failures_stop_the_job(tmp_path):
    async def behave(session):
        raise SandboxLost("no disk")

    async with service(tmp_path, scripted(), Talker(behave), max_failure_share=0.5) as rollout:
        with pytest.raises(RolloutUnhealthy, match="no disk"):
            await train(rollout, 20)


async def test_an_unjudged_verdict_is_a_failure_too(tmp_path):
    class Unjudged(Talker):
        async def run(self, task, session):
            await super().run(task, session)
            failure = Failure(boundary="verifier", kind="crashed", message="m")
            return Outcome(Verdict(reward=None, failure=failure))

    async with service(tmp_path, scripted(), Unjudged(), max_failure_share=1.0) as rollout:
        batch = await rollout.next_batch()
    assert batch.trajectories == ()
    assert {t.failure.boundary for t in batch.failed} == {"verifier"}


async def test_a_fault_of_code_reaches_the_trainer(tmp_path):
    async def behave(session):
        if session.spec.prompt == 2:
            raise TypeError("a bug")

    async with service(tmp_path, scripted(), Talker(behave), max_staleness=5) as rollout:
        with pytest.raises(TypeError, match="a bug"):
            await train(rollout, 6)


async def test_a_dead_engine_reaches_the_trainer(tmp_path):
    policy = FakePolicy()
    engine = NativeEngine(policy, EngineConfig(slots=4, max_tokens=128, compute="inline"))
    policy.cache.extend = lambda slots, tokens: 1 / 0
    async with service(tmp_path, engine) as rollout:
        with pytest.raises(EngineError, match="division"):
            await asyncio.wait_for(rollout.next_batch(), 5)
    await engine.close()


async def test_no_progress_is_an_error_and_not_a_wait(tmp_path):
    async def behave(session):
        await asyncio.Event().wait()

    async with service(tmp_path, scripted(), Talker(behave), stall_s=0.1) as rollout:
        with pytest.raises(RolloutStalled, match="run-p00000-s00"):
            await asyncio.wait_for(rollout.next_batch(), 5)


async def test_an_overdue_sample_becomes_a_failure_and_its_group_completes(tmp_path):
    async def behave(session):
        if session.spec.sample == 0:
            await asyncio.Event().wait()

    options = {"sample_timeout_s": 0.1, "batch_prompts": 1, "max_failure_share": 0.9}
    async with service(tmp_path, scripted(), Talker(behave), **options) as rollout:
        batch = await asyncio.wait_for(rollout.next_batch(), 5)
    assert [(t.failure.boundary, t.failure.kind) for t in batch.failed] == [("budget", "deadline")]
    assert len(batch.trajectories) == 1


async def test_pauses_do_not_count_as_a_samples_time(tmp_path):
    engine = scripted(lambda request, turn: "g" * 20, delay=0.002)
    async with service(tmp_path, engine, sample_timeout_s=0.3, batch_prompts=1) as rollout:
        for version in range(1, 4):
            batch = await rollout.next_batch()
            assert batch.failed == ()
            await asyncio.sleep(0.4)
            await rollout.publish({}, version)


async def test_running_out_of_prompts_is_said(tmp_path):
    three = lambda prompt: TASKS[prompt] if prompt < 3 else None  # noqa: E731
    async with service(tmp_path, scripted(), order=three) as rollout:
        assert len((await rollout.next_batch()).trajectories) == 4
        with pytest.raises(PromptsExhausted, match="more tasks"):
            await asyncio.wait_for(rollout.next_batch(), 5)


async def test_a_batch_that_was_not_trained_on_is_handed_out_again_and_nothing_twice(tmp_path):
    """Killed after batch 2 was handed out, with batch 1 trained on."""
    first = service(tmp_path, scripted(delay=0.001))
    await first.__aenter__()
    one = await first.next_batch()
    await first.publish({}, 1)
    two = await first.next_batch()
    await first.close()

    agent = Talker()
    engine = scripted(version=1)
    async with service(tmp_path, engine, agent, trained=1) as rollout:
        again = await rollout.next_batch()
        assert again.number == 2
        assert again.trajectories == two.trajectories
        assert again.masks == two.masks
        assert again.version == two.version
        await rollout.publish({}, 2)
        three = await rollout.next_batch()
    assert three.number == 3
    ids = [t.id for batch in (one, again, three) for t in batch.trajectories]
    assert len(set(ids)) == len(ids)
    assert not {t.id for t in (*one.trajectories, *two.trajectories)} & agent.started.keys()
    lines = (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()
    assert len(lines) == len({line.split('"id":"')[1].split('"')[0] for line in lines})


async def test_changed_tasks_under_an_old_ledger_are_refused(tmp_path):
    async def behave(session):
        await asyncio.Event().wait()

    async with service(tmp_path, scripted(), Talker(behave)):
        await asyncio.sleep(0.01)
    with pytest.raises(RolloutError, match="the tasks changed"):
        await service(tmp_path, scripted(), order=lambda prompt: make_task("other")).__aenter__()


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="raise in_flight"):
        ServiceConfig(in_flight=3, samples=4)
    with pytest.raises(ValueError, match="differ"):
        ServiceConfig(efforts=(50, 50))


async def test_deterministic_mode_needs_an_exact_engine(tmp_path):
    engine = scripted()
    engine.exact = False
    with pytest.raises(ValueError, match="exact=True"):
        service(tmp_path, engine, deterministic=True)
