"""Several clients, and clients that are killed: whose a sandbox is, and what is left of it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from sandbox.base import PolicyUnsupported, SandboxLost
from sandbox.check import Bench, Check

_ROOT = Path(__file__).resolve().parents[2]
_SECONDS = 60.0
_CLIENT = """
import asyncio, json, sys
from pathlib import Path
from sandbox.base import SandboxSpec, provider
async def main():
    name, store, settings, image, owner, lease = json.loads(sys.argv[1])
    made = provider(name, store=Path(store), **settings)
    spec = SandboxSpec(image=image, owner=owner, lease_s=lease, memory_mb=128, pids=64, disk_mb=32)
    boxes = [await made.create(spec) for _ in range(2)]
    for box in boxes:
        await box.exec("sleep 323 >/dev/null 2>&1 & echo kept > kept")
    if lease is not None:
        await boxes[0].exec("echo first >> story; cat story", key="one")
    print(json.dumps([box.id for box in boxes]), flush=True)
    if lease is not None:
        await boxes[0].exec("sleep 2; echo second >> story; cat story", key="two")
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def _killed_client(bench: Bench, owner: str, lease: float | None) -> list[str]:
    """The sandboxes of a client that was killed with -9 while they lived."""
    setting = [
        bench.provider.name,
        str(bench.provider.images.root),
        dict(bench.settings),
        bench.image,
        owner,
        lease,
    ]
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CLIENT, json.dumps(setting), stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, sys.path)])},
    )  # fmt: skip
    assert client.stdout is not None
    async with asyncio.timeout(_SECONDS):
        line = await client.stdout.readline()
    assert line, "the client made no sandbox"
    await asyncio.sleep(0.3)  # the keyed command is under way
    client.kill()
    await client.wait()
    return json.loads(line)


async def _until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    try:
        async with asyncio.timeout(_SECONDS):
            while not await condition():
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(what) from None


async def a_killed_client_leaves_nothing(bench: Bench) -> None:
    """After kill -9 its sandboxes end by themselves or are reaped, and never another owner's."""
    owner, other = f"{bench.owner}-mortal", f"{bench.owner}-mortal-other"
    async with bench.box(owner=other) as spared:
        ids = await _killed_client(bench, owner, None)

        async def gone() -> bool:
            await bench.provider.reap(owner)
            return await bench.provider.list(owner) == []

        await _until(gone, "sandboxes of a killed client live on")
        for id in ids:
            try:
                await bench.provider.attach(id)
            except SandboxLost:
                continue
            raise AssertionError("a reaped sandbox could be attached")
        assert (await spared.exec("echo on")).stdout == b"on\n", "another owner's sandbox was reaped"


async def a_lease_outlives_its_client(bench: Bench) -> None:
    """Within the lease a new client finds files, processes and finished commands, and nothing runs twice."""
    owner = f"{bench.owner}-leased"
    ids = await _killed_client(bench, owner, 60)
    await bench.provider.reap(owner)
    found = {info.id: info.orphan for info in await bench.provider.list(owner)}
    assert found == dict.fromkeys(ids, True), f"listed {found}, not {ids}"
    boxes = [await bench.provider.attach(id) for id in ids]
    one = await boxes[0].exec("echo first >> story; cat story", key="one")
    assert (one.stdout, one.replayed) == (b"first\n", True), one
    two = await boxes[0].exec("sleep 2; echo second >> story; cat story", key="two")
    assert (two.stdout, two.replayed) == (b"first\nsecond\n", True), two
    assert (await boxes[0].exec("cat story")).stdout == b"first\nsecond\n", "a keyed command ran twice"
    assert (await boxes[1].exec("cat kept")).stdout == b"kept\n"
    for box in boxes:
        await box.close()

    async def gone() -> bool:
        return await bench.provider.list(owner) == []

    await _until(gone, "an inherited sandbox could not be closed")


async def a_lease_ends(bench: Bench) -> None:
    """After the lease the sandbox ends by itself, or the next reap ends it."""
    owner = f"{bench.owner}-over"
    await _killed_client(bench, owner, 1.5)

    async def gone() -> bool:
        await bench.provider.reap(owner)
        return await bench.provider.list(owner) == []

    await _until(gone, "a sandbox outlives its lease")


