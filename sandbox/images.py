"""Images by content: an ordered list of layers over a base, each under its digest, unpacked once.

    store/layers/HEX      unpacked layer, read-only by convention
    store/base/HEX        skeleton of a base (mount points, a synthetic /etc)
    store/manifests/HEX.json

A layer's digest is that of its deterministic tar (trees.py): the same tree gives the same digest on every
machine. Writers unpack under a temporary name, sync, then rename; whoever comes second throws his copy
away. So any number of processes may share a store, and a kill leaves at most a temporary folder.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from pydantic import BaseModel, ConfigDict

from sandbox import hostbase, trees
from sandbox.base import SandboxUnavailable

FORMAT = 1


class ImageManifest(BaseModel):
    """What an image consists of; its canonical JSON's SHA-256 is the image's digest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = FORMAT
    base: str
    """Kind of the base: `host` (the host's /usr, read-only) is the only one yet."""
    base_digest: str
    """Digest of what identifies the base (Python version, distribution)."""
    layers: tuple[str, ...] = ()
    """Layer digests, lowest first."""
    env: Mapping[str, str] = {}
    """Environment of every command, before that of the sandbox and of the command."""
    notes: tuple[str, ...] = ()
    """One line per layer: where it came from."""

    def digest(self) -> str:
        """`sha256:...` of the canonical JSON; notes do not count."""
        body = self.model_dump(exclude={"notes"})
        return f"sha256:{hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()}"


def default_store() -> Path:
    """`$POSTTRAIN_HOME/images`, or below the user's cache folder."""
    home = os.environ.get("POSTTRAIN_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "posttrain") / "images"


@contextmanager
def _room(root: Path) -> Generator[None]:
    """A full or closed disk is one sentence for people."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SandboxUnavailable(
                f"no room for images in {root}: free some disk or set POSTTRAIN_HOME to a larger one"
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES) and not os.access(root, os.W_OK):
            raise SandboxUnavailable(
                f"cannot write images to {root}: make it writable or set POSTTRAIN_HOME to another folder"
            ) from error
        raise


class ImageStore:
    """Images and layers in one folder. SandboxUnavailable where its disk is full or not writable."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        with _room(self.root):
            for name in ("layers", "base", "manifests", "mnt", "run"):
                (self.root / name).mkdir(parents=True, exist_ok=True)

    def host_base(self) -> str:
        """The image of this host's /usr and Python, without layers."""
        digest = hostbase.digest()
        place = self.base_path(digest)
        if not place.exists():
            self._publish(place, hostbase.build)
        return self._save(ImageManifest(base="host", base_digest=digest))

    def add_layer(
        self,
        parent: str,
        tree: Path,
        *,
        at: str = "/",
        env: Mapping[str, str] | None = None,
        note: str = "",
        owner: Literal["agent", "root"] = "agent",
    ) -> str:
        """A new image: `parent` plus the content of the folder `tree` placed at the absolute path `at`.

        Files belong to `owner` inside; modes are 755 or 644; times are fixed, so compiled Python files
        must be of the unchecked-hash kind. Returns the image's digest. Raises KeyError for an unknown
        parent, NotADirectoryError if `tree` is none.
        """
        if not tree.is_dir():
            raise NotADirectoryError(f"{tree} is not a folder")
        with _room(self.root), tempfile.TemporaryFile(dir=self.root) as file:
            trees.pack(tree, file, at=at, uid=trees.AGENT if owner == "agent" else 0)
            layer = self.import_layer(file)
        return self.stack(parent, layer, env=env, note=note)

    def import_layer(self, tar: IO[bytes]) -> str:
        """Store a layer tar (a seekable file, whiteouts in OCI form); returns the layer's digest."""
        tar.seek(0)
        hasher = hashlib.sha256()
        while block := tar.read(1 << 20):
            hasher.update(block)
        digest = f"sha256:{hasher.hexdigest()}"
        place = self.layer_path(digest)
        if not place.exists():
            tar.seek(0)
            self._publish(place, lambda folder: trees.unpack(tar, folder, layer=True))
        return digest

    def stack(self, parent: str, layer: str, *, env: Mapping[str, str] | None = None, note: str = "") -> str:
        """The image of `parent` with one stored layer more."""
        below = self.manifest(parent)
        return self._save(
            ImageManifest(
                base=below.base,
                base_digest=below.base_digest,
                layers=(*below.layers, layer),
                env={**below.env, **(env or {})},
                notes=(*below.notes, note),
            )
        )

    def manifest(self, digest: str) -> ImageManifest:
        """Raises KeyError if the store has no such image."""
        try:
            text = self._manifest_path(digest).read_text()
        except FileNotFoundError:
            raise KeyError(f"no image {digest} in {self.root}") from None
        return ImageManifest.model_validate_json(text)

    def exists(self, digest: str) -> bool:
        return self._manifest_path(digest).exists()

    def layer_path(self, digest: str) -> Path:
        """The layer's folder; host code only reads it."""
        return self.root / "layers" / _hex(digest)

    def base_path(self, digest: str) -> Path:
        return self.root / "base" / _hex(digest)

    def _manifest_path(self, digest: str) -> Path:
        return self.root / "manifests" / f"{_hex(digest)}.json"

    def _save(self, manifest: ImageManifest) -> str:
        digest = manifest.digest()
        path = self._manifest_path(digest)
        if not path.exists():
            with tempfile.NamedTemporaryFile("w", dir=self.root / "manifests", delete=False) as file:
                file.write(manifest.model_dump_json(indent=1))
                file.flush()
                os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.rename(file.name, path)
        return digest

    def _publish(self, place: Path, fill: Callable[[Path], None]) -> None:
        """Fill a temporary folder, sync it and give it its name, unless another process was first."""
        folder = Path(tempfile.mkdtemp(prefix=".new-", dir=place.parent))
        try:
            with _room(self.root):
                folder.chmod(0o755)
                fill(folder)
                _sync(folder)
                try:
                    os.rename(folder, place)
                except OSError:
                    if not place.exists():
                        raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        _sync(place.parent)


def _hex(digest: str) -> str:
    algorithm, _, value = digest.partition(":")
    if algorithm != "sha256" or len(value) != 64 or not value.isalnum():
        raise KeyError(f"{digest!r} is no digest of the form sha256:HEX")
    return value


def _sync(folder: Path) -> None:
    """syncfs(2): one call for all files of a layer, where an fsync each would take minutes."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(fd)
