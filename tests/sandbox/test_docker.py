"""The docker backend against a real engine that this file starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox import check, escapes
from sandbox.admission import Admission
from sandbox.base import (
    AdmissionRefused,
    NetworkPolicy,
    Outcome,
    PolicyUnsupported,
    SandboxLost,
    SandboxSpec,
    SandboxUnavailable,
)
from sandbox.docker import DockerProvider
from sandbox.docker.images import reference
from sandbox.docker.places import Place
from sandbox.docker.private import PrivateEngine
from sandbox.network import proxy
from sandbox.node.contained import PLACE
from tests.sandbox.network.test_proxy import World

pytestmark = pytest.mark.services
CLIENT = """
import asyncio, sys
from pathlib import Path
from sandbox.base import SandboxSpec
from sandbox.docker import DockerProvider

async def main(store, url, lease):
    provider = DockerProvider(Path(store), url=url)
    spec = SandboxSpec(image=provider.images.host_base(), owner="killed", lease_s=float(lease) or None)
    print("making", flush=True)
    box = await provider.create(spec)
    await box.write("kept", b"kept\\n")
    await box.exec("setsid sleep 320 >/dev/null 2>&1 &")
    print(box.id, flush=True)
    await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


WHERE_IDS_MATTER = [
    each.title()
    for each in check.checks()
    if each.run.__module__.rpartition(".")[2] in ("containment", "files", "harm", "limits", "transfers")
]
"""The checks that an engine with remapped ids could break; one as it comes gets all of them."""


@pytest.fixture(scope="module", params=["remapped", "plain"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateEngine]:
    """One whose containers have other ids than the host, and one as it comes out of the box."""
    with PrivateEngine(tmp_path_factory.mktemp("engine"), remap=request.param == "remapped") as running:
        yield running


@pytest.fixture
async def provider(store: Path, engine: PrivateEngine) -> AsyncIterator[DockerProvider]:
    async with DockerProvider(store, url=engine.url) as made:
        yield made


def small(provider: DockerProvider, **changes: Any) -> SandboxSpec:
    return SandboxSpec(
        **{"image": provider.images.host_base(), "memory_mb": 128, "pids": 32, "disk_mb": 16, **changes}
    )


def containers(provider: DockerProvider, owner: str) -> list[dict[str, Any]]:
    return provider.engine.api.containers(all=True, filters={"label": f"posttrain.owner={owner}"})


def client_of(store: Path, engine: PrivateEngine, lease: float) -> subprocess.Popen[str]:
    """Another client, which is just about to make a sandbox."""
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(store), engine.url, str(lease)], stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "making\n"
    return client


def killed_client(store: Path, engine: PrivateEngine, lease: float) -> str:
    """The id of a sandbox whose client was killed with -9 just after it made it."""
    client = client_of(store, engine, lease)
    assert client.stdout is not None
    with client.stdout:
        id = client.stdout.readline().strip()
    client.send_signal(signal.SIGKILL)
    client.wait()
    assert id
    return id


@pytest.mark.parametrize("engine", ["remapped"], indirect=True)
@pytest.mark.parametrize("name", WHERE_IDS_MATTER)
async def test_conformance(provider: DockerProvider, name: str) -> None:
    settings = {"url": provider.engine.url}
    (result,) = await check.run(provider, provider.images.host_base(), [name], settings=settings)
    assert result.status != "failed", result.detail


@pytest.mark.parametrize("engine", ["remapped"], indirect=True)
@pytest.mark.parametrize("name", [attempt.name for attempt in escapes.attempts()])
async def test_nothing_escapes(provider: DockerProvider, name: str) -> None:
    results = await escapes.run(provider, provider.images.host_base(), [name])
    assert [result for result in results if result.status != "contained"] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["plain"], indirect=True)
