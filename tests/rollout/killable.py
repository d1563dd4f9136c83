"""A tiny training job that may be killed: `python -m tests.rollout.killable FOLDER STEPS MODE`.

The weights after a step depend on every token, log-probability and reward of its batch, so two runs have
the same final table only if all their trajectories were the same. Each executed tool call appends a line
to `executed.txt`, each optimizer step one to the checkpoint's table.
"""

import asyncio
import hashlib
import json
import os
import sys
from pathlib import Path

from catalog.atomic import write_atomic
from catalog.models import Verdict
from rollout.agents.base import Outcome
from rollout.config import EngineConfig, ServiceConfig
from rollout.native import NativeEngine
from rollout.samples import Speaker
from rollout.service import RolloutService
from rollout.session import ToolReply
from tests.rollout.fakes import Characters, Chat, FakePolicy, make_task

TASKS = [make_task(str(number)) for number in range(7)]


class Worker:
    """Three turns with tools between; each tool call takes a moment and leaves a line."""

    name = "worker"
    fresh = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def run(self, task, session):
        await session.say(("user", f"do {task.id}"))
        score = 0
        for _ in range(3):
            act = await session.act(8)
            score += sum(map(ord, act.text))

            async def tool(key, text=act.text):
                await asyncio.sleep(0.005)
                with open(self.folder / "executed.txt", "a") as file:
                    file.write(key + "\n")
                return ToolReply(f"{len(text)}")

            reply = await session.call("measure", {"text": act.text}, tool)
            await session.say(("tool", reply.result))
        return Outcome(Verdict(reward=float(score % 2)))


async def main(folder: Path, steps: int, deterministic: bool) -> None:
    checkpoint = folder / "checkpoint.json"
    state = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"seed": 0, "table": [], "ids": []}
    engine = NativeEngine(
        FakePolicy(state["seed"]),
        EngineConfig(slots=8, max_tokens=256, exact=deterministic),
        version=len(state["table"]),
    )
    config = ServiceConfig(in_flight=8, batch_prompts=2, samples=3, deterministic=deterministic, seed=5)
    rollout = RolloutService(
        Speaker(engine, Chat(), Characters(), "fake"),
        Worker(folder),
        lambda prompt: TASKS[prompt % len(TASKS)],
        folder=folder / "rollout",
        run_id="run",
        config=config,
        trained=len(state["table"]),
    )
    async with rollout:
        while len(state["table"]) < steps:
            batch = await rollout.next_batch()
            facts = [[t.id, t.token_ids, t.logprobs, t.versions, t.reward] for t in batch.trajectories]
            digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
            state["table"].append(digest)
            state["ids"] += [t.id for t in batch.trajectories]
            state["seed"] = int(digest[:6], 16)
            write_atomic(checkpoint, json.dumps(state).encode())
            await rollout.publish(FakePolicy(state["seed"]).module.state_dict(), len(state["table"]))
            await asyncio.sleep(0)
    await engine.close()
    write_atomic(folder / "done.json", json.dumps(state["table"]).encode())


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "deterministic"))
