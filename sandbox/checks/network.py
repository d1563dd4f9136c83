"""Where packets may go: nowhere, unless somebody said so."""

from __future__ import annotations

from sandbox.base import NetworkPolicy, PolicyUnsupported
from sandbox.check import Bench, Check

_REACH = """
import socket
def tcp(family, address):
    s = socket.socket(family); s.settimeout(2)
    try: s.connect(address); print('reached', address)
    except OSError: pass
def udp(family, address, data):
    s = socket.socket(family, socket.SOCK_DGRAM); s.settimeout(1)
    try: s.sendto(data, address); print('answered', address, s.recv(100))
    except OSError: pass
"""
_QUERY = "bytes.fromhex('123401000001000000000000076578616d706c65036f72670000010001')"


async def metadata_addresses_are_closed(bench: Bench) -> None:
    """Cloud metadata services and link-local addresses do not answer, on version 4 and 6."""
    script = _REACH + (
        "for host in ('169.254.169.254', '169.254.170.2', '100.100.100.200', '192.0.0.192'):\n"
        "    tcp(socket.AF_INET, (host, 80))\n"
        "for host in ('fd00:ec2::254', 'fe80::a9fe:a9fe'): tcp(socket.AF_INET6, (host, 80))\n"
        "print('end')\n"
    )
    async with bench.box() as box:
        seen = await box.exec(["python3", "-c", script], timeout=60)
        assert seen.stdout == b"end\n", seen


async def name_resolution_is_closed(bench: Bench) -> None:
    """No name server answers: not the configured ones, not public ones, not one on the host's loopback."""
    script = _REACH + (
        "import re\n"
        "try: hosts = re.findall('nameserver (.+)', open('/etc/resolv.conf').read())\n"
        "except OSError: hosts = []\n"
        "for host in {*hosts, '127.0.0.53', '127.0.0.11', '8.8.8.8', '10.96.0.10'}:\n"
        f"    udp(socket.AF_INET6 if ':' in host else socket.AF_INET, (host.strip(), 53), {_QUERY})\n"
        "try: print('resolved', socket.getaddrinfo('example.org', 80))\n"
        "except OSError: print('end')\n"
    )
    async with bench.box() as box:
        seen = await box.exec(["python3", "-c", script], timeout=60)
        assert seen.stdout == b"end\n", seen


async def sandboxes_do_not_reach_each_other(bench: Bench) -> None:
    """A server in one sandbox is not reachable from another, on any address that it has."""
    serve = (
        "import socket\n"
        "s = socket.create_server(('', 18999)); print('up', flush=True)\n"
        "while True: s.accept()[0].sendall(b'x')\n"
    )
    find = (
        "import socket\n"
        "names = {socket.gethostname(), '127.0.0.1'}\n"
        "try: names |= {i[4][0] for i in socket.getaddrinfo(socket.gethostname(), None)}\n"
        "except OSError: pass\n"
        "print(' '.join(names))\n"
    )
    async with bench.box() as one, bench.box() as two:
        server = await one.spawn(["python3", "-c", serve])
        assert await server.readline() == b"up\n"
        addresses = (await one.exec(["python3", "-c", find])).stdout.decode().split()
        script = _REACH + f"for host in {addresses!r}: tcp(socket.AF_INET, (host, 18999))\nprint('end')\n"
        seen = await two.exec(["python3", "-c", script], timeout=30)
        assert seen.stdout == b"end\n", seen


async def an_empty_allow_list_allows_nothing(bench: Bench) -> None:
    """`allow` with nothing in it reaches nothing, where allow-lists exist; elsewhere it is refused."""
    spec = bench.spec(network=NetworkPolicy("allow"))
    try:
        box = await bench.provider.create(spec)
    except PolicyUnsupported:
        assert "allow" not in bench.provider.capabilities().networks, "allow was declared and refused"
        return
    async with box:
        script = _REACH + (
            "for host in ('192.0.2.1', '8.8.8.8', '169.254.169.254'): tcp(socket.AF_INET, (host, 443))\n"
            "try: print('resolved', socket.getaddrinfo('example.org', 80))\n"
            "except OSError: print('end')\n"
        )
        seen = await box.exec(["python3", "-c", script], timeout=60)
        assert seen.stdout == b"end\n", seen