@pytest.mark.parametrize("command", ["check", "escape"])
def test_the_command_proves_an_engine_as_it_comes(
    engine: PrivateEngine, tmp_path: Path, command: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "console", "sandbox", command, "docker", "--json"],
        env={**os.environ, "DOCKER_HOST": engine.url, "POSTTRAIN_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    results = found["checks"] if command == "check" else found
    assert {result["status"] for result in results} <= {"passed", "contained", "not applicable"}
    assert len(results) >= (60 if command == "check" else 80)


async def test_nothing_is_left(provider: DockerProvider, store: Path) -> None:
    await provider.reap("check-mortal")
    async with await provider.create(small(provider, owner="left")):
        assert len(containers(provider, "left")) == 1
    assert containers(provider, "left") == []
    assert not any((store / "docker").iterdir())


async def test_limits_are_in_force(provider: DockerProvider) -> None:
    async with await provider.create(small(provider, owner="limits")) as box:
        (found,) = containers(provider, "limits")
        host = provider.engine.api.inspect_container(found["Id"])["HostConfig"]
        assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (128 << 20, 128 << 20, 33)
        assert host["ReadonlyRootfs"]
        assert host["NetworkMode"] == "none"
        assert (await box.exec("df -k --output=size / | tail -1")).stdout.strip() == b"16384"


async def test_images_are_loaded_once_and_share_layers(provider: DockerProvider, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("below\n")
    below = provider.images.add_layer(provider.images.host_base(), tmp_path, at="/opt/below")
    (tmp_path / "file").write_text("above\n")
    above = provider.images.add_layer(below, tmp_path, at="/opt/above")
    for image in (above, below, above):
        async with await provider.create(small(provider, image=image)) as box:
            assert (await box.exec("cat /opt/below/file")).stdout == b"below\n"
    api = provider.engine.api
    layers = {image: api.inspect_image(reference(image))["RootFS"]["Layers"] for image in (below, above)}
    assert layers[above][:2] == layers[below]
    made = api.inspect_image(reference(above))["Id"]
    api.remove_image(reference(above), force=True)
    async with (
        DockerProvider(provider.images, url=provider.engine.url) as other,
        await other.create(small(provider, image=above)),
    ):
        assert api.inspect_image(reference(above))["Id"] == made, "the same image has another digest"


async def test_an_image_that_the_engine_lost_is_loaded_again(provider: DockerProvider) -> None:
    spec = small(provider)
    async with await provider.create(spec):
        pass
    provider.engine.api.remove_image(reference(spec.image), force=True)
    async with await provider.create(spec) as box:
        assert (await box.exec("echo on")).stdout == b"on\n"


async def test_collected_images_leave_the_engine(provider: DockerProvider) -> None:
    async with await provider.create(small(provider)) as box:
        await box.exec("echo collected > file")
        image = await box.snapshot()
    async with await provider.create(small(provider, image=image)):
        pass
    await provider.reap("nobody")
    assert provider.engine.has_image(reference(image))
    (provider.images.blobs.path(image)).unlink()
    await provider.reap("nobody")
    assert not provider.engine.has_image(reference(image))
    assert provider.engine.has_image(reference(provider.images.host_base()))


async def test_others_are_never_touched(provider: DockerProvider) -> None:
    api = provider.engine.api
    empty = io.BytesIO()
    with tarfile.open(fileobj=empty, mode="w"):
        pass
    made = json.loads(api.import_image_from_data(empty.getvalue(), repository="foreign"))["status"]
    foreign = api.create_container(made, command=["/none"], labels={"posttrain.owner": "mine-too"})["Id"]
    try:
        async with await provider.create(small(provider, owner="mine")) as box:
            async with DockerProvider(provider.images, url=provider.engine.url) as other:
                assert await other.reap("mine") == 0
                assert await other.reap("min") == 0
                assert await other.list("mine-too") == []
                assert [info.id for info in await other.list("mine")] == [box.id]
            assert (await box.exec("echo on")).stdout == b"on\n"
        assert await provider.reap("mine") == 0
        assert api.inspect_container(foreign)["State"]["Status"] == "created"
    finally:
        api.remove_container(foreign)


async def test_a_sandbox_ends_with_its_killed_client(
    provider: DockerProvider, store: Path, engine: PrivateEngine
) -> None:
    id = killed_client(store, engine, 0)
    async with asyncio.timeout(20):
        while await provider.list("killed"):
            await asyncio.sleep(0.05)
    with pytest.raises(SandboxLost):
        await provider.attach(id)
    assert len(containers(provider, "killed")) == 1
    assert await provider.reap("another") == 0
    assert await provider.reap("killed") == 1
    assert containers(provider, "killed") == []
    assert not (store / "docker" / id).exists()
    abandoned = Place(store, "abandoned")  # by a client that was killed before it had a container
    abandoned.make().close()
    assert not abandoned.is_orphan()
    abandoned.unlock()
    assert await provider.reap("another") == 0
    assert not abandoned.folder.exists()


async def test_a_lease_outlives_the_client(
    provider: DockerProvider, store: Path, engine: PrivateEngine
) -> None:
    id = killed_client(store, engine, 60)
    assert [(info.id, info.orphan) for info in await provider.list("killed")] == [(id, True)]
    assert await provider.reap("killed") == 0
    async with await provider.attach(id) as box:
        assert (await box.exec("cat kept")).stdout == b"kept\n"
        assert b"sleep" in (await box.exec("cat /proc/[0-9]*/comm")).stdout
        assert [info.orphan for info in await provider.list("killed")] == [False]
        async with DockerProvider(store, url=engine.url) as other:
            guest = await other.attach(id)
            assert (await guest.exec("cat kept")).stdout == b"kept\n"
            await guest.close()
        assert (await box.exec("cat kept")).stdout == b"kept\n", "a guest's close ended the sandbox"
    assert containers(provider, "killed") == []


async def test_clients_killed_at_any_instant_leave_nothing(
    provider: DockerProvider, store: Path, engine: PrivateEngine
) -> None:
    """Also half made containers, their folders and control groups go."""
    chance = random.Random(7)
    async with await provider.create(small(provider, owner="spared")) as spared:
        for _ in range(3):
            clients = [client_of(store, engine, 0) for _ in range(3)]
            for client in clients:
                await asyncio.sleep(chance.uniform(0, 0.5))
                client.kill()
                client.wait()
                assert client.stdout is not None
                client.stdout.close()
        async with asyncio.timeout(30):
            while containers(provider, "killed"):
                await provider.reap("killed")
                await asyncio.sleep(0.1)
        assert (await spared.exec("echo on")).stdout == b"on\n"
        assert [path.name for path in (store / "docker").iterdir()] == [spared.id]
    groups = [path for path in Path("/sys/fs/cgroup").glob(f"**/{engine.group}/*") if path.is_dir()]
    assert groups == [], "control groups are left"


async def test_a_lease_runs_out(provider: DockerProvider, store: Path, engine: PrivateEngine) -> None:
    killed_client(store, engine, 1)
    async with asyncio.timeout(20):
        while await provider.list("killed"):
            await asyncio.sleep(0.1)
    assert await provider.reap("killed") == 1


async def test_a_container_that_somebody_removes_is_lost(provider: DockerProvider) -> None:
    box = await provider.create(small(provider, owner="removed"))
    running = asyncio.create_task(box.exec("sleep 321"))
    await asyncio.sleep(0.2)
    provider.engine.api.remove_container(containers(provider, "removed")[0]["Id"], force=True)
    async with asyncio.timeout(10):
        assert (await running).outcome is Outcome.LOST
    with pytest.raises(SandboxLost):
        await box.exec("echo x")
    await box.close()


async def test_a_cancelled_creation_leaves_nothing(provider: DockerProvider, store: Path) -> None:
    for delay in (0.01, 0.05, 0.1):
        task = asyncio.create_task(provider.create(small(provider, owner="cancelled")))
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert containers(provider, "cancelled") == []
    assert not any((store / "docker").iterdir())


def system(folder: Path) -> Path:
    """A system of three programs and what they need; no Python."""
    programs = [shutil.which(name) or "" for name in ("sh", "cat", "ls")]
    listing = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    for file in (*programs, *re.findall(r"(/\S+\.so\S*) \(", listing)):
        target = folder / ("bin/" + Path(file).name if file in programs else file[1:])
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(file), target)
    return folder


async def test_an_image_needs_no_python(provider: DockerProvider, tmp_path: Path) -> None:
    image = provider.images.add_layer(None, system(tmp_path), owner="root")
    async with await provider.create(small(provider, image=image, disk_mb=64)) as box:
        assert (await box.exec("ls /usr/bin")).exit_code != 0, "the host's programs are visible"
        await box.exec("echo changed > file")
        kept = await box.snapshot()
    async with await provider.create(small(provider, image=kept)) as box:
        assert (await box.exec("cat file; ls -a /")).stdout.startswith(b"changed\n")


async def test_an_image_cannot_bend_the_start(provider: DockerProvider, tmp_path: Path) -> None:
    """What it has where our own files are shown, and any Python of its own, is not run as PID 1."""
    root = system(tmp_path)
    for place in (f"{PLACE[1:]}/code/sandbox/node", f"{PLACE[1:]}/host/usr/bin", "usr/lib/python3/json"):
        (root / place).mkdir(parents=True)
        for name in ("contained.py", "python3", "__init__.py"):
            (root / place / name).write_text("#!/bin/sh\necho bent > /bent\n")
            (root / place / name).chmod(0o755)
    image = provider.images.add_layer(
        None, root, owner="root", env={"LD_PRELOAD": "/bent", "PYTHONPATH": "/"}
    )
    async with await provider.create(small(provider, image=image, disk_mb=64)) as box:
        assert (await box.exec("cat /bent; echo on", env={"LD_PRELOAD": ""})).stdout == b"on\n"
    link = tmp_path / "link"
    link.mkdir()
    (link / PLACE[1:]).symlink_to("workspace")
    image = provider.images.add_layer(provider.images.host_base(), link, owner="root")
    with contextlib.suppress(SandboxUnavailable):
        async with await provider.create(small(provider, image=image)) as box:
            assert (await box.exec("ls /workspace/host/usr")).stdout == b""


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
async def test_compressed_trees_arrive(provider: DockerProvider, mode: str) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # type: ignore[call-overload]
        member = tarfile.TarInfo("file")
        member.size = 3
        tar.addfile(member, io.BytesIO(b"abc"))
    async with await provider.create(small(provider)) as box:
        await box.put_tree("in", buffer.getvalue())
        assert await box.read("in/file") == b"abc"


async def test_nested_sandboxes_need_ids_of_their_own(provider: DockerProvider) -> None:
    spec = small(provider, nested=True)
    if not provider.capabilities().user_namespace:
        with pytest.raises(PolicyUnsupported, match="userns-remap"):
            await provider.create(spec)
        return
    async with await provider.create(spec) as box:
        inside = "mount -t proc -o ro proc /proc; mount -t tmpfs t /mnt; ls -d /proc/[0-9]*"
        jail = f"unshare -mpn --fork sh -c '{inside}'"
        inner = await box.exec(jail, user="root")
        assert inner.ok, inner.text
        assert inner.stdout == b"/proc/1\n", inner.text
        refused = await box.exec("true >> /proc/sys/kernel/core_pattern", user="root")
        assert not refused.ok, "root inside may write the kernel's settings"


async def test_a_full_node_refuses(store: Path, engine: PrivateEngine) -> None:
    async with DockerProvider(store, url=engine.url, admission=Admission(sandboxes=1)) as provider:
        async with await provider.create(small(provider)):
            with pytest.raises(AdmissionRefused) as refused:
                await provider.create(small(provider))
            assert refused.value.limit == "sandboxes"
        async with await provider.create(small(provider)):
            pass


async def test_an_allow_list_holds(provider: DockerProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import sys, urllib.request\n"
        "for url in sys.argv[1:]:\n"
        "  try: print(urllib.request.urlopen(url, timeout=10).status)\n"
        "  except OSError as error: print(getattr(error, 'code', 'lost'))\n"
    )
    urls = ["http://good.example/", "http://other.example/", "http://169.254.169.254/"]
    async with World() as world:
        monkeypatch.setattr(proxy, "addresses_of", world.resolve)
        monkeypatch.setattr(proxy, "connect", world.dial)
        spec = small(provider, network=NetworkPolicy("allow", ("good.example:80",)))
        async with await provider.create(spec) as box:
            assert (await box.exec(["python3", "-c", script, *urls])).stdout == b"200\n403\n403\n"
            await box.set_network(NetworkPolicy("none"))
            assert b"200" not in (await box.exec(["python3", "-c", script, *urls])).stdout


async def test_the_hosts_network_is_for_builds(provider: DockerProvider) -> None:
    names = ["python3", "-c", "import socket; print(sorted(name for _, name in socket.if_nameindex()))"]
    async with await provider.create(small(provider, network="host")) as box:
        here = sorted(name for _, name in socket.if_nameindex())
        assert (await box.exec(names)).stdout.decode().strip() == str(here)


async def test_what_cannot_be_enforced_is_refused(provider: DockerProvider) -> None:
    for change in ({"memory_mb": 8}, {"runtime": "no-such-runtime"}):
        with pytest.raises((PolicyUnsupported, SandboxUnavailable), match=r"32|no-such-runtime"):
            await provider.create(small(provider, owner="refused", **change))
    assert containers(provider, "refused") == []


async def test_without_an_engine(store: Path, tmp_path: Path) -> None:
    async with DockerProvider(store, url=f"unix://{tmp_path}/none.sock") as provider:
        with pytest.raises(SandboxUnavailable, match="no docker engine answers at unix://"):
            await provider.create(SandboxSpec(image=provider.images.host_base()))
    with pytest.raises(SandboxUnavailable, match="not on this machine"):
        DockerProvider(store, url="tcp://192.0.2.1:2375")


def test_an_engine_ends_with_its_starter(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from sandbox.docker.private import PrivateEngine\n"
        f"PrivateEngine(Path({str(tmp_path)!r}) / 'e').start(); print('up', flush=True); time.sleep(600)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert starter.stdout is not None
    with starter.stdout:
        assert starter.stdout.readline() == b"up\n"
    pid = int((tmp_path / "e/pid").read_text())
    starter.kill()
    starter.wait()
    for _ in range(400):
        if not os.path.exists(f"/proc/{pid}/cwd"):
            return
        signal.sigtimedwait([], 0.05)
    raise AssertionError("dockerd outlived the process that started it")
