"""Does the demo's agent learn? Three seeds, four draws a held-out task, and the controls beside it.

    python -m benchmarks.demo_seeds --demo runs/demo --json docs/results/demo_seeds.json [--seeds 0 1 2]

Uses the tasks that a finished demo made. Each seed deals the training functions anew, fine-tunes, runs RL
and evaluates; `sft_more` goes on with SFT for as many training tokens as RL computed. Rankers that no
network is needed for stand beside: random, operator prior, and a 5-gram model of other packages' sources
(those installed in this environment). Intervals are bootstrapped over functions; differences are paired by
task. Killed, it goes on where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.ngram import NGram
from catalog.atomic import write_atomic
from catalog.models import CandidateSet, Task
from catalog.store import Catalog
from console.demo import stages
from console.demo.config import DemoConfig
from console.demo.run import metrics_of
from console.demo.split import Parts, divide, function_of
from rollout.baselines import operator_prior, ranked_rates, uniform_ranker
from rollout.statistics import Estimate, clustered_mean, paired_difference
from sandbox.base import provider
from sandbox.images import ImageStore

SOURCES = (
    "rich",
    "jinja2",
    "sqlalchemy",
    "pydantic",
    "alembic",
    "cyclopts",
    "fsspec",
    "git",
    "hypothesis",
    "networkx",
)
DRAWS = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--demo", type=Path, required=True, help="folder of a finished demo")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--split", choices=("dev", "test"), default="test")
    args = parser.parse_args()
    result = asyncio.run(run(args.demo, args.seeds, args.split))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(args.json, json.dumps(result, indent=1).encode())
    print(table(result))


async def run(demo: Path, seeds: list[int], split: str) -> dict[str, Any]:
    """All seeds on the demo's tasks."""
    values = json.loads((demo / "config.json").read_text(encoding="utf-8"))
    base = DemoConfig.model_validate(values).model_copy(update={"eval_samples": DRAWS})
    backend = provider("namespace", store=demo / "home" / "images")
    with Catalog.open(demo / "home") as catalog:
        tasks = catalog.list_tasks(status="accepted")
        sets = {one.task_id: one for one in catalog.list_candidates()}
        images = ImageStore(demo / "home" / "images")
        rates: dict[str, list[dict[str, float]]] = {}
        rl: list[dict[str, Any]] = []
        held: list[Task] = []
        try:
            for seed in seeds:
                config = base.model_copy(update={"seed": seed})
                folder = demo / f"seed-{seed}"
                folder.mkdir(exist_ok=True)
                bench = stages.Bench(config, folder, catalog, backend, images, sets)
                parts = divide(tasks, sets, sft_share=config.sft_share, seed=seed)
                held = list(getattr(parts, split))
                for name, found in (await one_seed(bench, parts, held)).items():
                    rates.setdefault(name, []).append(found)
                rl.append(metrics_of(folder / "rl")[-1])
        finally:
            await backend.close()
        rankers = baselines(catalog, [task for task in tasks if task.id in sets], sets, held)
    return summarize(rates, rankers, held, seeds, split, rl)


async def one_seed(bench: stages.Bench, parts: Parts, held: list[Task]) -> dict[str, dict[str, float]]:
    """Pass rate by task of each policy."""
    config = bench.config
    sft = await asyncio.to_thread(stages.fine_tune, bench, parts, config.sft, "sft")
    rl = await stages.reinforce(bench, parts, sft, "rl")
    more = config.sft.model_copy(
        update={"policy": str(sft), "steps": equal_steps(bench), "seed": config.seed}
    )
    again = await asyncio.to_thread(stages.fine_tune, bench, parts, more, "sft_more")
    found: dict[str, dict[str, float]] = {}
    for name, policy in (("sft", sft), ("rl", rl), ("sft_more", again)):
        found[name] = (await stages.measure(bench, held, policy, name)).rates
        print(f"seed {config.seed} {name}: {sum(found[name].values()) / len(found[name]):.3f}", flush=True)
    return found


