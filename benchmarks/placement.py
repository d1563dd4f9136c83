"""Where a fleet of 1,000 nodes puts a million sandboxes, when several placers decide on views that are old.

    python -m benchmarks.placement [--json FILE] [--nodes 1000] [--sandboxes 1000000] [--load 0.95] [--seed 1]

A simulation: no sandbox is made. Placers see the number of living sandboxes of every node as of their last
refresh, and (but for `blind`) count what they placed themselves since. A node has the last word: it admits up
to `--slots`, and makes sandboxes one after the other. A refused request tries another node. Requests come in
groups (the samples of one prompt), groups and ends of sandboxes as Poisson processes that keep the fleet at
`--load` of its slots. All policies meet the same requests.

The time to make a sandbox is drawn from a lognormal distribution through the measured p50 and p99
(`--measured`, a file of `benchmarks.sandbox`), the slots are its `knee` where it has one. Left out: nodes
that fail or differ, images that are not there yet, memory.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "docs/results"
MEASURED = (RESULTS / "sandbox_density.json", RESULTS / "sandbox_backends.json")
SLOTS = 300
SAMPLES = 200
COLUMNS = ("refused", "retried", "max/mean", "dev/mean", "p50 ms", "p99 ms")


@dataclass(frozen=True)
class Fleet:
    """The inputs of one run."""

    nodes: int = 1000
    sandboxes: int = 1_000_000
    """Requests after the fleet is at its load."""
    slots: int = SLOTS
    """Sandboxes that a node admits."""
    load: float = 0.95
    """Share of all slots that is taken on average."""
    life_s: float = 600.0
    """Mean life of a sandbox, exponentially distributed."""
    group: int = 16
    """Sandboxes that are asked for together, of one placer."""
    placers: int = 8
    stale_s: float = 1.0
    """How often a placer's view is refreshed, each placer at another moment."""
    tries: int = 4
    """Nodes that one request asks before it is refused."""
    trip_ms: float = 1.0
    """There and back between a placer and a node."""
    create_p50_ms: float = 30.0
    create_p99_ms: float = 45.0
    seed: int = 1


class View:
    """What one placer believes, and how it chooses."""

    def __init__(self, fleet: Fleet, alive: list[int], rng: random.Random) -> None:
        self.fleet = fleet
        self.alive = alive
        self.rng = rng
        self.refresh()

    def refresh(self) -> None:
        """See the fleet as it is now."""
        self.seen = self.alive.copy()

    def choose(self) -> int:
        """A node, at random."""
        return int(self.rng.random() * self.fleet.nodes)

    def placed(self, node: int) -> None:
        """It took one."""
        self.seen[node] += 1

    def refused(self, node: int) -> None:
        """It is full."""
        self.seen[node] = self.fleet.slots


class Two(View):
    """Of two nodes at random, the one that seems to have fewer (Mitzenmacher 2001)."""

    def choose(self) -> int:
        one, two = int(self.rng.random() * self.fleet.nodes), int(self.rng.random() * self.fleet.nodes)
        return one if self.seen[one] <= self.seen[two] else two


class Asked(View):
    """Of two nodes at random, the one that says it has fewer: one trip more, and no view at all."""

    def choose(self) -> int:
        one, two = int(self.rng.random() * self.fleet.nodes), int(self.rng.random() * self.fleet.nodes)
        return one if self.alive[one] <= self.alive[two] else two


class Least(View):
    """The node that seems to have the fewest of all."""

    def refresh(self) -> None:
        draw = self.rng.random
        self.heap = [(alive, draw(), node) for node, alive in enumerate(self.alive)]
        heapq.heapify(self.heap)

    def choose(self) -> int:
        return self.heap[0][2]

    def placed(self, node: int) -> None:
        alive, tie, _ = self.heap[0]
        heapq.heapreplace(self.heap, (alive + 1, tie, node))

    def refused(self, node: int) -> None:
        heapq.heapreplace(self.heap, (self.fleet.slots, self.rng.random(), node))


class Blind(Least):
    """The same, without counting what it placed itself."""

    def placed(self, node: int) -> None:
        """The view stays what it was."""


POLICIES: dict[str, type[View]] = {
    "random": View, "two_choices_stale": Two, "two_choices_asked": Asked, "least_stale": Least,
    "least_stale_blind": Blind,
}  # fmt: skip


