"""From creation to removal: single use, idempotent close, nothing left."""

from __future__ import annotations

import asyncio

from sandbox.base import Outcome, SandboxLost, SandboxSpec
from sandbox.check import Bench, Check


async def workdir_exists_and_is_the_agents(bench: Bench) -> None:
    """The work folder is there and writable, also one that no image has."""
    for folder in ("/workspace", "/some/where"):
        async with bench.box(workdir=folder) as box:
            assert (await box.exec("touch file; pwd")).stdout == f"{folder}\n".encode()


async def close_is_idempotent(bench: Bench) -> None:
    """Closing twice is fine; using a closed sandbox raises SandboxLost."""
    async with bench.box() as box:
        await box.close()
        await box.close()
        try:
            await box.exec("echo x")
        except SandboxLost:
            return
    raise AssertionError("a closed sandbox ran a command")


async def close_ends_running_commands(bench: Bench) -> None:
    """A command under way ends as lost when its sandbox is closed."""
    async with bench.box() as box:
        task = asyncio.create_task(box.exec("sleep 312"))
        await asyncio.sleep(0.2)
        await box.close()
        async with asyncio.timeout(10):
            result = await task
        assert result.outcome is Outcome.LOST, result


async def killing_everything_harms_only_itself(bench: Bench) -> None:
    """kill -9 of PID 1 and of all processes leaves the neighbour alone."""
    async with bench.box() as box, bench.box() as neighbour:
        for user in ("agent", "root"):
            result = await box.exec("kill -9 1; kill -9 -1; sleep 0.2; echo end", user=user, timeout=10)
            assert result.outcome in (Outcome.EXITED, Outcome.SIGNALED, Outcome.LOST, Outcome.OOM), result
        assert (await neighbour.exec("echo on")).stdout == b"on\n"


async def listed_while_alive(bench: Bench) -> None:
    """list shows own living sandboxes of that owner alone; attach finds them."""
    async with bench.box(owner="check-a") as one, bench.box(owner="check-b") as two:
        assert one.id in {info.id for info in await bench.provider.list("check-a")}
        assert two.id not in {info.id for info in await bench.provider.list("check-a")}
        again = await bench.provider.attach(one.id)
        assert (await again.exec("echo on")).stdout == b"on\n"
    assert one.id not in {info.id for info in await bench.provider.list("check-a")}
    try:
        await bench.provider.attach(one.id)
    except SandboxLost:
        return
    raise AssertionError("a closed sandbox could be attached")


async def reap_spares_the_living(bench: Bench) -> None:
    """reap touches neither living sandboxes nor other owners."""
    async with bench.box(owner="check-a") as one, bench.box(owner="check-b") as two:
        await bench.provider.reap("check-a")
        for box in (one, two):
            assert (await box.exec("echo on")).stdout == b"on\n"


async def unknown_image_is_an_error(bench: Bench) -> None:
    """An image that does not exist raises KeyError that names it."""
    image = "sha256:" + "0" * 64
    message = ""
    try:
        async with await bench.provider.create(SandboxSpec(image=image)):
            pass
    except KeyError as error:
        message = str(error)
    assert "0000" in message, f"the error is {message!r}"


async def fifty_sandboxes(bench: Bench) -> None:
    """Fifty at once, each with its own files."""

    async def one(number: int) -> bytes:
        async with bench.box(memory_mb=64, disk_mb=8) as box:
            await box.write("number", str(number).encode())
            await asyncio.sleep(0.3)
            return (await box.exec("cat number")).stdout

    results = await asyncio.gather(*(one(number) for number in range(50)))
    assert results == [str(number).encode() for number in range(50)], results


CHECKS = [
    Check(function)
    for function in (
        workdir_exists_and_is_the_agents, close_is_idempotent, close_ends_running_commands,
        killing_everything_harms_only_itself, listed_while_alive, reap_spares_the_living,
        unknown_image_is_an_error, fifty_sandboxes,
    )
]  # fmt: skip
