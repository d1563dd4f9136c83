"""The proxy over real sockets: who is reached, who is not, and what a hostile client cannot smuggle."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable

import pytest

from sandbox.base import NetworkPolicy
from sandbox.network import hello, requests
from sandbox.network.proxy import Proxy
from sandbox.network.requests import BadRequest

ALLOW = NetworkPolicy(
    "allow", ("good.example:80", "good.example:443", "*.wide.example:9000", "two.example:80")
)
PUBLIC = "151.101.0.223"


class World:
    """A resolver and a net of one far server that answers with what it was sent."""

    def __init__(self) -> None:
        self.resolved: list[str] = []
        self.dialled: list[tuple[str, int]] = []
        self.addresses: dict[str, list[str]] = {}
        self.heard: list[bytes] = []
        self._server: asyncio.Server | None = None

    async def resolve(self, name: str, port: int) -> list[str]:
        self.resolved.append(name)
        return self.addresses.get(name, [PUBLIC])

    async def dial(self, address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.dialled.append((address, port))
        assert self._server is not None
        return await asyncio.open_connection(*self._server.sockets[0].getsockname())

    async def _far(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.heard)
        self.heard.append(b"")
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self.heard[number] += data
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
                if b"Connection: close" in self.heard[number]:
                    break
        writer.close()

    async def __aenter__(self) -> World:
        self._server = await asyncio.start_server(self._far, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with World() as made:
        yield made


@pytest.fixture
async def proxy(world: World) -> AsyncIterator[tuple[Proxy, int]]:
    made = Proxy(ALLOW, resolve=world.resolve, dial=world.dial)
    sock = socket.create_server(("127.0.0.1", 0))
    await made.listen(sock)
    yield made, sock.getsockname()[1]
    await made.close()


async def ask(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = await reader.read()
    writer.close()
    return answer


async def test_an_allowed_request_is_forwarded_alone(proxy: tuple[Proxy, int], world: World) -> None:
    """What follows in the connection, and headers for the proxy, do not get through."""
    head = (
        b"POST http://good.example/a?b=c HTTP/1.1\r\nHost: evil.example\r\nConnection: x-secret, a\r\n"
        b"X-Secret: 1\r\nProxy-Authorization: y\r\nX-Kept: z\r\nContent-Length: 5\r\nUpgrade: h2c\r\n\r\n"
        b"hello"
    )
    second = b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n"
    answer = await ask(proxy[1], head + second)
    assert answer.endswith(b"hi")
    (heard,) = world.heard
    assert heard.startswith(b"POST /a?b=c HTTP/1.1\r\nHost: good.example\r\nConnection: close\r\n")
    assert b"X-Kept: z" in heard
    for hidden in (b"evil", b"Secret", b"Proxy", b"Upgrade", b"GET"):
        assert hidden not in heard
    assert world.dialled == [(PUBLIC, 80)]


@pytest.mark.parametrize(
    "target",
    ["http://evil.example/", "http://good.example:8080/", "http://127.0.0.1:80/", "http://[::1]/", "http://2130706433/",
     "http://169.254.169.254/latest/meta-data/", "http://wide.example:9000/", "http://good.example.evil.example/"],
)  # fmt: skip
async def test_others_are_refused_before_their_name_is_asked_for(
    proxy: tuple[Proxy, int], world: World, target: str
) -> None:
    answer = await ask(proxy[1], f"GET {target} HTTP/1.1\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"may not reach" in answer
    assert world.resolved == world.dialled == []
    assert proxy[0].attempts[-1].reason is not None


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["169.254.169.254"],
        [PUBLIC, "10.0.0.1"],
        ["::ffff:127.0.0.1"],
        ["fd00:ec2::254"],
        ["0.0.0.0"],
    ],
)
async def test_names_that_lead_inside_are_refused(
    proxy: tuple[Proxy, int], world: World, addresses: list[str]
) -> None:
    world.addresses["good.example"] = addresses
    answer = await ask(proxy[1], b"CONNECT good.example:443 HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert world.dialled == []


async def test_a_name_is_asked_for_once_and_its_checked_address_dialled(world: World) -> None:
    """DNS rebinding: the second answer would be loopback, but there is no second question."""
    answers = [[PUBLIC], ["127.0.0.1"]]

    async def rebinding(name: str, port: int) -> list[str]:
        return answers.pop(0)

    made = Proxy(ALLOW, resolve=rebinding, dial=world.dial)
    sock = socket.create_server(("127.0.0.1", 0))
    await made.listen(sock)
    assert b"hi" in await ask(sock.getsockname()[1], b"GET http://good.example/ HTTP/1.1\r\n\r\n")
    assert world.dialled == [(PUBLIC, 80)]
    assert (await ask(sock.getsockname()[1], b"GET http://good.example/ HTTP/1.1\r\n\r\n")).startswith(
        b"HTTP/1.1 403"
    )
    assert len(world.dialled) == 1
    await made.close()


def client_hello(name: str | None) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    outgoing = ssl.MemoryBIO()
    session = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        session.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize(
    ("first", "reaches"),
    [
        (lambda: client_hello("good.example"), True),
        (lambda: client_hello("GOOD.example"), True),
        (lambda: client_hello("evil.example"), False),
        (lambda: client_hello(None), False),
        (lambda: b"SSH-2.0-OpenSSH_9.2\r\n", False),
        (lambda: b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", False),
        (lambda: b"\x16\x03\x01\x00\x05\x01\x00\x00\xff\xff", False),
    ],
    ids=["same", "case", "other", "none", "ssh", "http", "broken"],
)
async def test_a_tunnel_opens_for_its_own_name_only(
    proxy: tuple[Proxy, int], world: World, first: Callable[[], bytes], reaches: bool
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy[1])
    writer.write(b"CONNECT good.example:443 HTTP/1.1\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    data = first()
    writer.write(data)
    writer.write_eof()
    assert (await reader.read() != b"") is reaches
    writer.close()
    assert world.heard == ([data] if reaches else world.heard[:1] and [b""])


async def test_a_tunnel_to_another_port_carries_anything(proxy: tuple[Proxy, int], world: World) -> None:
    answer = await ask(proxy[1], b"CONNECT a.wide.example:9000 HTTP/1.1\r\n\r\nConnection: close")
    assert answer.endswith(b"hi")
    assert world.heard == [b"Connection: close"]


async def test_a_change_of_policy_cuts_what_it_forbids(proxy: tuple[Proxy, int]) -> None:
    tunnels = []
    for name in ("good.example:80", "two.example:80"):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy[1])
        writer.write(f"CONNECT {name} HTTP/1.1\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        tunnels.append((reader, writer))
    proxy[0].change(NetworkPolicy("allow", ("two.example:80",)))
    assert await tunnels[0][0].read() == b""
    tunnels[1][1].write(b"x")
    assert (await tunnels[1][0].readexactly(4)) == b"HTTP"
    proxy[0].change(NetworkPolicy("none"))
    await tunnels[1][0].read()
    assert (await ask(proxy[1], b"GET http://two.example/ HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 403")
    for _, writer in tunnels:
        writer.close()


async def test_flooding_is_bounded(proxy: tuple[Proxy, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox.network.proxy.CONNECTIONS", 3)
    pairs = [await asyncio.open_connection("127.0.0.1", proxy[1]) for _ in range(4)]
    assert await asyncio.wait_for(pairs[3][0].read(), 5) == b""
    for _, writer in pairs:
        writer.close()


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        (b"GET http://a/ HTTP/2\r\n\r\n", "no HTTP/1.1"),
        (b"GET  http://a/ HTTP/1.1\r\n\r\n", "no HTTP/1.1"),
        (b"GET ftp://a/ HTTP/1.1\r\n\r\n", "only CONNECT and http"),
        (b"GET http://u:p@a/ HTTP/1.1\r\n\r\n", "only CONNECT and http"),
        (b"GET http://a:b/ HTTP/1.1\r\n\r\n", "names no address"),
        (b"CONNECT a HTTP/1.1\r\n\r\n", "names no port"),
        (b"CONNECT a:443x HTTP/1.1\r\n\r\n", "names no port"),
        (b"GET http://a/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "Content-Length"),
        (b"GET http://a/ HTTP/1.1\r\nContent-Length: +1\r\n\r\n", "Content-Length"),
        (b"GET http://a/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", "Content-Length"),
        (b"GET http://a/ HTTP/1.1\r\nA : b\r\n\r\n", "malformed"),
        (b"GET http://a/ HTTP/1.1\r\n folded\r\n\r\n", "malformed"),
        (b"GET http://a/ HTTP/1.1\r\nA: b\nc: d\r\n\r\n", "malformed"),
    ],
)
def test_heads_that_two_readers_could_understand_differently(head: bytes, sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence):
        requests.parse(head)


def test_the_hello_of_a_real_client() -> None:
    assert hello.server_name(client_hello("a.b.example")[5:]) == "a.b.example"
    whole = client_hello("a.example")[5:]
    for cut in range(len(whole)):
        with pytest.raises(hello.NoHello):
            hello.server_name(whole[:cut])
