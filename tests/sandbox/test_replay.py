"""A sandbox's log, run again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox.log import SandboxLog
from sandbox.namespace import NamespaceProvider, NamespaceSandbox
from sandbox.replay import Step, replay
from sandbox.trees import pack_files


async def pieces() -> AsyncIterator[bytes]:
    yield b"streamed"


async def verdicts(provider: NamespaceProvider, store: Path, id: str) -> list[Step]:
    log = SandboxLog(store, id)
    steps = [step async for step in replay(provider, log)]
    log.close()
    return steps


async def test_what_is_deterministic_comes_out_the_same(
    box: NamespaceSandbox, provider: NamespaceProvider, store: Path
) -> None:
    await box.write("in.txt", b"data\xff" * 2000, mode=0o600)
    await box.put_tree("tree", pack_files({"a/b": b"x"}))
    await box.exec("sha256sum in.txt; ls -R tree; pwd; id -u; echo bad >&2; exit 3")
    await box.exec("cat > got; cat got", stdin=b"typed", env={"A": "1"}, cwd="tree")
    await box.exec("echo once >> n", key="k")
    await box.exec("echo once >> n", key="k")
    await box.exec("cat n; sleep 30", timeout=0.4)
    await box.exec("kill -SEGV $$", user="root")
    with contextlib.suppress(IsADirectoryError):
        await box.write("tree", b"x")
    await box.snapshot()
    steps = await verdicts(provider, store, box.id)
    assert [step.verdict for step in steps] == ["same"] * len(steps), [step.differences for step in steps]
    assert len(steps) == 9, "a recalled key is no second command"


async def test_what_differs_is_named(box: NamespaceSandbox, provider: NamespaceProvider, store: Path) -> None:
    await box.exec("head -c 20 /dev/urandom | od; exit 2")
    await box.exec("cat /proc/sys/kernel/random/uuid > id")
    await box.exec("cat id")
    await box.snapshot()
    steps = await verdicts(provider, store, box.id)
    assert [step.verdict for step in steps] == ["differs", "same", "differs", "differs"]
    assert steps[0].differences == ("stdout",)
    assert steps[3].differences == ("image",)


async def test_what_the_log_does_not_hold_is_skipped(
    box: NamespaceSandbox, provider: NamespaceProvider, store: Path
) -> None:
    await box.write("file", pieces())
    await box.exec("cat", stdin=pieces())
    process = await box.spawn(["cat"])
    await process.close_stdin()
    await process.wait()
    task = asyncio.create_task(box.exec("sleep 30", key="k"))
    await asyncio.sleep(0.3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    steps = await verdicts(provider, store, box.id)
    assert [step.verdict for step in steps] == ["skipped"] * 4
    assert "cancelled" in steps[3].differences[0]


async def test_a_lost_end_is_unknown(box: NamespaceSandbox, provider: NamespaceProvider, store: Path) -> None:
    call = {"argv": ["true"], "cwd": "/", "user": "agent", "timeout": 5, "max_output": 10, "env": {}}
    box.log.start("exec", call)
    (step,) = await verdicts(provider, store, box.id)
    assert (step.verdict, step.result is not None) == ("unknown", True)


async def test_without_a_log_there_is_no_replay(provider: NamespaceProvider, store: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SandboxLog(store, "nothing")
