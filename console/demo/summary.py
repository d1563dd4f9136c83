"""What the demo found, as one JSON document and one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from catalog.models import CandidateSet, Task
from console.demo.split import Parts, function_of
from envfactory.synthesis import Synthesis
from rollout.baselines import operator_prior, ranked_rates, uniform_ranker
from rollout.evaluate import Evaluation
from rollout.statistics import Estimate, clustered_mean, paired_difference

POLICIES = ("sft", "rl", "opd")


def summarize(
    synthesis: Synthesis,
    parts: Parts,
    sets: Mapping[str, CandidateSet],
    evaluations: Mapping[str, Evaluation],
    metrics: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The document `summary.json`.

    Args:
        evaluations: by policy name (`POLICIES`).
        metrics: lines of the RL run's `metrics.jsonl`.
    """
    funnel = synthesis.funnel.summary()
    clusters = {task.id: function_of(task) for task in parts.test}
    heldout: dict[str, Any] = {}
    test_sets = [sets[task.id] for task in parts.test]
    train_sets = [sets[task.id] for task in (*parts.sft, *parts.rl)]
    prior = operator_prior(train_sets)
    for name, rates in (
        ("random", ranked_rates(test_sets, uniform_ranker, tries=0)),
        ("random_search", ranked_rates(test_sets, uniform_ranker, tries=3)),
        ("operator_prior", ranked_rates(test_sets, prior, tries=0)),
        ("operator_prior_search", ranked_rates(test_sets, prior, tries=3)),
    ):
        heldout[name] = _estimate(clustered_mean(rates, clusters), len(rates))
    for name, evaluation in evaluations.items():
        heldout[name] = _estimate(evaluation.estimate(clusters), len(evaluation.rates)) | {
            "failed": evaluation.failed
        }
    for first, second in (("rl", "sft"), ("opd", "sft")):
        heldout[f"{first}_minus_{second}"] = _difference(evaluations[first], evaluations[second], clusters)
    return {
        "format": 1,
        "source": synthesis.build.pinned,
        "tasks": {
            "found": funnel["proposed"],
            "accepted": funnel["accepted"],
            "rejected": funnel["rejected"],
            "with_candidates": {name: len(getattr(parts, name)) for name in ("sft", "rl", "dev", "test")},
            "without_candidates": funnel["without_candidates"],
            "history": funnel["history"],
            "held_out_functions": len(set(clusters.values())),
            "held_out_only_operators": sorted(_operators(parts.test) - _operators((*parts.sft, *parts.rl))),
        },
        "heldout": heldout,
        "rl": {
            "steps": len(metrics),
            "utilisation": metrics[-1]["utilisation"] if metrics else None,
            "utilisation_unpaused": metrics[-1]["utilisation_unpaused"] if metrics else None,
            "max_staleness": max((line["max_staleness"] for line in metrics), default=0),
            "off_policy_ratio": _mean([line["off_policy_ratio"] for line in metrics]),
            "reward_first": metrics[0]["reward_mean"] if metrics else None,
            "reward_last": _mean([line["reward_mean"] for line in metrics[-5:]]),
        },
    }


def _operators(tasks: Sequence[Task]) -> set[str]:
    return {task.origin.operator for task in tasks if task.origin.operator}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _estimate(estimate: Estimate, n: int) -> dict[str, Any]:
    return {"rate": estimate.mean, "low": estimate.low, "high": estimate.high, "n": n, "clusters": estimate.n}


def _difference(first: Evaluation, second: Evaluation, clusters: Mapping[str, str]) -> dict[str, Any]:
    both = first.rates.keys() & second.rates.keys()
    difference = paired_difference(
        {task: first.rates[task] for task in both},
        {task: second.rates[task] for task in both},
        {task: clusters[task] for task in both},
    )
    return {"mean": difference.mean, "low": difference.low, "high": difference.high, "n": len(both)}


def rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The table that the demo ends with: (what, value)."""
    tasks, heldout, rl = summary["tasks"], summary["heldout"], summary["rl"]
    table = [
        ("bugs tried", str(tasks["found"])),
        ("tasks accepted", str(tasks["accepted"])),
        *((f"rejected: {reason}", str(count)) for reason, count in tasks["rejected"].items()),
        ("held-out tasks", f"{tasks['with_candidates']['test']} of {tasks['held_out_functions']} functions"),
    ]
    names = {
        "random": "one random pick",
        "operator_prior": "pick by operator prior",
        "random_search": "random search, 3 tries",
        "operator_prior_search": "prior search, 3 tries",
        "sft": "after SFT",
        "rl": "after RL",
        "opd": "after OPD",
    }
    table += [(f"held-out pass rate, {text}", _interval(heldout[name])) for name, text in names.items()]
    for name, text in (("rl_minus_sft", "RL minus SFT"), ("opd_minus_sft", "OPD minus SFT")):
        part = heldout[name]
        table.append((f"{text}, paired", f"{part['mean']:+.3f} [{part['low']:+.3f}, {part['high']:+.3f}]"))
    table += [
        ("RL steps", str(rl["steps"])),
        (
            "engine utilisation",
            f"{rl['utilisation']:.2f} ({rl['utilisation_unpaused']:.2f} outside training)",
        ),
        ("largest staleness", f"{rl['max_staleness']:.0f} publications"),
    ]
    return table


def _interval(part: Mapping[str, Any]) -> str:
    return f"{part['rate']:.3f} [{part['low']:.3f}, {part['high']:.3f}] n={part['n']}"
