"""Pull and push: against Debian's registry, and against one of our own that breaks, hides and lies."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sandbox.images import ImageStore
from sandbox.oci import documents, registry, transport
from sandbox.oci.documents import ImageError
from sandbox.oci.registry import Reference
from sandbox.oci.transport import RegistryError
from tests.sandbox.test_archives import make


@pytest.mark.parametrize(
    ("text", "host", "repository", "target"),
    [
        ("localhost:5000/a/b:1", "localhost:5000", "a/b", "1"),
        ("ghcr.io/a/b", "ghcr.io", "a/b", "latest"),
        ("[::1]:5000/x:y", "[::1]:5000", "x", "y"),
        ("r.example/x:t@sha256:" + "a" * 64, "r.example", "x", "sha256:" + "a" * 64),
    ],
)
def test_references(text: str, host: str, repository: str, target: str) -> None:
    assert Reference.parse(text) == Reference(host, repository, target)


@pytest.mark.parametrize(
    "text", ["debian:12", "a/b:1", "h.io/A:1", "h.io/a:b c", "h.io/../x", "h.io/", "u@h.io/x"]
)
def test_other_words_are_no_references(text: str) -> None:
    with pytest.raises(ImageError):
        Reference.parse(text)


class Fake(BaseHTTPRequestHandler):
    """A registry for reading, with faults."""

    store: ImageStore
    manifest: bytes
    faults: set[str]
    seen: list[tuple[str, str | None]]
    elsewhere: str = ""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization")))
        if self.path.startswith("/token"):
            expected = "Basic " + base64.b64encode(b"ann:secret").decode()
            right = self.headers.get("Authorization") == expected and "repository%3At%3Apull" in self.path
            self.reply(200, b'{"token": "T"}') if right else self.reply(401, b"{}")
        elif "login" in self.faults and self.headers.get("Authorization") != "Bearer T":
            realm = f"http://{self.headers['Host']}/token"
            self.reply(401, b"{}", {"WWW-Authenticate": f'Bearer realm="{realm}",service="s"'})
        elif "busy" in self.faults:
            self.faults.discard("busy")
            self.reply(503, b"", {"Retry-After": "0"})
        elif "/manifests/" in self.path:
            data = self.manifest
            if "index" in self.faults and not self.path.endswith(documents.digest_of(data)):
                self.index(data)
            else:
                self.reply(200, data, {"Content-Type": documents.MANIFEST})
        elif "moved" in self.faults:
            self.reply(307, b"", {"Location": f"{self.elsewhere}{self.path}"})
        else:
            self.blob(self.store.blobs.read(self.path.rpartition("/")[2]))

    def index(self, data: bytes) -> None:
        def entry(digest: str, machine: str) -> dict[str, object]:
            platform = {"os": "linux", "architecture": machine}
            return {"mediaType": documents.MANIFEST, "digest": digest, "size": 1, "platform": platform}

        entries = [entry("sha256:" + "0" * 64, "s390x")]
        if "foreign" not in self.faults:
            entries.append(entry(documents.digest_of(data), documents.architecture()))
        body = json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
        self.reply(200, body, {"Content-Type": documents.INDEX})

    def blob(self, data: bytes) -> None:
        if "liar" in self.faults:
            data = data[:-1] + b"?"
        start = 0
        if asked := self.headers.get("Range"):
            start = 0 if "no ranges" in self.faults else int(asked.removeprefix("bytes=").rstrip("-"))
        body = data[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if "breaks" in self.faults and start < len(data) // 2:
            self.wfile.write(body[: len(data) // 3 + 1])
        elif "no ranges" in self.faults and asked is None:
            self.wfile.write(body[: len(data) // 2])
        else:
            self.wfile.write(body)
        self.close_connection = True

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def serving(
    store: ImageStore, image: str, faults: set[str], elsewhere: str = ""
) -> Iterator[tuple[str, list]]:
    manifest = store.blobs.read(image)
    seen: list[tuple[str, str | None]] = []
    attributes = {
        "store": store,
        "manifest": manifest,
        "faults": faults,
        "seen": seen,
        "elsewhere": elsewhere,
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Served", (Fake,), attributes))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def source(tmp_path: Path) -> tuple[ImageStore, str]:
    store = ImageStore(tmp_path / "source")
    return store, make(store)


@pytest.mark.parametrize("fault", ["none", "busy", "index", "breaks", "no ranges", "login"])
def test_pull_survives(
    source: tuple[ImageStore, str], tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "patience", lambda attempt: 0.0)
    monkeypatch.setattr(registry, "patience", lambda attempt: 0.0)
    store = ImageStore(tmp_path / "target")
    with serving(*source, {fault}) as (host, seen):
        login = {"auths": {host: {"auth": base64.b64encode(b"ann:secret").decode()}}}
        (tmp_path / "config.json").write_text(json.dumps(login))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        assert registry.pull(store, f"{host}/t:1") == source[1]
        assert store.resolve(f"{host}/t:1") == source[1]
        assert store.manifest(source[1]) == source[0].manifest(source[1])
        count = len(seen)
        registry.pull(store, f"{host}/t@{source[1]}")
        assert not any("/blobs/" in path for path, _ in seen[count:])


def test_credentials_stay_with_their_registry(
    source: tuple[ImageStore, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serving(*source, set()) as (other, elsewhere),
        serving(*source, {"login", "moved"}, f"http://{other}") as (host, _),
    ):
        login = {"auths": {host: {"auth": base64.b64encode(b"ann:secret").decode()}}}
        (tmp_path / "config.json").write_text(json.dumps(login))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        registry.pull(ImageStore(tmp_path / "target"), f"{host}/t:1")
        assert len(elsewhere) == 3
        assert {authorization for _, authorization in elsewhere} == {None}


@pytest.mark.parametrize(
    ("faults", "sentence"),
    [
        ({"liar"}, "another content"),
        ({"login"}, "gives no token: 401"),
        ({"index", "foreign"}, "no image for linux/"),
        ({"moved"}, "not HTTPS"),
    ],
)
def test_pull_refuses_in_a_sentence(
    source: tuple[ImageStore, str],
    tmp_path: Path,
    faults: set[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    store = ImageStore(tmp_path / "target")
    with serving(*source, faults, "ftp://x") as (host, _), pytest.raises(ImageError, match=sentence):
        registry.pull(store, f"{host}/t:1")
    assert store.names.all() == {}
    assert not store.exists(source[1])


def test_what_is_not_there_is_named(
    source: tuple[ImageStore, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "patience", lambda attempt: 0.0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(RegistryError, match=f"127.0.0.1:{port} cannot be reached"):
        registry.pull(ImageStore(tmp_path / "target"), f"127.0.0.1:{port}/t:1")
    with pytest.raises(ImageError, match="stands on this host's /usr"):
        registry.push(source[0], source[0].host_base(), "localhost/t:1")


@pytest.fixture
def real(tmp_path: Path) -> Iterator[str]:
    """Debian's registry on a free port of loopback."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = {
        "version": "0.1",
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "registry")}},
        "http": {"addr": f"127.0.0.1:{port}", "secret": "x"},
    }
    (tmp_path / "config.yml").write_text(json.dumps(config))
    with subprocess.Popen(
        ["docker-registry", "serve", str(tmp_path / "config.yml")], cwd=tmp_path
    ) as process:
        try:
            for _ in range(100):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/"):
                    break
                time.sleep(0.1)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.mark.services
def test_a_real_registry_takes_and_gives(real: str, source: tuple[ImageStore, str], tmp_path: Path) -> None:
    store, image = source
    registry.push(store, image, f"{real}/team/tool:1")
    registry.push(store, image, f"{real}/team/tool:2")
    other = ImageStore(tmp_path / "target")
    assert registry.pull(other, f"{real}/team/tool:2") == image
    assert other.manifest(image) == store.manifest(image)
    command = ["skopeo", "inspect", "--tls-verify=false", f"docker://{real}/team/tool:1"]
    seen = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert seen["Digest"] == image
    assert sorted(seen["RepoTags"]) == ["1", "2"]
    copy = ["skopeo", "copy", "--dest-tls-verify=false", "--format=v2s2", f"oci:{store.root}:mine"]
    store.tag("mine", image)
    subprocess.run([*copy, f"docker://{real}/docker:1"], capture_output=True, check=True)
    docker = registry.pull(other, f"{real}/docker:1")
    assert docker != image
    assert other.manifest(docker).layers == store.manifest(image).layers
    with pytest.raises(RegistryError, match="404 Not Found MANIFEST_UNKNOWN"):
        registry.pull(other, f"{real}/team/tool:3")
