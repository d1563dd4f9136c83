"""The numbers of real sandboxes, as a scraper reads them."""

from __future__ import annotations

import asyncio
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from sandbox import metrics
from sandbox.admission import Admission
from sandbox.base import AdmissionRefused, SandboxSpec
from sandbox.namespace import NamespaceProvider
from sandbox.pool import WarmPool

LINE = re.compile(r'([a-z_]+)(\{(?:[a-z]+="(?:[^"\\\n]|\\[\\n"])*",?)*\})? ([0-9.e+-]+|\+Inf)')


def read(page: str) -> dict[str, float]:
    """Every sample of a page; asserts that the page is well formed and its histograms are cumulative."""
    found: dict[str, float] = {}
    types: dict[str, str] = {}
    assert page.endswith("\n")
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            assert name not in types
            types[name] = kind
        elif not line.startswith("# HELP "):
            match = LINE.fullmatch(line)
            assert match, line
            family = match[1] if match[1] in types else match[1].rpartition("_")[0]
            assert family in types, f"{line} comes before its type"
            found[match[1] + (match[2] or "")] = float(match[3])
    for name, value in found.items():
        if name.endswith('le="+Inf"}'):
            series, labels = name.split("_bucket{")
            count = series + "_count{" + labels.replace(',le="+Inf"', "")
            assert found[count] == value
            bounds = [found[each] for each in found if each.startswith(name.removesuffix('"+Inf"}'))]
            assert bounds == sorted(bounds)
            assert value > 0
    return found


async def get(url: str, method: str = "GET") -> str:
    def fetch() -> str:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            return answer.read().decode()

    return await asyncio.to_thread(fetch)


def change(before: dict[str, float], after: dict[str, float], sample: str) -> float:
    name = f"posttrain_sandbox_{sample}"
    return after.get(name, 0) - before.get(name, 0)


async def test_what_sandboxes_did_is_counted(tmp_path: Path) -> None:
    async with metrics.serve() as url:
        before = read(await get(url))
        async with NamespaceProvider(tmp_path, admission=Admission(sandboxes=2)) as provider:
            spec = SandboxSpec(image=provider.images.host_base(), memory_mb=64)
            one, two = await provider.create(spec), await provider.create(spec)
            with pytest.raises(AdmissionRefused):
                await provider.create(spec)
            await one.exec("true")
            await one.exec("exit 3")
            for _ in range(2):
                await one.exec("echo once", key="k")
            await one.exec("sleep 60", timeout=0.2)
            waiting = asyncio.create_task(one.exec("sleep 60"))
            await asyncio.sleep(0.3)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            server = await one.spawn("cat")
            await server.close_stdin()
            await server.wait()
            await two.close()
            during = read(await get(url))
        after = read(await get(url))
    backend = 'backend="namespace"'
    seen = {
        sample: change(before, during, sample)
        for sample in (
            f"created_total{{{backend}}}", f'refused_total{{{backend},reason="sandboxes"}}',
            f"create_seconds_count{{{backend}}}", f"exec_seconds_count{{{backend}}}",
            f'commands_total{{{backend},outcome="exited"}}', f'killed_total{{{backend},reason="timeout"}}',
            f'killed_total{{{backend},reason="cancelled"}}', f'killed_total{{{backend},reason="exited"}}',
        )
    }  # fmt: skip
    assert list(seen.values()) == [2, 1, 2, 4, 4, 1, 1, 0], seen
    assert change(before, during, f"alive{{{backend}}}") == 1
    assert change(before, after, f"alive{{{backend}}}") == 0
    assert change(before, during, f"exec_seconds_sum{{{backend}}}") > 0.2
    size = sum(path.stat().st_size for path in (tmp_path / "logs").glob("*.jsonl"))
    assert after[f'posttrain_sandbox_log_bytes{{store="{tmp_path}"}}'] == size > 0


async def test_pools_count_hits_and_misses(provider: NamespaceProvider) -> None:
    before = read(metrics.METRICS.render())
    spec = SandboxSpec(image=provider.images.host_base(), memory_mb=64)
    async with WarmPool(provider) as pool:
        await pool.keep(spec, 1)
        boxes = [await pool.create(spec), await pool.create(spec)]
        hits, misses = pool.counts().values()
        await asyncio.gather(*(box.close() for box in boxes))
    after = read(metrics.METRICS.render())
    for claim, number in (("hit", hits), ("miss", misses)):
        assert change(before, after, f'pool_total{{backend="namespace",claim="{claim}"}}') == number
    assert hits >= 1


async def test_only_one_page_for_this_machine_alone() -> None:
    async with metrics.serve() as url:
        assert url.startswith("http://127.0.0.1:")
        assert await get(url, "HEAD") == ""
        for wrong, method, code in (("/", "GET", 404), ("/metrics", "POST", 405)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                await get(url.replace("/metrics", wrong), method)
            with refused.value:
                assert refused.value.code == code
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.split(":")[2].split("/")[0]))
        writer.write(b"no request")
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()


def test_label_values_are_escaped() -> None:
    counter = metrics.Counter("x_total", "X.", "a")
    counter.add('back\\slash "quoted"\nline')
    assert counter.lines() == ['posttrain_sandbox_x_total{a="back\\\\slash \\"quoted\\"\\nline"} 1']


def test_a_duration_on_a_bound_belongs_to_its_bucket() -> None:
    histogram = metrics.Histogram("x_seconds", "X.", "a")
    for seconds in (0.001, 0.0011, 1000.0):
        histogram.observe(seconds, "b")
    samples = read("# TYPE posttrain_sandbox_x_seconds histogram\n" + "\n".join(histogram.lines()) + "\n")
    name = 'posttrain_sandbox_x_seconds_bucket{a="b",le="%s"}'
    assert [samples[name % bound] for bound in ("0.001", "0.0025", "300", "+Inf")] == [1, 2, 2, 3]
