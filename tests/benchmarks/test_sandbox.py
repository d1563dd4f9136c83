"""What `benchmarks.sandbox` writes, and a sweep over a handful of sandboxes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import sandbox_sweep


def test_the_figures_have_their_names(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.sandbox", "--samples", "2", "--alive", "4"]
    command += ["--sweep", "3,6", "--minutes", "0.05", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    for name in ("create_ms", "exec_ms"):
        assert {"p50", "p99"} <= set(found[name]["namespace"])
        assert found[name]["namespace"]["p50"] <= found[name]["namespace"]["p99"]
    assert found["idle_max"] == 6
    assert {"knee", "mib_each"} <= set(found)
    assert [point["alive"] for point in found["sweep"]["points"]] == [3, 6]


def test_the_knee_is_the_last_count_that_is_not_slow() -> None:
    points = [{"alive": n, "short_ms": {"p99": p99}} for n, p99 in ((100, 10.0), (500, 29.0), (1000, 30.0))]
    assert sandbox_sweep.knee(points) == 500
    assert sandbox_sweep.knee(points[:1]) == 100
    assert sandbox_sweep.knee([{"alive": 100}]) is None
