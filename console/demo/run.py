"""The demo, one page in pipeline order. Every stage goes on where a killed run left it.

    posttrain demo [--folder runs/demo] [--source pypi:NAME] [--deterministic]

Everything lives in the folder: `home/` (images, catalog, blobs), a run folder for each trainer,
`evaluation/`, `report.html`, and `summary.json`, which is written last.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from catalog.atomic import write_atomic
from catalog.errors import UserError
from catalog.jsonl import read_lines, read_record
from catalog.store import Catalog
from console.demo import stages
from console.demo.config import DemoConfig
from console.demo.split import Parts, divide
from console.demo.summary import POLICIES, rows, summarize
from console.progress import Stages
from envfactory.report import write as write_report
from opd.config import TeacherConfig
from rollout.evaluate import Evaluation
from sandbox.base import provider
from sandbox.images import ImageStore

LOGIC = ("comparison", "equality", "identity", "membership", "boolean", "negation", "condition", "ternary")


def run_demo(config: DemoConfig, folder: Path, *, log: Stages) -> dict[str, Any]:
    """Run, or go on running, the whole demo; returns the summary."""
    folder = folder.resolve()  # tools run in other folders
    claim(folder, config)
    return asyncio.run(_run(config, folder, log))


async def _run(config: DemoConfig, folder: Path, log: Stages) -> dict[str, Any]:
    home = folder / "home"
    backend = provider("namespace", store=home / "images")
    with Catalog.open(home) as catalog:
        bench = stages.Bench(config, folder, catalog, backend, ImageStore(home / "images"), {})
        try:
            with log.stage("tasks") as stage:
                made = await stages.make_tasks(bench, stage)
                parts = divide(made.tasks, made.candidates, sft_share=config.sft_share, seed=config.seed)
                counts = made.funnel.summary()
                stage.result(
                    f"{counts['accepted']} accepted of {counts['proposed']} bugs in {made.build.name} "
                    f"{made.build.version}; {len(parts.test)} held out"
                )
            require(parts)
            write_report(catalog, folder / "report.html")
            bench = stages.Bench(config, folder, catalog, backend, bench.images, made.candidates)
            with log.stage("SFT", total=config.sft.steps) as stage:
                sft = await asyncio.to_thread(stages.fine_tune, bench, parts, config.sft, "sft")
                stage.result(last_line(folder / "sft", "loss", "dev_loss"))
            with log.stage("RL", total=config.rl.steps) as stage:
                rl = await watched(stage, folder / "rl", stages.reinforce(bench, parts, sft, "rl"))
                stage.result(last_line(folder / "rl", "reward_mean", "off_policy_ratio", "utilisation"))
            with log.stage("OPD", total=config.opd.steps) as stage:
                slim = await asyncio.to_thread(stages.fine_tune, bench, parts, config.slim, "slim")
                teachers = (
                    TeacherConfig(name="rl", policy=str(rl)),
                    TeacherConfig(name="slim", policy=str(slim), domains=("data",)),
                )
                work = stages.distil(bench, parts, sft, teachers, domains(parts))
                opd = await watched(stage, folder / "opd", work)
                stage.result(last_line(folder / "opd", "kl", "loss"))
            evaluations: dict[str, Evaluation] = {}
            with log.stage("evaluation", total=3 * len(parts.test)) as stage:
                for name, policy in zip(POLICIES, (sft, rl, opd), strict=True):
                    stage.note(name)
                    evaluations[name] = await stages.measure(bench, parts.test, policy, name)
                    stage.advance(len(parts.test))
                stage.result(f"{len(parts.test)} held-out tasks, each verdict made anew")
        finally:
            await backend.close()
    metrics = metrics_of(folder / "rl")
    summary = summarize(made, parts, made.candidates, evaluations, metrics)
    summary["seconds"] = round(log.seconds, 1)
    write_atomic(folder / "summary.json", json.dumps(summary, indent=1).encode())
    show(summary, folder, log)
    return summary


async def watched(stage: Any, run: Path, work: Any) -> Path:
    """Await `work` and move the stage's bar along its run's metrics."""
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.wait([task], timeout=1.0)
        lines = metrics_of(run)
        if lines:
            last = lines[-1]
            stage.update(len(lines), text=f"reward {last.get('reward_mean', 0):.2f}")
    return task.result()


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Lines of a run's `metrics.jsonl`; none before it exists."""
    path = run / "metrics.jsonl"
    return list(read_lines(path)) if path.exists() else []


def claim(folder: Path, config: DemoConfig) -> None:
    """Write the settings into the folder, or check that they are its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    resolved = config.model_dump(mode="json")
    if path.exists() and read_record(path, remove=folder) != resolved and has_tasks(folder):
        raise UserError(f"{folder} holds a demo with other settings: delete it or choose another --folder.")
    write_atomic(path, json.dumps(resolved, indent=1).encode())


def has_tasks(folder: Path) -> bool:
    """Whether other settings would mix with what is there. A source that gave nothing leaves nothing."""
    if not (folder / "home" / "catalog.db").exists():
        return False
    with Catalog.open(folder / "home") as catalog:
        return bool(catalog.list_tasks())


def require(parts: Parts) -> None:
    """Raise unless there is something to learn from and something to be measured on."""
    for name in ("sft", "rl", "test"):
        if not getattr(parts, name):
            raise UserError(
                f"No task is left for {name}: choose a package with more functions that tests reach."
            )


def domains(parts: Parts) -> dict[str, str]:
    """Task id -> `logic` or `data`, by the kind of its bug."""
    return {
        task.id: "logic" if (task.origin.operator or "").startswith(LOGIC) else "data"
        for task in (*parts.sft, *parts.rl)
    }


def last_line(run: Path, *names: str) -> str:
    """The named metrics of a run's last step."""
    lines = metrics_of(run)
    if not lines:
        return "finished before"
    last = lines[-1]
    found = [f"{name} {last[name]:.3f}" for name in names if isinstance(last.get(name), int | float)]
    return f"{len(lines)} steps: {', '.join(found)}"


def show(summary: dict[str, Any], folder: Path, log: Stages) -> None:
    """Print the table."""
    log.line()
    table = rows(summary)
    width = max(len(name) for name, _ in table)
    for name, value in table:
        log.line(f"{name:<{width}}  {value}")
    log.line()
    log.line(f"summary  {folder / 'summary.json'}")
    log.line(f"report   {folder / 'report.html'}")