async def set_network_does_or_refuses(bench: Bench) -> None:
    """A change of policy is refused where it cannot be enforced, and then nothing has changed."""
    async with bench.box() as box:
        await box.set_network(NetworkPolicy("none"))
        try:
            await box.set_network(NetworkPolicy("host"))
        except PolicyUnsupported:
            assert (await box.exec("ls /sys/class/net 2>/dev/null | grep -v '^lo$'")).stdout == b"", (
                "it changed"
            )
            return
        assert bench.provider.capabilities().set_network, "it was changed without the capability"
        names = "import socket; print(*sorted(name for _, name in socket.if_nameindex()))"
        seen = await box.exec(["python3", "-c", names])
        assert seen.stdout != b"lo\n", "host was accepted, and nothing changed"
        await box.set_network(NetworkPolicy("none"))
        script = _REACH + "tcp(socket.AF_INET, ('192.0.2.1', 80))\nprint('end')\n"
        assert (await box.exec(["python3", "-c", script], timeout=30)).stdout == b"end\n"


_THROUGH = """
import os, socket
from urllib.parse import urlsplit
proxy = urlsplit(os.environ['http_proxy'])
def ask(line):
    s = socket.create_connection((proxy.hostname, proxy.port), 10)
    s.sendall(line.encode() + b'\\r\\n\\r\\n')
    return s.recv(100).split()[1].decode()
"""


async def the_allow_list_is_kept(bench: Bench) -> None:
    """Behind an allow-list, other names, other ports, addresses in every spelling and names that lead inside
    are refused, and past the proxy there is nothing."""
    targets = (
        "other.example:443", "localhost:80", "allowed.example:444", "x.allowed.example:443", "127.0.0.1:22",
        "169.254.169.254:80", "2130706433:80", "0x7f.1:80", "[::1]:22", "[::ffff:169.254.169.254]:80",
    )  # fmt: skip
    script = (
        _REACH
        + _THROUGH
        + (
            f"for target in {targets!r}: print(ask(f'CONNECT {{target}} HTTP/1.1'))\n"
            f"for target in {targets!r}: print(ask(f'GET http://{{target}}/ HTTP/1.1'))\n"
            "print(ask('GET http://localhost:9/ HTTP/1.1'))\n"
            "tcp(socket.AF_INET, ('192.0.2.1', 443))\n"
        )
    )
    policy = NetworkPolicy("allow", ("allowed.example:443", "localhost:9"))
    async with bench.box(network=policy) as box:
        seen = await box.exec(["python3", "-c", script], timeout=60)
        assert seen.stdout.split() == [b"403"] * 21, seen


async def a_narrower_network_holds_at_once(bench: Bench) -> None:
    """A running process loses what a new policy no longer allows."""
    script = (
        _REACH
        + _THROUGH
        + (
            "print(ask('CONNECT other.example:443 HTTP/1.1'), flush=True)\n"
            "input()\n"
            "try: print(ask('CONNECT other.example:443 HTTP/1.1'))\n"
            "except OSError: print('gone')\n"
        )
    )
    async with bench.box(network=NetworkPolicy("allow", ("allowed.example:443",))) as box:
        process = await box.spawn(["python3", "-c", script])
        assert await process.readline() == b"403\n"
        await box.set_network(NetworkPolicy("none"))
        await process.write(b"\n")
        assert await process.readline() == b"gone\n"


CHECKS = [
    Check(the_allow_list_is_kept, needs=("set_network",)),
    Check(a_narrower_network_holds_at_once, needs=("set_network",)),
    Check(metadata_addresses_are_closed, needs=("network_none",)),
    Check(name_resolution_is_closed, needs=("network_none",)),
    Check(sandboxes_do_not_reach_each_other, needs=("network_none",)),
    Check(an_empty_allow_list_allows_nothing),
    Check(set_network_does_or_refuses),
]