class Run:
    """One policy over one fleet."""

    def __init__(self, fleet: Fleet, kind: type[View]) -> None:
        self.fleet = fleet
        self.world = random.Random(f"{fleet.seed} world")
        self.alive = [round(fleet.load * fleet.slots)] * fleet.nodes
        self.total = sum(self.alive)
        self.free_at = [0.0] * fleet.nodes
        self.views = [
            kind(fleet, self.alive, random.Random(f"{fleet.seed} placer {n}")) for n in range(fleet.placers)
        ]
        self.trips_s = (2 if kind is Asked else 1) * fleet.trip_ms / 1e3
        self.creations = creation_times(fleet)
        self.now = 0.0
        self.times: list[float] = []
        self.refused = self.retried = 0
        self.worst: list[float] = []
        self.spread: list[float] = []

    def go(self) -> None:
        """All requests."""
        fleet = self.fleet
        rate = fleet.load * fleet.slots * fleet.nodes / fleet.life_s / fleet.group
        every = max(1, fleet.sandboxes // fleet.group // SAMPLES)
        looks = 0
        for count in range(fleet.sandboxes // fleet.group):
            gap = self.world.expovariate(rate)
            self.now += gap
            while looks * fleet.stale_s / fleet.placers <= self.now:
                self.views[looks % fleet.placers].refresh()
                looks += 1
            self.end_some(gap)
            view = self.views[int(self.world.random() * fleet.placers)]
            for _ in range(fleet.group):
                self.place(view)
            if count % every == 0:
                self.look()

    def end_some(self, gap: float) -> None:
        """Sandboxes that end within `gap` seconds: each is as likely as any other, whatever its age."""
        fleet, draw, alive = self.fleet, self.world.random, self.alive
        left = gap
        while self.total and (left := left - draw_gap(draw, self.total / fleet.life_s)) > 0:
            node = int(draw() * fleet.nodes)
            while draw() * fleet.slots >= alive[node]:
                node = int(draw() * fleet.nodes)
            alive[node] -= 1
            self.total -= 1

    def place(self, view: View) -> None:
        """One request, until a node takes it or `tries` have refused."""
        fleet, waited = self.fleet, 0.0
        for _ in range(fleet.tries):
            node = view.choose()
            waited += self.trips_s
            if self.alive[node] < fleet.slots:
                view.placed(node)
                self.alive[node] += 1
                self.total += 1
                begins = max(self.now + waited, self.free_at[node])
                self.free_at[node] = begins + self.creations[len(self.times) % len(self.creations)]
                self.times.append(self.free_at[node] - self.now)
                return
            view.refused(node)
            self.retried += 1
        self.refused += 1

    def look(self) -> None:
        """How uneven the fleet is now."""
        mean = self.total / self.fleet.nodes
        self.worst.append(max(self.alive) / mean)
        self.spread.append(statistics.pstdev(self.alive) / mean)

    def report(self) -> dict[str, Any]:
        asked = len(self.times) + self.refused
        ordered = sorted(self.times)
        at = lambda share: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 2)  # noqa: E731
        return {
            "refused": self.refused / asked,
            "tries_refused": self.retried / (asked + self.retried),
            "imbalance": {
                "max_over_mean": round(statistics.median(self.worst), 4),
                "max_over_mean_worst": round(max(self.worst), 4),
                "deviation_over_mean": round(statistics.median(self.spread), 4),
            },
            "place_ms": {"p50": at(0.5), "p95": at(0.95), "p99": at(0.99), "max": at(1.0)},
            "alive_at_the_end": self.total,
        }


def draw_gap(draw: Callable[[], float], rate: float) -> float:
    """An exponentially distributed time."""
    return -math.log(1.0 - draw()) / rate


def creation_times(fleet: Fleet) -> list[float]:
    """Draws of the seconds that a node takes for one sandbox, used in turns."""
    rng = random.Random(f"{fleet.seed} creations")
    sigma = math.log(fleet.create_p99_ms / fleet.create_p50_ms) / statistics.NormalDist().inv_cdf(0.99)
    return [fleet.create_p50_ms / 1e3 * math.exp(sigma * rng.gauss(0, 1)) for _ in range(65_536)]


def simulate(fleet: Fleet, policies: list[str]) -> dict[str, Any]:
    """The report of each policy."""
    found: dict[str, Any] = {}
    for name in policies:
        started = time.perf_counter()
        run = Run(fleet, POLICIES[name])
        run.go()
        found[name] = {**run.report(), "simulated_s": round(run.now, 1)}
        found[name]["seconds"] = round(time.perf_counter() - started, 1)
    return found


def figures(path: Path | None) -> tuple[dict[str, Any], str]:
    """Measured figures of a node, as settings of a Fleet, and where they come from."""
    source = path or next(each for each in MEASURED if each.exists())
    found = json.loads(source.read_text())
    create = found["create_ms"]["namespace"]
    settings = {"create_p50_ms": create["p50"], "create_p99_ms": create["p99"]}
    if found.get("knee"):
        settings["slots"] = found["knee"]
    return settings, source.name


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--measured", type=Path, help="a file of benchmarks.sandbox (default: docs/results)")
    parser.add_argument("--policies", default=",".join(POLICIES))
    for name, value in asdict(Fleet()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value))
    options = vars(parser.parse_args())
    measured, source = figures(options["measured"])
    given = {name: options[name] for name in asdict(Fleet()) if options[name] is not None}
    fleet = Fleet(**{**measured, **given})
    started = time.perf_counter()
    found = simulate(fleet, options["policies"].split(","))
    print(f"{'policy':18}" + "".join(f"{name:>10}" for name in COLUMNS))
    for name, each in found.items():
        uneven, place = each["imbalance"], each["place_ms"]
        print(
            f"{name:18}{each['refused']:10.5f}{each['tries_refused']:10.5f}{uneven['max_over_mean']:10.3f}"
            f"{uneven['deviation_over_mean']:10.4f}{place['p50']:10.1f}{place['p99']:10.1f}"
        )
    if options["json"]:
        value = {
            "fleet": asdict(fleet),
            "measured": {"from": source, **measured},
            "slots_are": "measured" if "slots" in measured and "slots" not in given else "assumed",
            "policies": found,
            "seconds": round(time.perf_counter() - started, 1),
        }
        options["json"].write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    main()