async def owners_are_compared_exactly(bench: Bench) -> None:
    """An owner whose name begins, ends or contains another's neither lists nor reaps the other's."""
    names = ("own", "own-er", "er", "Own", "own_er")
    async with bench.box(owner="own-er") as box:
        for name in names:
            listed = {info.id for info in await bench.provider.list(name)}
            assert (box.id in listed) == (name == "own-er"), f"{name} lists {listed}"
            await bench.provider.reap(name)
        assert (await box.exec("echo on")).stdout == b"on\n"


async def two_clients_do_not_collide(bench: Bench) -> None:
    """Two clients of one owner make sandboxes at once; one that closes takes only its own along."""
    spec = bench.spec()
    async with bench.another() as other:
        made = await asyncio.gather(*(p.create(spec) for p in (bench.provider, other) for _ in range(4)))
        assert len({box.id for box in made}) == 8, "two sandboxes have one id"
        await asyncio.gather(*(box.write("who", box.id.encode()) for box in made))
        await other.close()
        for box in made[:4]:
            assert (await box.exec("cat who")).stdout == box.id.encode(), "a neighbour's client took it along"
        await asyncio.gather(*(box.close() for box in made))


async def another_client_attaches(bench: Bench) -> None:
    """A guest shares the sandbox and only detaches; its creator's close ends it for both."""
    async with bench.box(env={"A": "1"}) as box, bench.another() as other:
        guest = await other.attach(box.id)
        await box.write("file", b"shared")
        assert (await guest.exec("cat file; echo $A")).stdout == b"shared1\n"
        await guest.close()
        assert (await box.exec("echo on")).stdout == b"on\n", "a guest's close ended the sandbox"
        again = await other.attach(box.id)
        await box.close()
        try:
            await again.exec("echo on")
        except SandboxLost:
            await again.close()
            return
        raise AssertionError("a closed sandbox served a guest")


async def a_failed_creation_leaves_nothing(bench: Bench) -> None:
    """Refused and failed creations leave no sandbox, and the next one works."""
    owner = f"{bench.owner}-failing"
    for changes, wanted in (
        ({"image": "sha256:" + "0" * 64}, KeyError),
        ({"workdir": "relative"}, PolicyUnsupported),
        ({"pids": 0}, PolicyUnsupported),
        ({"runtime": "no-such-runtime"}, Exception),
    ):
        try:
            async with await bench.provider.create(bench.spec(**{"owner": owner, **changes})):
                pass
        except wanted:
            assert await bench.provider.list(owner) == [], f"{changes} left a sandbox"
            continue
        raise AssertionError(f"{changes} was accepted")
    async with bench.box(owner=owner) as box:
        assert (await box.exec("echo on")).stdout == b"on\n"


async def a_cancelled_creation_leaves_nothing(bench: Bench) -> None:
    """A creation that is cancelled at any moment leaves no sandbox."""
    owner = f"{bench.owner}-cancelled"
    for delay in (0.0, 0.002, 0.01, 0.03, 0.1):
        task = asyncio.create_task(bench.provider.create(bench.spec(owner=owner)))
        await asyncio.sleep(delay)
        task.cancel()
        made = (await asyncio.gather(task, return_exceptions=True))[0]
        if not isinstance(made, BaseException):
            await made.close()

    async def gone() -> bool:
        return await bench.provider.list(owner) == []

    await _until(gone, "a cancelled creation left a sandbox")


async def capabilities_are_honest(bench: Bench) -> None:
    """Every limit that is not enforced stands in `unenforced` with a reason, and the handle says the same."""
    found = bench.provider.capabilities()
    lacking = [
        n for n in ("network_none", "memory_limit", "pids_limit", "disk_limit") if not getattr(found, n)
    ]
    assert len(found.unenforced) >= len(lacking), f"{lacking} are not explained by {found.unenforced}"
    assert all(len(reason) > 10 for reason in found.unenforced), found.unenforced
    assert "none" in found.networks or not found.network_none, found.networks
    async with bench.box() as box:
        assert box.capabilities == found, box.capabilities


CHECKS = [
    Check(a_killed_client_leaves_nothing),
    Check(a_lease_outlives_its_client, needs=("lease", "log", "attach")),
    Check(a_lease_ends, needs=("lease",)),
    Check(owners_are_compared_exactly),
    Check(two_clients_do_not_collide),
    Check(another_client_attaches, needs=("attach",)),
    Check(a_failed_creation_leaves_nothing),
    Check(a_cancelled_creation_leaves_nothing),
    Check(capabilities_are_honest),
]
