"""`posttrain train`: supervised, by reinforcement, or by distillation.

    posttrain train sft runs/sft --trajectories runs/eval/rollout
    posttrain train rl runs/rl --config examples/rl.toml --train.steps 40
    posttrain train opd runs/opd --config examples/opd.toml --dry-run

A run that was killed goes on with the same command.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from console.session import InSession, Session, print_table

if TYPE_CHECKING:
    from pydantic import BaseModel

    from console.job_settings import OpdJob, RlJob, SftJob

app = App(name="train", help="Turn trajectories and tasks into new weights.")

Overrides = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]
"""Tokens such as `--train.steps 40`, which win over the TOML file."""
Config = Annotated[Path | None, Parameter(alias="-c")]
Flag = Annotated[bool, Parameter(negative="")]


@app.command
def sft(
    run: Path,
    *settings: Overrides,
    trajectories: list[Path],
    config: Config = None,
    dry_run: Flag = False,
    session: InSession,
) -> None:
    """Supervised fine-tuning on trajectories with reward 1. Further settings: --NAME VALUE.

    Parameters
    ----------
    run
        Folder of the run; a run that is there goes on.
    trajectories
        Folders with a trajectories.jsonl (a run's `rollout`), one or more.
    config
        TOML file with settings.
    dry_run
        Print the resolved settings and stop.
    """
    from console.job_settings import SftJob
    from console.settings import load_settings

    job = load_settings(SftJob, config, settings)
    if dry_run:
        return _show_settings(session, job)
    _finish(session, run, _sft(session, job, run, trajectories))


@app.command
def rl(
    run: Path, *settings: Overrides, config: Config = None, dry_run: Flag = False, session: InSession
) -> None:
    """Asynchronous reinforcement learning on accepted tasks. Further settings: --NAME VALUE.

    Parameters
    ----------
    run
        Folder of the run; a run that is there goes on.
    config
        TOML file with settings.
    dry_run
        Print the resolved settings and stop.
    """
    from console.job_settings import RlJob
    from console.settings import load_settings

    job = load_settings(RlJob, config, settings)
    if dry_run:
        return _show_settings(session, job)
    _finish(session, run, asyncio.run(_rl(session, job, run)))


@app.command
def opd(
    run: Path, *settings: Overrides, config: Config = None, dry_run: Flag = False, session: InSession
) -> None:
    """On-policy distillation from one or more teachers. Further settings: --NAME VALUE.

    Parameters
    ----------
    run
        Folder of the run; a run that is there goes on.
    config
        TOML file with settings; `[[train.teachers]]` names the teachers.
    dry_run
        Print the resolved settings and stop.
    """
    from console.job_settings import OpdJob
    from console.settings import load_settings

    job = load_settings(OpdJob, config, settings)
    if dry_run:
        return _show_settings(session, job)
    _finish(session, run, asyncio.run(_opd(session, job, run)))


@app.command(name="settings")
def list_settings(trainer: str, *, session: InSession) -> None:
    """List every setting of a trainer with its default and meaning.

    Parameters
    ----------
    trainer
        sft, rl or opd.
    """
    from catalog.errors import UserError, did_you_mean
    from console.job_settings import OpdJob, RlJob, SftJob
    from console.settings import describe

    jobs: dict[str, type[BaseModel]] = {"sft": SftJob, "rl": RlJob, "opd": OpdJob}
    if trainer not in jobs:
        raise UserError(f"There is no trainer {trainer}: choose sft, rl or opd.{did_you_mean(trainer, jobs)}")
    lines = describe(jobs[trainer])
    session.emit(
        [{"name": name, "default": default, "meaning": note} for name, default, note in lines],
        lambda: print_table(("setting", "default", "meaning"), lines, empty=""),
    )


@app.command(name="roles")
def list_roles(network: str, *settings: Overrides, config: Config = None, session: InSession) -> None:
    """Show which optimizer trains which parameter. Further settings: --NAME VALUE, as --embeddings sinkhorn.

    Parameters
    ----------
    network
        A preset such as flash-nano, or what `train.policy` takes.
    config
        TOML file with settings of the optimizer.
    """
    from console.settings import load_settings
    from model.flash import FlashPolicy
    from model.optimizers import roles, table
    from model.policy import load_policy
    from model.presets import PRESETS
    from model.train_config import OptimizerConfig

    constants = load_settings(OptimizerConfig, config, settings)
    policy = FlashPolicy.fresh(network, seed=0) if network in PRESETS else load_policy(network)
    assigned = roles(policy.module, constants)
    session.emit(
        [
            {
                "name": role.name,
                "shape": list(role.parameter.shape),
                "method": role.method,
                "blocks": role.blocks,
                "lr": role.lr,
                "weight_decay": role.weight_decay,
            }
            for role in assigned
        ],
        lambda: print(table(assigned)),
    )


def _sft(session: Session, job: SftJob, run: Path, folders: list[Path]) -> dict[str, Any]:
    from catalog.errors import UserError
    from catalog.jsonl import read_lines
    from catalog.trajectory import Trajectory
    from console.runs import record
    from model.policy import load_policy, replay_start
    from sft.data import Example
    from sft.train import train

    policy = load_policy(job.train.policy)
    examples: dict[str, Example] = {}
    for folder in folders:
        file = folder / "trajectories.jsonl"
        if not file.exists():
            raise UserError(f"There is no {file}: name the rollout folder of a run.")
        for line in read_lines(file):
            one = Trajectory.model_validate(line)
            targets = tuple(at for at, sampled in enumerate(one.sampled) if sampled)
            if one.reward == 1.0 and targets:
                window = policy.replay_window
                start = 0 if window is None else replay_start(targets[0], window)
                examples[one.id] = Example(one.id, one.token_ids[: targets[-1] + 1], targets, start)
    result = train(job.train, policy, [examples[id] for id in sorted(examples)], run=run)
    with session.catalog() as catalog:
        record(catalog, run)
    return {"samples": len(examples), "steps": result.steps, **result.last}


async def _rl(session: Session, job: RlJob, run: Path) -> dict[str, Any]:
    from console.jobs import reinforce
    from console.workshop import open_workshop

    async with open_workshop(session, jobs=job.jobs) as workshop:
        tasks = workshop.tasks(job.agent, split=job.split, source=job.source, limit=job.limit)
        result = await reinforce(workshop, job, tasks, run)
    return {"steps": result.steps, **result.last}


async def _opd(session: Session, job: OpdJob, run: Path) -> dict[str, Any]:
    from console.jobs import distil
    from console.workshop import open_workshop

    async with open_workshop(session, jobs=job.jobs) as workshop:
        tasks = workshop.tasks(job.agent, split=job.split, source=job.source, limit=job.limit)
        # Of all tasks: a run that goes on may hold samples of one that was quarantined meanwhile.
        every = workshop.catalog.list_tasks()
        domains = {task.id: task.origin.operator or task.origin.kind for task in every}
        result = await distil(workshop, job, tasks, run, domain_of=lambda one: domains[one.task_id])
    return {"steps": result.steps, **result.last}


def _finish(session: Session, run: Path, result: dict[str, Any]) -> None:
    """Say what came out."""
    from catalog.runs import read_run

    value = {"run": read_run(run).id, "folder": str(run), "policy": str(run / "policy"), **result}
    session.emit(value, lambda: print_table(("what", "value"), list(value.items()), empty=""))


def _show_settings(session: Session, job: BaseModel) -> None:
    resolved = job.model_dump(mode="json")
    session.emit(resolved, lambda: print(json.dumps(resolved, indent=2, ensure_ascii=False)))
