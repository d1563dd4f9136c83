"""Namespace sandboxes with an allow-list: the proxy is their only way, and it can be moved while they run."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import date
from pathlib import Path

import pytest

from sandbox.base import NetworkPolicy, PolicyUnsupported, Sandbox, SandboxSpec
from sandbox.namespace import NamespaceProvider
from sandbox.network import proxy
from sandbox.network.addresses import refusal
from tests.sandbox.network.test_proxy import World

FETCH = (
    "import sys, urllib.request\n"
    "try: print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())\n"
    "except urllib.error.HTTPError as e: print(e.code, e.read().decode())\n"
    "except OSError as e: print('lost', e)\n"
)
HOLD = """
import socket
s = socket.create_connection(("127.0.0.1", 3128))
s.sendall(b"CONNECT good.example:80 HTTP/1.1\\r\\n\\r\\n")
print(s.recv(99)[:12].decode(), flush=True)
print(s.recv(9), flush=True)
"""
SQUAT = """
import socket, time
s = socket.create_server(("127.0.0.1", 3128))
print(1, flush=True)
time.sleep(60)
"""
TLS = """
import ssl, urllib.request
context = ssl._create_unverified_context()
print(urllib.request.urlopen("https://pypi.org/simple/inflection/", context=context, timeout=30).status)
"""
GOOD = NetworkPolicy("allow", ("good.example:80",))


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """Stands for the internet, behind the proxy's resolver and dialler."""
    async with World() as made:
        monkeypatch.setattr(proxy, "addresses_of", made.resolve)
        monkeypatch.setattr(proxy, "connect", made.dial)
        yield made


async def fetch(box: Sandbox, url: str) -> str:
    result = await box.exec(["python3", "-c", FETCH, url])
    return result.text.strip()


async def test_the_proxy_is_the_only_way_out(provider: NamespaceProvider, world: World) -> None:
    spec = SandboxSpec(image=provider.images.host_base(), network=GOOD)
    async with await provider.create(spec) as box:
        assert await fetch(box, "http://good.example/") == "hi"
        assert "may not reach evil.example:80" in await fetch(box, "http://evil.example/")
        assert "may not reach 169.254.169.254:80" in await fetch(box, "http://169.254.169.254/")
        assert [attempt.target for attempt in box.attempts if attempt.reason is None] == ["good.example:80"]
        straight = 'unset http_proxy HTTP_PROXY; python3 -c "$0" http://good.example/'
        assert "lost" in (await box.exec(["/bin/sh", "-c", straight, FETCH])).text
        assert (await box.exec("cat /proc/net/route | tail -n +2; cat /etc/resolv.conf")).stdout == b""
        interfaces = await box.exec("ls /sys/class/net 2>/dev/null || cut -d: -f1 /proc/net/dev | tail -n +3")
        assert interfaces.stdout.split() in ([b"lo"], [])


async def test_a_living_sandbox_s_network_changes(provider: NamespaceProvider, world: World) -> None:
    async with await provider.create(SandboxSpec(image=provider.images.host_base())) as box:
        assert "lost" in await fetch(box, "http://good.example/")
        await box.set_network(GOOD)
        assert await fetch(box, "http://good.example/") == "hi"
        tunnel = await box.spawn(["python3", "-c", HOLD])
        assert await tunnel.readline() == b"HTTP/1.1 200\n"
        await box.set_network(NetworkPolicy("none"))
        assert await tunnel.readline() == b"b''\n"
        assert "lost" in await fetch(box, "http://good.example/")
        await box.set_network(GOOD)
        assert await fetch(box, "http://good.example/") == "hi"
        (child,) = await box.fork()
        async with child:
            assert await fetch(child, "http://good.example/") == "hi"
        with pytest.raises(PolicyUnsupported, match="to or from the host"):
            await box.set_network(NetworkPolicy("host"))
        async with NamespaceProvider(provider.images) as other:
            guest = await other.attach(box.id)
            with pytest.raises(PolicyUnsupported, match="only the client that made"):
                await guest.set_network(NetworkPolicy("none"))
            assert await fetch(guest, "http://good.example/") == "hi"
            await guest.close()


