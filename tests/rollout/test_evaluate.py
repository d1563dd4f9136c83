"""Evaluation: fresh verdicts, every draw once, resumption."""

import pytest

from catalog.models import Verdict
from rollout.agents.base import AgentFailure, Outcome
from rollout.evaluate import EvaluationConfig, evaluate
from rollout.samples import Speaker
from tests.rollout.fakes import Characters, Chat, ScriptedEngine, make_task

TASKS = [make_task(str(number)) for number in range(6)]


class Guess:
    name = "guess"

    def __init__(self, *, fresh=True, broken=()):
        self.fresh, self.broken = fresh, broken
        self.ran = []

    async def run(self, task, session):
        self.ran.append(session.spec.id)
        if task.id in self.broken:
            raise AgentFailure("broken", "no image")
        await session.say(("user", task.id))
        act = await session.act(30)
        return Outcome(Verdict(reward=float(act.text == "yes")))


async def run(tmp_path, agent, *, progress=None, **settings):
    def script(request, turn):
        return "yes" if request.seed % 2 else "no"

    speaker = Speaker(ScriptedEngine(script), Chat(), Characters(), "fake")
    config = EvaluationConfig(**{"samples": 4, "in_flight": 3, **settings})
    return await evaluate(
        TASKS, speaker, agent, folder=tmp_path, run_id="eval", config=config, progress=progress
    )


async def test_rates_and_intervals(tmp_path):
    agent, heard = Guess(broken={"task-5"}), []
    done = await run(tmp_path, agent, progress=lambda *counts: heard.append(counts))
    assert heard == [(n, 24) for n in range(1, 25)]
    assert len(agent.ran) == 24
    assert list(done.trajectories) == [task.id for task in TASKS]
    assert done.failed == 4
    assert set(done.rates) == {f"task-{n}" for n in range(5)}
    assert 0 < sum(done.rates.values()) / 5 < 1
    estimate = done.estimate({task.id: task.id for task in TASKS})
    assert estimate.n == 5
    assert estimate.low <= estimate.mean <= estimate.high
    with pytest.raises(ValueError, match="give clusters"):
        done.estimate()
    assert done.summary()["draws"] == 24
    single = await run(tmp_path / "single", Guess(), samples=1)
    assert single.estimate().n == 6


async def test_finished_draws_are_not_drawn_again(tmp_path):
    first = await run(tmp_path, Guess())
    again = Guess()
    second = await run(tmp_path, again)
    assert again.ran == []
    assert second == first


async def test_an_agent_that_reads_caches_is_refused(tmp_path):
    with pytest.raises(ValueError, match="fresh=True"):
        await run(tmp_path, Guess(fresh=False))


async def test_a_fault_of_code_ends_the_evaluation(tmp_path):
    class Faulty(Guess):
        async def run(self, task, session):
            raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        await run(tmp_path, Faulty())
