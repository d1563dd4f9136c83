"""What the sandboxes of this process did, for Prometheus: counters, histograms, and a page that shows them.

    async with metrics.serve(9464) as url:  # http://127.0.0.1:9464/metrics, for this machine alone
        ...

Every backend counts into `METRICS`, whether somebody looks or not: a count costs less than a microsecond. The
numbers are those of one process; a node's scraper adds up its processes. The text format is version 0.0.4,
written here in a few lines, which saves a dependency. Left out: labels by owner or image, whose number has no
bound, and whatever went on inside a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Generator, Iterable
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

from sandbox.values import (
    AdmissionRefused,
    ExecResult,
    Outcome,
    PolicyUnsupported,
    SandboxUnavailable,
)

PREFIX = "posttrain_sandbox_"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the histograms' buckets: from a warm command to a long test suite."""
KILLS = (Outcome.TIMEOUT, Outcome.OOM, Outcome.CANCELLED, Outcome.LOST)
REQUEST_SECONDS = 5.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Store(Protocol):
    root: Path


class Counted(Protocol):
    """A provider, as far as it is counted."""

    name: str

    @property
    def images(self) -> Store: ...

    def living(self) -> int:
        """This client's sandboxes that are alive."""
        ...


class Counter:
    """Sums that only grow, by the values of their labels."""

    kind = "counter"

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self.name = PREFIX + name
        self.text = text
        self.labels = labels
        self.values: dict[tuple[str, ...], float] = {}

    def add(self, *values: str, amount: float = 1) -> None:
        """Add to the sum of these label values."""
        assert len(values) == len(self.labels)
        self.values[values] = self.values.get(values, 0) + amount

    def lines(self) -> list[str]:
        return [
            f"{self.name}{_labels(self.labels, each)} {_number(value)}"
            for each, value in sorted(self.values.items())
        ]


class Gauge(Counter):
    """Values that were looked up for this scrape."""

    kind = "gauge"


class Histogram:
    """Seconds in cumulative buckets, by the values of the labels."""

    kind = "histogram"

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self.name = PREFIX + name
        self.text = text
        self.labels = labels
        self.counts: dict[tuple[str, ...], list[int]] = {}
        self.sums: dict[tuple[str, ...], float] = {}

    def observe(self, seconds: float, *values: str) -> None:
        """Count one duration."""
        assert len(values) == len(self.labels)
        counts = self.counts.setdefault(values, [0] * (len(SECONDS) + 1))
        counts[bisect_left(SECONDS, seconds)] += 1
        self.sums[values] = self.sums.get(values, 0.0) + seconds

    def lines(self) -> list[str]:
        made: list[str] = []
        for values, counts in sorted(self.counts.items()):
            total = 0
            for bound, count in zip((*SECONDS, float("inf")), counts, strict=True):
                total += count
                where = _labels((*self.labels, "le"), (*values, _number(bound)))
                made.append(f"{self.name}_bucket{where} {total}")
            made.append(f"{self.name}_sum{_labels(self.labels, values)} {_number(self.sums[values])}")
            made.append(f"{self.name}_count{_labels(self.labels, values)} {total}")
        return made


