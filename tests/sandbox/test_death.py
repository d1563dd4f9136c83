"""What is left when processes are killed at any moment: nothing that the next reap does not remove."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.base import Outcome, SandboxLost, SandboxSpec
from sandbox.namespace import NamespaceProvider
from sandbox.namespace.probe import start_time

NUMBER = 100_000 + secrets.randbelow(900_000)
"""Names this run's processes on a machine where other runs may be under way."""
CLIENT = """
import asyncio, sys
from pathlib import Path

import pytest
from sandbox.base import SandboxSpec
from sandbox.namespace import NamespaceProvider
async def main():
    provider = NamespaceProvider(Path(sys.argv[1]))
    spec = SandboxSpec(image=provider.images.host_base(), owner="mortal")
    boxes = [await provider.create(spec) for _ in range(3)]
    for box in boxes:
        await box.exec("setsid sleep {number} & echo x")
    print(provider._nodelet.pid, flush=True)
    await boxes[0].exec("setsid sleep {number}", timeout=None)
asyncio.run(main())
""".replace("{number}", str(NUMBER))


async def start_client(store: Path) -> tuple[asyncio.subprocess.Process, int]:
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, str(store), stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert client.stdout is not None
    return client, int(await client.stdout.readline())


def sleepers() -> int:
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += path.read_bytes() == f"sleep\0{NUMBER}\0".encode()
        except (FileNotFoundError, ProcessLookupError):
            continue
    return count


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


async def test_killed_client_takes_its_sandboxes_along(store: Path, provider: NamespaceProvider) -> None:
    client, nodelet = await start_client(store)
    assert len(await provider.list("mortal")) == 3
    await until(lambda: sleepers() == 4)
    client.kill()
    await client.wait()
    await until(lambda: sleepers() == 0)
    await until(lambda: start_time(nodelet) is None)
    assert await provider.list("mortal") == []
    assert await provider.reap("mortal") == 0, "the nodelet left records"


async def test_reap_removes_what_a_killed_nodelet_left(store: Path, provider: NamespaceProvider) -> None:
    client, nodelet = await start_client(store)
    records = [json.loads(path.read_text()) for path in (store / "run").glob("*.json")]
    groups = [Path(parent) / each["group"] for each in records for parent in each["groups"]]
    await until(lambda: sleepers() == 4)
    os.kill(nodelet, signal.SIGKILL)
    client.kill()
    await until(lambda: sleepers() == 0)
    await client.wait()
    assert await provider.reap("someone-else") == 0
    assert await provider.reap("mortal") == 3
    assert not any(group.exists() for group in groups)


async def test_provider_survives_its_nodelet(provider: NamespaceProvider) -> None:
    spec = SandboxSpec(image=provider.images.host_base(), owner="orphan")
    box = await provider.create(spec)
    task = asyncio.create_task(box.exec("sleep 4322"))
    await asyncio.sleep(0.2)
    assert provider._nodelet is not None
    provider._nodelet.kill()
    assert (await task).outcome is Outcome.LOST
    await box.close()
    async with await provider.create(spec) as again:
        assert (await again.exec("echo on")).ok
        assert await provider.reap("orphan") == 1, "the control group of the first stayed"
        assert (await again.exec("echo on")).ok


async def test_closing_leaves_no_descriptor_or_group(store: Path) -> None:
    provider = NamespaceProvider(store)
    before = set(os.listdir("/proc/self/fd"))
    boxes = [await provider.create(SandboxSpec(image=provider.images.host_base())) for _ in range(5)]
    records = [json.loads((store / "run" / f"{box.id}.json").read_text()) for box in boxes]
    groups = [Path(parent) / each["group"] for each in records for parent in each["groups"]]
    for box in boxes:
        await box.exec("sleep 4323 & echo x")
        await box.spawn(["cat"])
        await box.write("f", b"x")
    await provider.close()
    assert not any(group.exists() for group in groups)
    assert set(os.listdir("/proc/self/fd")) == before
    assert not any((store / "run" / f"{box.id}.json").exists() for box in boxes)


async def test_a_sandbox_that_no_longer_answers_is_given_up(
    provider: NamespaceProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.namespace.process.GRACE_SECONDS", 0.5)
    box = await provider.create(SandboxSpec(image=provider.images.host_base()))
    assert provider._nodelet is not None
    nodelet = provider._nodelet.pid
    (init,) = Path(f"/proc/{nodelet}/task/{nodelet}/children").read_text().split()
    os.kill(int(init), signal.SIGSTOP)
    result = await box.exec("echo on", timeout=0.2)
    assert (result.outcome, result.repercussion) == (Outcome.LOST, None), (
        "a stopped init is no fault of an agent"
    )
    assert not await box.alive()
    with pytest.raises(SandboxLost) as lost:
        await box.exec("echo on")
    assert lost.value.repercussion is None
    await box.close()
