"""RL on the real engine and the real asynchronous service, with a tiny network."""

from __future__ import annotations

import pytest

from catalog.jsonl import read_lines
from catalog.models import Verdict
from model.train_config import OptimizerConfig
from rl.config import EffortConfig, RlConfig
from rl.train import train
from rollout.agents.base import Outcome
from rollout.agents.effort import effort_line
from rollout.config import EngineConfig, ServiceConfig
from rollout.handover import samples_from
from rollout.native import NativeEngine
from rollout.samples import Speaker
from rollout.service import RolloutService
from rollout.session import ToolReply
from tests.rollout.fakes import Characters, Chat, make_task
from tests.training import tiny


class Letters:
    """Two turns with a tool between them; the reward is the share of characters with an even code."""

    name = "letters"
    fresh = False

    async def run(self, task, session) -> Outcome:
        await session.say(("system", effort_line(session.spec.effort)), ("user", f"Even letters, {task.id}."))
        first = await session.act(6)

        async def tool(key: str) -> ToolReply:
            return ToolReply(f"{len(first.text)} letters")

        reply = await session.call("count", {"text": first.text}, tool)
        await session.say(("tool", reply.result))
        text = first.text + (await session.act(4)).text
        return Outcome(Verdict(reward=sum(ord(c) % 2 == 0 for c in text) / max(1, len(text))))


async def run_rl(tmp_path, config, service, *, exact=False):
    engine = NativeEngine(
        tiny.policy(), EngineConfig(slots=8, prefix_slots=2, max_tokens=160, exact=exact, compute="inline")
    )
    speaker = Speaker(engine, Chat(), Characters(), "flash-tiny")
    tasks = [make_task(f"task{i}") for i in range(6)]

    def make(trained: int) -> RolloutService:
        return RolloutService(
            speaker, Letters(), lambda i: tasks[i % 6], folder=tmp_path / "rollout", run_id="rl",
            config=service, trained=trained, sync="never",
        )  # fmt: skip

    try:
        return await train(config, tiny.policy(), samples_from(engine, make), run=tmp_path / "rl")
    finally:
        await engine.close()


CONFIG = RlConfig(
    steps=4,
    micro_tokens=1024,
    call_tokens={"count": 5.0},
    effort=EffortConfig(efforts=(50, 100), k0=0.05, length_norm=50),
    optimizer=OptimizerConfig(kind="adamw", lr=3e-3, weight_decay=0.0, eps=1e-8),
)


async def test_asynchronous_run_on_the_real_service(tmp_path):
    service = ServiceConfig(in_flight=12, batch_prompts=1, samples=3, efforts=(50, 100), max_staleness=2)
    result = await run_rl(tmp_path, CONFIG, service)
    lines = list(read_lines(tmp_path / "rl" / "metrics.jsonl"))
    assert result.steps == len(lines) == 4
    for line in lines:
        assert line["mismatch_max"] < 1e-4
        assert line["max_staleness"] <= 2
        assert line["subgroups"] == 2
        assert line["length_50"] > 5
    assert sum(line["same_tokens"] for line in lines) > 20
    assert max(line["off_policy_ratio"] for line in lines) > 0, "nothing ran while weights were trained"
    assert sum(line["updates"] for line in lines) >= 3


async def test_deterministic_run_goes_on_where_it_stopped(tmp_path):
    service = ServiceConfig(
        in_flight=6, batch_prompts=1, samples=3, efforts=(50, 100), max_staleness=0, deterministic=True
    )
    config = CONFIG.model_copy(update={"steps": 3})
    whole = await run_rl(tmp_path / "whole", config, service, exact=True)

    class Stopped(Exception):
        pass

    async def stop_before_publishing(self, weights, version):
        if version == 2:
            raise Stopped
        await publish(self, weights, version)

    publish = RolloutService.publish
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutService, "publish", stop_before_publishing)
        with pytest.raises(Stopped):
            await run_rl(tmp_path / "cut", config, service, exact=True)
    again = await run_rl(tmp_path / "cut", config, service, exact=True)
    assert again.steps == 3
    left, right = (tiny.FlashPolicy.open(r.policy) for r in (whole, again))
    assert tiny.weights_equal(left, right)
    ids = [t["id"] for t in read_lines(tmp_path / "cut" / "rollout" / "trajectories.jsonl") if "id" in t]
    assert len(ids) == len(set(ids)) == 18