class Metrics:
    """All numbers of one process."""

    def __init__(self) -> None:
        self.created = Counter("created_total", "Sandboxes that were made.", "backend")
        self.refused = Counter(
            "refused_total",
            "Sandboxes that were not made, by limit or kind of error.",
            "backend",
            "reason",
        )
        self.create = Histogram("create_seconds", "Making a sandbox, until it takes commands.", "backend")
        self.exec = Histogram("exec_seconds", "Commands of exec, from request to result.", "backend")
        self.ended = Counter("commands_total", "Commands that ended, by outcome.", "backend", "outcome")
        self.killed = Counter("killed_total", "Commands that were killed, by reason.", "backend", "reason")
        self.pool = Counter("pool_total", "Claims from warm pools: hit or miss.", "backend", "claim")
        self._providers: WeakSet[Any] = WeakSet()

    @contextlib.contextmanager
    def creating(self, provider: Counted) -> Generator[None]:
        """Around the making of one sandbox."""
        self._providers.add(provider)
        began = time.perf_counter()
        try:
            yield
        except AdmissionRefused as refused:
            self.refused.add(provider.name, refused.limit)
            raise
        except PolicyUnsupported:
            self.refused.add(provider.name, "policy")
            raise
        except SandboxUnavailable:
            self.refused.add(provider.name, "unavailable")
            raise
        self.created.add(provider.name)
        self.create.observe(time.perf_counter() - began, provider.name)

    def finished(self, backend: str, result: ExecResult, seconds: float | None = None) -> None:
        """A command ended. `seconds` of `exec` alone: a spawned process lives as long as somebody wants."""
        if not result.replayed:
            self._end(backend, result.outcome)
            if seconds is not None:
                self.exec.observe(seconds, backend)

    def cancelled(self, backend: str) -> None:
        """The task that waited for a command was cancelled, and so the command."""
        self._end(backend, Outcome.CANCELLED)

    def _end(self, backend: str, outcome: Outcome) -> None:
        self.ended.add(backend, outcome.value)
        if outcome in KILLS:
            self.killed.add(backend, outcome.value)

    def claimed(self, backend: str, *, hit: bool) -> None:
        """Somebody asked a pool for a sandbox that it keeps."""
        self.pool.add(backend, "hit" if hit else "miss")

    def render(self) -> str:
        """The page."""
        alive = Gauge("alive", "Sandboxes of this process that are alive.", "backend")
        logs = Gauge("log_bytes", "Bytes of all logs in an image store that this process uses.", "store")
        providers: list[Counted] = list(self._providers)
        for provider in providers:
            alive.add(provider.name, amount=provider.living())
        for root in {provider.images.root for provider in providers}:
            logs.add(str(root), amount=_size(root / "logs"))
        families: Iterable[Counter | Histogram] = (
            self.created, self.refused, alive, self.create, self.exec, self.ended, self.killed, self.pool,
            logs,
        )  # fmt: skip
        made: list[str] = []
        for family in families:
            made += [f"# HELP {family.name} {family.text}", f"# TYPE {family.name} {family.kind}"]
            made += family.lines()
        return "\n".join(made) + "\n"


METRICS = Metrics()
"""Of this process. (There is one, as there is one process: whoever makes sandboxes need not pass it on.)"""


@contextlib.asynccontextmanager
async def serve(port: int = 0, metrics: Metrics = METRICS) -> AsyncGenerator[str]:
    """Show the page on 127.0.0.1 while the context is open; its URL. Port 0 takes a free one.

    OSError if the port is taken.
    """
    server = await asyncio.start_server(functools.partial(_answer, metrics), "127.0.0.1", port)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics"
    finally:
        server.close()
        await server.wait_closed()


async def _answer(metrics: Metrics, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request a connection, HTTP/1.1 (RFC 9112)."""
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
            method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
            path = rest.partition(b" ")[0].partition(b"?")[0]
            if method not in (b"GET", b"HEAD"):
                status, body = "405 Method Not Allowed", b"only GET\n"
            elif path != b"/metrics":
                status, body = "404 Not Found", b"see /metrics\n"
            else:
                status, body = "200 OK", metrics.render().encode()
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n".encode()
                + (body if method != b"HEAD" else b"")
            )
            await writer.drain()
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass  # whoever asked is gone, or is no HTTP client
    finally:
        writer.close()


def _size(folder: Path) -> int:
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.name.endswith(".jsonl"))
    except FileNotFoundError:  # no log yet, or one that was just pruned: the next scrape knows
        return 0


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True))
    return f"{{{pairs}}}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if value == int(value) else repr(value)
