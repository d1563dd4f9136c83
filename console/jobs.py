"""Jobs in which a policy acts on tasks: one way for the commands and for the demo.

Each goes on in its run folder where a killed one left it, and at its end enters the run and its trajectories
into the catalog. `start` is the policy to begin with where that is not the one that the settings name: a run
folder remembers its settings, and must not depend on where another run lies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from catalog.models import Task
    from console.job_settings import EvaluateJob, OpdJob, RlJob
    from console.workshop import Workshop
    from model.training import TrainResult
    from opd.data import DomainOf
    from rollout.config import ServiceConfig
    from rollout.evaluate import Evaluation
    from rollout.handover import OpenSamples
    from rollout.samples import Speaker


async def reinforce(
    workshop: Workshop, job: RlJob, tasks: Sequence[Task], run: Path, *, start: str | None = None
) -> TrainResult:
    """Asynchronous RL on the tasks."""
    from console.runs import record
    from console.workshop import open_speaker
    from model.policy import load_policy
    from rl.train import train

    start = start or job.train.policy
    async with open_speaker(start, job.engine) as speaker:
        samples = _samples(workshop, speaker, job, job.resolved_service(), tasks, run)
        result = await train(job.train, load_policy(start), samples, run=run)
    record(workshop.catalog, run)
    return result


async def distil(
    workshop: Workshop,
    job: OpdJob,
    tasks: Sequence[Task],
    run: Path,
    *,
    domain_of: DomainOf,
    start: str | None = None,
) -> TrainResult:
    """On-policy distillation on the tasks. `domain_of` names a sample's domain, which picks its teachers."""
    from console.runs import record
    from console.workshop import open_speaker
    from model.policy import load_policy
    from opd.train import train

    start = start or job.train.policy
    async with open_speaker(start, job.engine) as speaker:
        samples = _samples(workshop, speaker, job, job.service, tasks, run)
        result = await train(job.train, load_policy(start), samples, run=run, domain_of=domain_of)
    record(workshop.catalog, run)
    return result


async def measure(
    workshop: Workshop, job: EvaluateJob, tasks: Sequence[Task], run: Path, *, start: str | None = None
) -> Evaluation:
    """Draws of the policy on the tasks, every verdict made anew. The run's summary has the pass rate."""
    from catalog.models import RunKind
    from catalog.runs import RunFolder
    from console.runs import record
    from console.workshop import open_speaker
    from rollout.evaluate import evaluate

    resolved, seed = job.model_dump(mode="json"), job.evaluation.seed
    with RunFolder.open(run, kind=RunKind.EVALUATION, config=resolved, seed=seed, resume=True) as folder:
        agent = workshop.agent(job.agent, fresh=True, bash=job.bash)
        name = job.policy if start else None
        async with open_speaker(start or job.policy, job.engine, name=name) as speaker:
            found = await evaluate(
                tasks, speaker, agent, folder=run / "rollout", run_id=folder.run.id, config=job.evaluation
            )
        summary: dict[str, Any] = found.summary()
        if found.rates:
            # Tasks of one function resemble each other: they are resampled together.
            clusters = {task.id: (task.origin.path, task.origin.function) for task in tasks}
            rate = found.estimate(clusters, seed=seed)
            summary |= {"rate": rate.mean, "low": rate.low, "high": rate.high, "n": len(found.rates)}
        folder.finish(summary)
    record(workshop.catalog, run)
    return found


def _samples(
    workshop: Workshop,
    speaker: Speaker,
    job: RlJob | OpdJob,
    service: ServiceConfig,
    tasks: Sequence[Task],
    run: Path,
) -> OpenSamples:
    """How the trainer starts the rollout service at the place where its checkpoint stands."""
    from catalog.runs import read_run
    from console.workshop import epochs
    from rollout.handover import samples_from
    from rollout.service import RolloutService

    agent = workshop.agent(job.agent, fresh=False, bash=job.bash)

    def make(trained: int) -> RolloutService:
        return RolloutService(
            speaker,
            agent,
            epochs(tasks, service.seed),
            folder=run / "rollout",
            run_id=read_run(run).id,
            config=service,
            trained=trained,
        )

    return samples_from(speaker.engine, make)
