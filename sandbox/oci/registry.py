"""Images from and to a registry: the OCI distribution API over HTTP, with the standard library.

    pull(store, "ghcr.io/owner/tool:1")        "sha256:..."
    push(store, digest, "localhost:5000/tool:1")

Blobs are checked while they arrive; a broken connection is taken up where it broke, and a pull that was
killed fetches no blob again that had arrived. Credentials are those of `docker login`
($DOCKER_CONFIG/config.json), sent to their own registry only. Plain HTTP is used for loopback alone. Left
out: schema 1, foreign layers, zstd, resumed uploads, credential helpers.
"""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlencode, urljoin

from sandbox.images import ImageStore
from sandbox.oci import documents
from sandbox.oci.blobs import BLOCK
from sandbox.oci.documents import Descriptor, ImageError, Index
from sandbox.oci.transport import RETRIES, RegistryError, Transport, patience

_ACCEPT = ", ".join((documents.MANIFEST, documents.INDEX, documents.DOCKER_MANIFEST, documents.DOCKER_LIST))
_HOST = re.compile(
    r"(localhost|[A-Za-z0-9.-]+\.[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(:[0-9]+)?|[A-Za-z0-9-]+:[0-9]+"
)
_REPOSITORY = re.compile(r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class Reference:
    """`HOST[:PORT]/REPOSITORY[:TAG|@DIGEST]`; Docker's short names are not guessed."""

    host: str
    repository: str
    target: str
    """Tag or digest."""

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Raises ImageError with the form that is wanted."""
        host, slash, rest = text.partition("/")
        name, at, target = rest.partition("@")
        if at:
            documents.check_digest(target)
            name = name.partition(":")[0]
        else:
            name, _, target = rest.partition(":")
            target = target or "latest"
            if not _TAG.fullmatch(target):
                raise ImageError(f"{target[:100]!r} is no tag")
        if not slash or not _HOST.fullmatch(host) or not _REPOSITORY.fullmatch(name):
            raise ImageError(f"{text[:200]!r} does not name an image as HOST/REPOSITORY:TAG")
        return cls(host, name, target)

    def __str__(self) -> str:
        mark = "@" if self.target.startswith("sha256:") else ":"
        return f"{self.host}/{self.repository}{mark}{self.target}"


def pull(store: ImageStore, reference: str) -> str:
    """Fetch an image, for this machine's platform, and name it after the reference; returns its digest.

    Raises RegistryError, ImageError, UnsafeTar.
    """
    wanted = Reference.parse(reference)
    client = _Client(wanted, "pull")
    with store.writing():
        manifest = client.manifest(wanted.target)
        for _ in range(3):
            if client.media_type not in (documents.INDEX, documents.DOCKER_LIST):
                break
            chosen = documents.choose(documents.parse(Index, manifest, str(wanted)))
            manifest = client.manifest(documents.check_digest(chosen.digest))
        parsed = documents.manifest_of(manifest, str(wanted))
        for blob in (parsed.config, *parsed.layers):
            if not store.blobs.touch(blob.digest):
                store.blobs.put_stream(client.blob(blob), blob.digest, blob.size)
        digest = store.adopt_image(manifest)
        store.tag(str(wanted), digest)
        return digest


def push(store: ImageStore, digest: str, reference: str) -> None:
    """Send an image. Blobs that the registry has are not sent again. Raises RegistryError, ImageError."""
    wanted = Reference.parse(reference)
    if store.manifest(digest).base == "host":
        raise ImageError("the image stands on this host's /usr: build it from a base of its own to push it")
    data = store.blobs.read(digest)
    parsed = documents.manifest_of(data, digest)
    client = _Client(wanted, "pull,push")
    for blob in (*parsed.layers, parsed.config):
        client.send_blob(store, blob)
    client.send_manifest(wanted.target, data, parsed.mediaType)


class _Client:
    """One repository of one registry."""

    def __init__(self, reference: Reference, actions: str) -> None:
        self._transport = Transport(reference.host, f"repository:{reference.repository}:{actions}")
        self._path = f"/v2/{reference.repository}"
        self.media_type = ""
        """Of the manifest that was fetched last."""

    def manifest(self, target: str) -> bytes:
        path = f"{self._path}/manifests/{target}"
        with self._transport.request("GET", path, {"Accept": _ACCEPT}) as response:
            data = response.read(documents.MAX_DOCUMENT + 1)
            self.media_type = (response.getheader("Content-Type") or "").partition(";")[0].strip()
        if target.startswith("sha256:") and documents.digest_of(data) != target:
            raise RegistryError(f"{self._transport.host} sent another manifest than {target}")
        return data

    def blob(self, blob: Descriptor) -> Iterator[bytes]:
        """The blob's bytes; a connection that breaks is taken up again where it broke."""
        have = failures = 0
        while have < blob.size:
            before = have
            headers = {"Range": f"bytes={have}-"} if have else {}
            path = f"{self._path}/blobs/{blob.digest}"
            try:
                with self._transport.request("GET", path, headers, accept=(200, 206)) as response:
                    skip = have if response.status == 200 else 0  # a server without ranges starts again
                    while block := response.read(BLOCK):
                        fresh, skip = block[skip:], max(0, skip - len(block))
                        have += len(fresh)
                        yield fresh
            except (http.client.HTTPException, OSError):
                pass  # counted below, like an early end
            failures = 0 if have > before else failures + 1
            if failures >= RETRIES:
                raise RegistryError(f"{self._transport.host} breaks off {blob.digest} at byte {have}")
            if have < blob.size:
                time.sleep(patience(failures))

    def send_blob(self, store: ImageStore, blob: Descriptor) -> None:
        path = f"{self._path}/blobs/{blob.digest}"
        with self._transport.request("HEAD", path, {}, accept=(200, 404)) as response:
            if response.status == 200:
                return
        upload = f"{self._path}/blobs/uploads/"
        with self._transport.request("POST", upload, {"Content-Length": "0"}, accept=(202,)) as response:
            location = urljoin(self._transport.root, response.getheader("Location") or "")
        location += ("&" if "?" in location else "?") + urlencode({"digest": blob.digest})
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(blob.size)}
        with (
            store.blobs.path(blob.digest).open("rb") as file,
            self._transport.request("PUT", location, headers, body=file, accept=(201,)),
        ):
            pass

    def send_manifest(self, target: str, data: bytes, media_type: str) -> None:
        headers = {"Content-Type": media_type, "Content-Length": str(len(data))}
        path = f"{self._path}/manifests/{target}"
        with self._transport.request("PUT", path, headers, body=data, accept=(201,)):
            pass
