"""The simulated fleet keeps its books, and shows what each policy is known for."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.placement import POLICIES, Fleet, Run, creation_times, figures, simulate

SMALL = Fleet(nodes=40, sandboxes=8000, slots=50, load=0.9, life_s=20.0, group=8, placers=4, stale_s=1.0)


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_is_lost_and_no_node_is_overfull(name: str) -> None:
    run = Run(SMALL, POLICIES[name])
    run.go()
    assert sum(run.alive) == run.total
    assert len(run.times) + run.refused == SMALL.sandboxes
    assert 0 <= min(run.alive) <= max(run.alive) <= SMALL.slots
    assert min(run.times) > SMALL.trip_ms / 1e3
    assert run.total == pytest.approx(SMALL.load * SMALL.slots * SMALL.nodes, rel=0.1)


def test_policies_differ_as_theory_says() -> None:
    found = simulate(SMALL, list(POLICIES))
    spread = {name: each["imbalance"]["deviation_over_mean"] for name, each in found.items()}
    assert spread["two_choices_asked"] < spread["random"] / 1.5
    assert spread["two_choices_stale"] < spread["random"]
    assert found["least_stale_blind"]["place_ms"]["p99"] > 3 * found["two_choices_stale"]["place_ms"]["p99"]
    waits: list[float] = []
    for stale_s in (0.02, 1.0):
        fleet = dataclasses.replace(SMALL, stale_s=stale_s, group=1)
        waits.append(simulate(fleet, ["least_stale_blind"])["least_stale_blind"]["place_ms"]["p99"])
    assert waits[0] < waits[1] / 1.5, "an old view does no harm"


def test_a_seed_is_a_result() -> None:
    def once(seed: int) -> dict[str, object]:
        (found,) = simulate(dataclasses.replace(SMALL, seed=seed), ["two_choices_stale"]).values()
        return {name: value for name, value in found.items() if name != "seconds"}

    assert once(1) == once(1) != once(2)


def test_creation_times_have_the_measured_percentiles() -> None:
    drawn = sorted(creation_times(Fleet(create_p50_ms=20, create_p99_ms=50)))
    assert drawn[len(drawn) // 2] == pytest.approx(0.020, rel=0.03)
    assert drawn[int(len(drawn) * 0.99)] == pytest.approx(0.050, rel=0.05)


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"create_ms": {"namespace": {"p50": 10.0, "p99": 20.0}}, "knee": 30}))
    assert figures(file)[0] == {"create_p50_ms": 10.0, "create_p99_ms": 20.0, "slots": 30}
    command = [sys.executable, "-m", "benchmarks.placement", "--measured", str(file), "--nodes", "20"]
    command += ["--sandboxes", "2000", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "two_choices_stale" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["fleet"]["slots"], found["slots_are"], found["fleet"]["seed"]) == (30, "measured", 1)
    assert set(found["policies"]) == set(POLICIES)
