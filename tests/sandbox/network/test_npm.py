"""npm's registry cut at a day: over answers of a fake upstream, and for real with npm."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import urllib.error
import urllib.request
from datetime import UTC, date, datetime
from email.message import Message
from pathlib import Path
from typing import IO, Any

import pytest

from sandbox.base import NetworkPolicy, SandboxSpec
from sandbox.namespace import NamespaceProvider
from sandbox.network import npm
from sandbox.network.index import PackageIndex

CUT = date(2024, 5, 1)
BODY = b"tarball"


def version(number: str, body: bytes = BODY, **dist: Any) -> dict[str, Any]:
    sha512 = base64.b64encode(hashlib.sha512(body).digest()).decode()
    wanted = {"integrity": f"sha512-{sha512}", "tarball": f"http://up/tool-{number}.tgz"} | dist
    return {"name": "@team/tool", "version": number, "dist": wanted, "dependencies": {"other": "^1"}}


TIMES = {
    "created": "2020-01-01T00:00:00.000Z",
    "modified": "2026-01-01T00:00:00.000Z",
    "1.9.0": "2023-01-01T00:00:00.000Z",
    "1.10.0": "2023-02-01T00:00:00.000Z",
    "2.0.0-rc.1": "2024-04-30T23:59:59.999Z",
    "0.9.1": "2024-04-01T00:00:00+00:00",
    "2.0.0": "2024-05-01T00:00:00.000Z",
}
DOCUMENT = {
    "name": "@team/tool",
    "dist-tags": {"latest": "2.0.0", "next": "2.0.0-rc.1", "old": "0.9.1"},
    "versions": {
        number: version(number, BODY if number != "1.9.0" else b"other")
        for number in ("0.9.1", "1.9.0", "1.10.0", "2.0.0-rc.1", "2.0.0", "3.0.0")
    },
    "time": TIMES,
    "readme": "x",
}


def upstream(address: str, accept: str) -> IO[bytes]:
    answers = {
        "http://up/@team%2Ftool": json.dumps(DOCUMENT).encode(),
        "http://up/timeless": json.dumps({**DOCUMENT, "time": None}).encode(),
        "http://up/tool-1.10.0.tgz": BODY,
        "http://up/tool-1.9.0.tgz": b"swapped",
    }
    if address not in answers:
        raise urllib.error.HTTPError(address, 404, "Not Found", Message(), io.BytesIO())
    return io.BytesIO(answers[address])


@pytest.fixture
def index(tmp_path: Path) -> PackageIndex:
    return PackageIndex(CUT, tmp_path, npm_upstream="http://up/", without=["secret"], fetch=upstream)


@pytest.mark.parametrize("path", ["/npm/@team%2ftool", "/npm/@team/tool", "/npm/@TEAM%2Ftool?x=1"])
async def test_versions_of_the_day_and_later_do_not_exist(index: PackageIndex, path: str) -> None:
    reply = await index.get(path, origin="http://here")
    assert isinstance(reply.body, bytes)
    document = json.loads(reply.body)
    assert list(document["versions"]) == ["0.9.1", "1.9.0", "1.10.0", "2.0.0-rc.1"]
    assert document["dist-tags"] == {"latest": "1.10.0", "next": "2.0.0-rc.1", "old": "0.9.1"}
    assert sorted(document["time"]) == sorted(document["versions"])
    entry = document["versions"]["1.10.0"]
    assert entry["dist"]["tarball"] == "http://here/npm/-/%40team%2Ftool/1.10.0.tgz"
    assert entry["dependencies"] == {"other": "^1"}


async def test_tarballs_are_checked(index: PackageIndex) -> None:
    reply = await index.get("/npm/-/%40team%2Ftool/1.10.0.tgz")
    assert isinstance(reply.body, Path)
    assert reply.body.read_bytes() == BODY
    assert (await index.get("/npm/-/%40team%2Ftool/1.9.0.tgz")).status == 502


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/npm/secret", 404, "not offered"),
        ("/npm/-/secret/1.0.0.tgz", 404, "not offered"),
        ("/npm/-/%40team%2Ftool/2.0.0.tgz", 404, "did not exist before"),
        ("/npm/-/%40team%2Ftool/3.0.0.tgz", 404, "did not exist before"),
        ("/npm/-/..%2F..%2Fx/1.tgz", 404, "no package's name"),
        ("/npm/timeless", 502, "does not tell when"),
        ("/npm/nothing", 404, "no such thing"),
        ("/npm/", 404, "no package's name"),
        ("/npm/-/npm/v1/security/audits", 404, "no package's name"),
    ],
)
async def test_everything_else_is_refused(index: PackageIndex, path: str, status: int, said: str) -> None:
    reply = await index.get(path)
    assert isinstance(reply.body, bytes)
    assert (reply.status, said in reply.body.decode()) == (status, True), reply.body


@pytest.mark.parametrize(
    ("dist", "algorithm"),
    [
        ({"integrity": "sha1-AAAA sha512-BBBB"}, "sha512"),
        ({"integrity": "sha1-AAAA"}, "sha1"),
        ({"shasum": "a" * 40}, "sha1"),
        ({"integrity": "md5-AAAA"}, None),
        ({"integrity": "sha512-?"}, None),
        ({}, None),
    ],
)
def test_the_strongest_hash_counts(dist: dict[str, Any], algorithm: str | None) -> None:
    found = npm._hash(dist)
    assert (found[0] if found else None) == algorithm


@pytest.mark.services
@pytest.mark.timeout(600)
async def test_npm_installs_what_the_day_had(store: Path) -> None:
    """A real npm against the real registry: the highest release of those that the registry dates before."""
    with urllib.request.urlopen(f"{npm.default_url().rstrip('/')}/is-number", timeout=60) as answer:
        whole = json.load(answer)
    moments = sorted(datetime.fromisoformat(whole["time"][each]) for each in whole["versions"])
    day = moments[len(moments) // 2].date()
    expected = npm.cut(whole, datetime(day.year, day.month, day.day, tzinfo=UTC))
    assert 0 < len(expected["versions"]) < len(whole["versions"])
    policy = NetworkPolicy("allow", index_before=day, index_without=("left-pad",))
    async with NamespaceProvider(store) as provider:
        spec = SandboxSpec(image=provider.images.host_base(), network=policy, pids=512, memory_mb=2048)
        async with await provider.create(spec) as box:
            done = await box.exec("npm install --no-audit --no-fund is-number", timeout=120)
            assert done.ok, done.text
            installed = json.loads(await box.read("node_modules/is-number/package.json"))
            assert installed["version"] == expected["dist-tags"]["latest"]
            refused = await box.exec("npm install --no-audit --no-fund left-pad", timeout=120)
            assert not refused.ok
            assert "404" in refused.text
