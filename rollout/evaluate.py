"""Pass rates of a policy on tasks: k samples each, every verdict made anew.

Evaluation runs through the same sessions, journal and agents as training, so a killed evaluation goes on
where it was. It never reads a cache of verdicts: the agent must have been made with `fresh=True`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import PositiveFloat, PositiveInt

from catalog.models import Task
from catalog.trajectory import Trajectory
from rollout.agents.base import Agent
from rollout.config import SamplingConfig, Settings
from rollout.journal import SyncPolicy
from rollout.samples import SampleRunner, Speaker, sample_seed
from rollout.session import SampleSpec
from rollout.statistics import Estimate, clustered_mean, pass_rate


class EvaluationConfig(Settings):
    """How often and how each task is sampled."""

    samples: PositiveInt = 1
    """Draws a task (k)."""
    effort: int | None = None
    in_flight: PositiveInt = 32
    sample_timeout_s: PositiveFloat = 600.0
    sampling: SamplingConfig = SamplingConfig()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All draws of one evaluation, by task id in the order of the tasks."""

    trajectories: dict[str, tuple[Trajectory, ...]]

    @property
    def rates(self) -> dict[str, float]:
        """Mean reward per task over its judged draws; tasks without one are missing."""
        judged = {
            task: [draw.reward for draw in draws if draw.reward is not None]
            for task, draws in self.trajectories.items()
        }
        return {task: sum(rewards) / len(rewards) for task, rewards in judged.items() if rewards}

    @property
    def failed(self) -> int:
        """Draws that ended in an infrastructure failure; they count as neither passed nor failed."""
        return sum(draw.reward is None for draws in self.trajectories.values() for draw in draws)

    def estimate(self, clusters: Mapping[str, Hashable] | None = None, *, seed: int = 0) -> Estimate:
        """Pass rate with its interval: over clusters if given, else Wilson's on one draw a task."""
        rates = self.rates
        if clusters is not None:
            return clustered_mean(rates, clusters, seed=seed)
        if any(len(draws) > 1 for draws in self.trajectories.values()):
            raise ValueError("several draws a task are not independent: give clusters")
        return pass_rate([rate == 1.0 for rate in rates.values()])

    def summary(self) -> dict[str, Any]:
        """Means over draws, for a table."""
        draws = [draw for many in self.trajectories.values() for draw in many]
        n = max(1, len(draws))
        return {
            "tasks": len(self.trajectories),
            "draws": len(draws),
            "failed": self.failed,
            "truncated": sum(draw.truncated for draw in draws),
            "repercussions": sum(draw.repercussion for draw in draws),
            "sampled_tokens_mean": sum(draw.sampled_tokens for draw in draws) / n,
            "tool_calls_mean": sum(len(draw.tool_calls) for draw in draws) / n,
        }


async def evaluate(
    tasks: Sequence[Task],
    speaker: Speaker,
    agent: Agent,
    *,
    folder: Path,
    run_id: str,
    config: EvaluationConfig,
    sync: SyncPolicy = "never",
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Sample every task `config.samples` times. Raises what is no failure of one sample, at once.

    Args:
        progress: hears (draws finished, draws in all) after each draw.
    """
    if not agent.fresh:
        raise ValueError("evaluation needs an agent made with fresh=True: cached verdicts are not evidence")
    runner = SampleRunner(folder, speaker, agent, sampling=config.sampling, sync=sync)
    room = asyncio.Semaphore(config.in_flight)

    async def draw(place: int, task: Task, sample: int) -> Trajectory:
        spec = SampleSpec(
            run_id=run_id,
            prompt=place,
            sample=sample,
            task_id=task.id,
            effort=config.effort,
            seed=sample_seed(config.seed, place, sample),
            group_size=config.samples,
        )
        async with room:
            timer = asyncio.get_running_loop().call_later(config.sample_timeout_s, runner.expire, spec.id)
            try:
                trajectory = await runner.run(spec, task)
            finally:
                timer.cancel()
        if progress:
            progress(len(runner.log), len(tasks) * config.samples)
        return trajectory

    try:
        async with asyncio.TaskGroup() as group:
            draws = {
                task.id: [group.create_task(draw(place, task, sample)) for sample in range(config.samples)]
                for place, task in enumerate(tasks)
            }
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    finally:
        runner.close()
    return Evaluation({task: tuple(d.result() for d in many) for task, many in draws.items()})