async def test_a_squatter_on_the_port_does_not_stop_it(provider: NamespaceProvider, world: World) -> None:
    async with await provider.create(SandboxSpec(image=provider.images.host_base())) as box:
        squatter = await box.spawn(["python3", "-c", SQUAT])
        await squatter.readline()
        await box.set_network(GOOD)
        assert await fetch(box, "http://good.example/") == "hi"


@pytest.mark.parametrize(
    "policy",
    [
        NetworkPolicy("none", ("a.example:80",)),
        NetworkPolicy("host", index_before=date(2024, 5, 1)),
        NetworkPolicy("allow", ("*",)),
        NetworkPolicy("allow", ("10.0.0.1:80",)),
        NetworkPolicy("allow", index_without=("tool",)),
    ],
)
async def test_contradictions_are_refused_before_anything_starts(
    provider: NamespaceProvider, policy: NetworkPolicy
) -> None:
    with pytest.raises(PolicyUnsupported):
        await provider.create(SandboxSpec(image=provider.images.host_base(), network=policy))
    assert await provider.list("default") == []


CLIENT = """
import asyncio, sys, time
from pathlib import Path
from sandbox.base import NetworkPolicy, SandboxSpec
from sandbox.namespace import NamespaceProvider

async def main():
    provider = NamespaceProvider(Path(sys.argv[1]))
    allow = NetworkPolicy("allow", ("good.example:80", "wide.example:80"))
    spec = SandboxSpec(image=provider.images.host_base(), network=allow, lease_s=60, owner="lease")
    box = await provider.create(spec)
    await box.set_network(NetworkPolicy("allow", ("good.example:80",)))
    print(box.id, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_whoever_inherits_a_sandbox_inherits_its_last_policy(store: Path, world: World) -> None:
    with subprocess.Popen([sys.executable, "-c", CLIENT, str(store)], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        id = client.stdout.readline().decode().strip()
        client.kill()
    async with NamespaceProvider(store) as provider, await provider.attach(id) as box:
        assert await fetch(box, "http://good.example/") == "hi"
        assert "may not reach wide.example" in await fetch(box, "http://wide.example/")


def trusted() -> tuple[str, ...]:
    """Networks that this machine's package index lies in, if it is a private mirror."""
    found = asyncio.run(proxy.addresses_of("pypi.org", 443))
    return tuple(f"{address}/32" for address in found if refusal(address))


@pytest.mark.services
@pytest.mark.timeout(600)
async def test_pip_installs_what_the_day_had_and_nothing_newer(store: Path) -> None:
    """A real pip against the real index, from inside: the newest release before the day, never the package
    under repair, and no other way to either."""
    policy = NetworkPolicy("allow", index_before=date(2024, 5, 1), index_without=("cachetools",))
    async with NamespaceProvider(store) as provider:
        spec = SandboxSpec(image=provider.images.host_base(), network=policy, memory_mb=1024)
        async with await provider.create(spec) as box:
            assert (await box.exec("python3 -m venv env", timeout=120)).ok
            done = await box.exec("env/bin/pip install more-itertools 'inflection<1'", timeout=120)
            assert done.ok, done.text
            listed = json.loads((await box.exec("env/bin/pip list --format=json")).stdout)
            assert {each["name"]: each["version"] for each in listed}["more-itertools"] == "10.2.0"
            for wanted, said in (
                ("more-itertools==10.5.0", "No matching distribution"),
                ("cachetools", "No matching distribution"),
                ("https://files.pythonhosted.org/packages/x/cachetools-8.0.2.tar.gz", "403"),
                ("--index-url https://pypi.org/simple cachetools", "No matching distribution"),
            ):
                result = await box.exec(f"env/bin/pip install --retries 0 {wanted}", timeout=120)
                assert not result.ok
                assert said in result.text, result.text


@pytest.mark.services
def test_the_real_internet_through_the_allow_list(store: Path) -> None:
    networks = trusted()

    async def run() -> None:
        policy = NetworkPolicy("allow", ("pypi.org:443",))
        async with NamespaceProvider(store, trusted_networks=networks) as provider:
            spec = SandboxSpec(image=provider.images.host_base(), network=policy)
            async with await provider.create(spec) as box:
                seen = await box.exec(["python3", "-c", TLS])
                assert seen.stdout == b"200\n", seen.text
                refused = await box.exec(["python3", "-c", TLS.replace("pypi.org", "registry.npmjs.org")])
                assert "403" in refused.text

    asyncio.run(run())
