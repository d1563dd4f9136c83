"""Admission and the warm pool: what fits, and what is ready."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.admission import Admission
from sandbox.base import AdmissionRefused, Sandbox, SandboxSpec
from sandbox.namespace import NamespaceProvider
from sandbox.pool import WarmPool


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_full_node_refuses_by_type(tmp_path: Path) -> None:
    admission = Admission(sandboxes=3)
    async with (
        NamespaceProvider(tmp_path, admission=admission) as one,
        NamespaceProvider(tmp_path, admission=admission) as two,
    ):
        spec = SandboxSpec(image=one.images.host_base(), memory_mb=64)
        boxes = [await one.create(spec), await two.create(spec), await two.create(spec)]
        for provider in (one, two):
            with pytest.raises(AdmissionRefused, match="the limit is 3") as refused:
                await provider.create(spec)
            assert refused.value.limit == "sandboxes"
        assert len(await one.list("default")) == 3
        await boxes[0].close()
        async with await two.create(spec) as box:
            assert (await box.exec("echo on")).ok


async def test_memory_is_overcommitted_up_to_the_limit(tmp_path: Path) -> None:
    async with NamespaceProvider(tmp_path, admission=Admission(overcommit=0.02)) as provider:
        small = SandboxSpec(image=provider.images.host_base(), memory_mb=32)
        async with await provider.create(small):
            with pytest.raises(AdmissionRefused, match="overcommit") as refused:
                await provider.create(dataclasses.replace(small, memory_mb=1 << 20))
            assert refused.value.limit == "memory"
    async with NamespaceProvider(tmp_path, admission=Admission(available_mb=1 << 30)) as provider:
        with pytest.raises(AdmissionRefused, match="must stay") as refused:
            await provider.create(small)
        assert refused.value.limit == "available_memory"
    assert list((tmp_path / "run").glob("*.json")) == []
    assert len(list((tmp_path / "logs").glob("*.jsonl"))) == 1, "a sandbox that never was has a log"


async def test_a_killed_nodelet_promises_nothing(tmp_path: Path) -> None:
    admission = Admission(sandboxes=1)
    async with NamespaceProvider(tmp_path, admission=admission) as mortal:
        spec = SandboxSpec(image=mortal.images.host_base(), memory_mb=64)
        await mortal.create(spec)
        assert mortal._nodelet is not None
        async with NamespaceProvider(tmp_path, admission=admission) as heir:
            with pytest.raises(AdmissionRefused):
                await heir.create(spec)
            os.kill(mortal._nodelet.pid, signal.SIGKILL)
            await asyncio.sleep(0.1)
            async with await heir.create(spec) as box:
                assert (await box.exec("echo on")).ok


async def test_a_pool_hands_out_what_is_ready_once(provider: NamespaceProvider) -> None:
    spec = SandboxSpec(image=provider.images.host_base(), memory_mb=64)

    async def prepare(box: Sandbox) -> None:
        await box.exec("echo warm > /tmp/warm")

    async with WarmPool(provider) as pool:
        await pool.keep(spec, 2, prepare=prepare)
        assert pool.ready(spec) == 2
        boxes = [await pool.create(spec) for _ in range(2)]
        assert len({box.id for box in boxes}) == 2
        for box in boxes:
            assert (await box.exec("cat /tmp/warm")).stdout == b"warm\n"
        await until(lambda: pool.ready(spec) == 2)
        other = await pool.create(dataclasses.replace(spec, pids=50))
        assert not (await other.exec("cat /tmp/warm")).ok, "another spec got a warmed sandbox"
        assert pool.counts() == {"claimed": 2, "missed": 0}
        assert len(await provider.list(spec.owner)) == 5, "the pool made more than it was asked for"
    assert len(await provider.list(spec.owner)) == 3
    assert await boxes[0].alive(), "closing the pool closed a claimed sandbox"


async def test_a_pool_throws_away_what_died(provider: NamespaceProvider) -> None:
    spec = SandboxSpec(image=provider.images.host_base(), memory_mb=64)
    async with WarmPool(provider) as pool:
        await pool.keep(spec, 1)
        (info,) = await provider.list(spec.owner)
        await provider.kill(info.id)
        async with await pool.create(spec) as box:
            assert box.id != info.id
            assert (await box.exec("echo on")).ok


async def test_a_full_node_leaves_the_pool_smaller(tmp_path: Path) -> None:
    async with NamespaceProvider(tmp_path, admission=Admission(sandboxes=2)) as provider:
        spec = SandboxSpec(image=provider.images.host_base(), memory_mb=64)
        async with WarmPool(provider) as pool:
            await pool.keep(spec, 5)
            assert pool.ready(spec) == 2
            async with await pool.create(spec) as box:
                assert (await box.exec("echo on")).ok
            await until(lambda: pool.ready(spec) == 2)
