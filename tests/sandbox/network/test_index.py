"""The package index that ends at a day: over answers of a fake upstream, and for real with pip."""

from __future__ import annotations

import hashlib
import html.parser
import io
import json
import urllib.error
from datetime import date
from email.message import Message
from pathlib import Path
from typing import IO, Any

import pytest

from sandbox.network.index import PackageIndex
from sandbox.network.pypi import HTML, JSON

CUT = date(2024, 5, 1)
OLD, NEW = b"old wheel", b"new wheel"


def entry(filename: str, content: bytes, uploaded: str | None, **more: Any) -> dict[str, Any]:
    fields = {"filename": filename, "url": f"../../files/{filename}", **more}
    fields["hashes"] = {"sha256": hashlib.sha256(content).hexdigest()}
    return fields | ({"upload-time": uploaded} if uploaded else {})


METADATA = b"Name: tool"
FILES = [
    entry("tool-1.0-py3-none-any.whl", OLD, "2024-04-30T23:59:59.999Z", **{
        "requires-python": ">=3.8", "yanked": "too <old>",
        "core-metadata": {"sha256": hashlib.sha256(METADATA).hexdigest()},
    }),
    entry("tool-2.0-py3-none-any.whl", NEW, "2024-05-01T00:00:00Z"),
    entry("tool-3.0-py3-none-any.whl", NEW, None),
    entry("tool-0.9-py3-none-any.whl", NEW, "2020-01-01T00:00:00Z", url="/files/tool-0.9-py3-none-any.whl"),
    entry("../tool-0.8.tar.gz", OLD, "2020-01-01T00:00:00Z"),
]  # fmt: skip


class Upstream:
    """Answers by address."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, bytes] = {
            "http://up/simple/tool/": json.dumps({"name": "tool", "files": FILES}).encode(),
            "http://up/simple/young/": json.dumps({"files": [FILES[1]]}).encode(),
            "http://up/simple/timeless/": json.dumps({"files": [FILES[2]]}).encode(),
            "http://up/simple/strange/": b"<html>",
            "http://up/files/tool-1.0-py3-none-any.whl": OLD,
            "http://up/files/tool-1.0-py3-none-any.whl.metadata": METADATA,
            "http://up/files/tool-2.0-py3-none-any.whl": NEW,
            "http://up/files/tool-0.9-py3-none-any.whl": b"swapped",
        }

    def __call__(self, address: str, accept: str) -> IO[bytes]:
        self.asked.append(address)
        if address not in self.answers:
            raise urllib.error.HTTPError(address, 404, "Not Found", Message(), io.BytesIO())
        return io.BytesIO(self.answers[address])


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture
def index(upstream: Upstream, tmp_path: Path) -> PackageIndex:
    return PackageIndex(
        CUT, tmp_path / "cache", upstream="http://up/simple/", without=["Secret_Tool"], fetch=upstream
    )


async def test_what_came_on_the_day_or_later_does_not_exist(index: PackageIndex) -> None:
    reply = await index.get("/simple/Tool/", JSON)
    assert (reply.status, reply.media_type) == (200, JSON)
    assert isinstance(reply.body, bytes)
    files = json.loads(reply.body)["files"]
    assert [file["filename"] for file in files] == ["tool-1.0-py3-none-any.whl", "tool-0.9-py3-none-any.whl"]
    assert files[0]["url"] == "../../files/tool/tool-1.0-py3-none-any.whl"
    assert files[0]["yanked"] == "too <old>"


async def test_old_installers_get_html(index: PackageIndex) -> None:
    reply = await index.get("/simple/tool/", "text/html")
    assert reply.media_type.startswith(HTML)
    assert isinstance(reply.body, bytes)
    found: list[dict[str, str | None]] = []

    class Parser(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag == "a":
                found.append(dict(attrs))

    Parser().feed(reply.body.decode())
    assert len(found) == 2
    assert (found[0]["data-requires-python"], found[0]["data-yanked"]) == (">=3.8", "too <old>")
    assert str(found[0]["href"]).endswith(f"#sha256={hashlib.sha256(OLD).hexdigest()}")


async def test_files_of_the_listing_are_fetched_once_and_checked(
    index: PackageIndex, upstream: Upstream, tmp_path: Path
) -> None:
    for _ in range(2):
        reply = await index.get("/files/tool/tool-1.0-py3-none-any.whl")
        assert isinstance(reply.body, Path)
        assert reply.body.read_bytes() == OLD
    metadata = await index.get("/files/tool/tool-1.0-py3-none-any.whl.metadata")
    assert isinstance(metadata.body, Path)
    assert metadata.body.read_bytes() == METADATA
    assert len(upstream.asked) == 3
    swapped = await index.get("/files/tool/tool-0.9-py3-none-any.whl")
    assert isinstance(swapped.body, bytes)
    assert (swapped.status, b"another hash" in swapped.body) == (502, True)
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/simple/secret-tool/", 404, "not offered"),
        ("/simple/SECRET.TOOL/", 404, "not offered"),
        ("/files/secret-tool/secret_tool-1.0.tar.gz", 404, "not offered"),
        ("/files/tool/tool-2.0-py3-none-any.whl", 404, "did not exist before 2024-05-01"),
        ("/files/tool/tool-2.0-py3-none-any.whl.metadata", 404, "did not exist"),
        ("/files/tool/..%2Ftool-0.8.tar.gz", 404, "did not exist"),
        ("/simple/young/", 404, "no release before"),
        ("/simple/timeless/", 502, "no upload times"),
        ("/simple/strange/", 502, "PEP 691"),
        ("/simple/nothing/", 404, "no such thing"),
        ("/simple/..%2F..%2Fetc/", 404, "no package's name"),
        ("/simple/", 404, "answers /simple/NAME/"),
        ("/", 404, "answers /simple/NAME/"),
    ],
)
async def test_everything_else_is_refused(index: PackageIndex, path: str, status: int, said: str) -> None:
    reply = await index.get(path, JSON)
    assert isinstance(reply.body, bytes)
    assert (reply.status, said in reply.body.decode()) == (status, True), reply.body


async def test_a_silent_index_is_an_answer(tmp_path: Path) -> None:
    def silent(address: str, accept: str) -> IO[bytes]:
        raise TimeoutError("timed out")

    index = PackageIndex(CUT, tmp_path, upstream="http://up", fetch=silent)
    assert (await index.get("/simple/tool/")).status == 502
    with pytest.raises(ValueError, match=r"no http\(s\) address"):
        PackageIndex(CUT, tmp_path, upstream="file:///etc")