def equal_steps(bench: stages.Bench) -> int:
    """SFT steps that compute as many samples forward and backward as the RL run."""
    service = bench.config.service
    return max(1, bench.config.rl.steps * service.batch_samples // bench.config.sft.batch_samples)


def baselines(
    catalog: Catalog, tasks: list[Task], sets: Mapping[str, CandidateSet], held: list[Task]
) -> dict[str, dict[str, float]]:
    """Exact pass rates of rankers that read no network, without and with three tries."""
    train = [sets[task.id] for task in tasks if task.split == "train"]
    model = NGram()
    site = Path(sysconfig.get_paths()["purelib"])
    for name in SOURCES:
        files = sorted((site / name).rglob("*.py"))
        model.train(path.read_text(encoding="utf-8", errors="replace") for path in files[:120])

    def ngram(one: CandidateSet) -> list[float]:
        return [
            model.gain(candidate, catalog.blobs.get(candidate.content).decode("utf-8", "replace"))
            for candidate in one.candidates
        ]

    chosen = [sets[task.id] for task in held]
    found: dict[str, dict[str, float]] = {}
    for name, ranker in (
        ("random", uniform_ranker),
        ("operator_prior", operator_prior(train)),
        ("ngram", ngram),
    ):
        found[name] = ranked_rates(chosen, ranker, tries=0)
        found[f"{name}_search"] = ranked_rates(chosen, ranker, tries=3)
    return found


def summarize(
    rates: Mapping[str, list[dict[str, float]]],
    rankers: Mapping[str, dict[str, float]],
    held: list[Task],
    seeds: list[int],
    split: str,
    rl: list[dict[str, Any]],
) -> dict[str, Any]:
    """Means over seeds with intervals over functions; every seed shown."""
    clusters = {task.id: function_of(task) for task in held}
    common = {id for runs in rates.values() for id in runs[0]}
    for runs in rates.values():
        for found in runs:
            common &= found.keys()

    def mean(name: str) -> dict[str, float]:
        return {id: sum(found[id] for found in rates[name]) / len(rates[name]) for id in sorted(common)}

    means = {name: mean(name) for name in rates} | {
        name: {id: found[id] for id in sorted(common)} for name, found in rankers.items()
    }
    policies = {
        name: estimate(clustered_mean(found, clusters)) | {"seeds": per_seed(rates, name, common)}
        for name, found in means.items()
    }
    pairs = [
        (first, second)
        for first in ("rl", "sft", "sft_more")
        for second in ("sft", "sft_more", "random", "random_search", "ngram_search")
        if first != second and (second not in ("sft", "sft_more") or first == "rl")
    ]
    differences = {
        f"{first}_minus_{second}": estimate(paired_difference(means[first], means[second], clusters))
        for first, second in pairs
    }
    return {
        "format": 1,
        "split": split,
        "seeds": seeds,
        "draws": DRAWS,
        "tasks": len(common),
        "functions": len({clusters[id] for id in common}),
        "policies": policies,
        "differences": differences,
        "rl_last": [{k: v for k, v in line.items() if isinstance(v, int | float)} for line in rl],
    }


def per_seed(rates: Mapping[str, list[dict[str, float]]], name: str, common: set[str]) -> list[float]:
    return [sum(found[id] for id in common) / len(common) for found in rates.get(name, [])]


def estimate(value: Estimate) -> dict[str, Any]:
    return {"mean": value.mean, "low": value.low, "high": value.high}


def table(result: Mapping[str, Any]) -> str:
    lines = [f"{result['tasks']} tasks of {result['functions']} functions, {len(result['seeds'])} seeds"]
    for group in ("policies", "differences"):
        for name, part in result[group].items():
            lines.append(f"{name:28} {part['mean']:+.3f} [{part['low']:+.3f}, {part['high']:+.3f}]")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
