"""Images as files: OCI layouts (folders or tars) and what `docker save` writes, in and out.

    write(store, digest, Path("image.tar"), name="tool:1")     docker load, skopeo oci-archive:, podman load
    write(store, digest, Path("folder"), name="tool:1")        skopeo oci:, umoci, crane
    read(store, Path("image.tar"))                             [("tool:1", "sha256:...")]

A tar holds the OCI layout and Docker's own `manifest.json`, which engines older than 25 ask for; both
point at the same blobs. The same image gives the same bytes.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from sandbox.images import ImageStore
from sandbox.oci import documents
from sandbox.oci.blobs import BLOCK, TEMPORARY
from sandbox.oci.disk import inflate
from sandbox.oci.documents import Descriptor, ImageError, Index
from sandbox.oci.layout import LAYOUT, Layout
from sandbox.oci.tars import Member, TarReader, clean
from sandbox.trees import FIXED_TIME


class _Saved(BaseModel):
    """An entry of Docker's manifest.json."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    Config: str
    RepoTags: tuple[str, ...] | None = None
    Layers: tuple[str, ...]


def write(store: ImageStore, digest: str, out: Path, *, name: str, host_base: bool = False) -> None:
    """Write an image to the tar `out` (a name that ends in .tar) or into the folder `out` otherwise.

    A folder that is a layout already gets one image more. Raises ImageError for an image on the host's /usr,
    unless `host_base` says that the reader has the same host below; KeyError for an unknown one.
    """
    if store.manifest(digest).base == "host" and not host_base:
        raise ImageError("the image stands on this host's /usr: build it from a base of its own to export it")
    if out.suffix == ".tar":
        with tempfile.NamedTemporaryFile(prefix=TEMPORARY, dir=out.parent, delete=False) as file:
            try:
                _write_tar(store, digest, name, file)
                file.flush()
                os.fsync(file.fileno())
                os.fchmod(file.fileno(), 0o644)
                os.rename(file.name, out)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file.name)
    else:
        if out.exists() and any(out.iterdir()) and not (out / "oci-layout").exists():
            raise ImageError(f"{out} is a folder with other things in it: name a new one, or a .tar")
        target = Layout(out)
        for blob in _blobs(store, digest):
            if blob not in target.blobs:
                with store.blobs.path(blob).open("rb") as source, target.blobs.temporary() as file:
                    shutil.copyfileobj(source, file, BLOCK)
                    target.blobs.keep(file, blob)
        target.names.put(name, digest, store.blobs.size(digest), store.media_type(digest))


def _blobs(store: ImageStore, digest: str) -> list[str]:
    stored = documents.manifest_of(store.blobs.read(digest), digest)
    return sorted({digest, stored.config.digest, *(layer.digest for layer in stored.layers)})


def _write_tar(store: ImageStore, digest: str, name: str, out: IO[bytes]) -> None:
    stored = documents.manifest_of(store.blobs.read(digest), digest)
    kind = store.media_type(digest)
    saved = {
        "Config": _place(stored.config.digest),
        "RepoTags": [name] if ":" in name else [f"{name}:latest"],
        "Layers": [_place(layer.digest) for layer in stored.layers],
    }
    index = documents.write_index([(digest, store.blobs.size(digest), name, kind)])
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for folder in ("blobs", "blobs/sha256"):
            member = tarfile.TarInfo(folder)
            member.type, member.mode, member.mtime = tarfile.DIRTYPE, 0o755, FIXED_TIME
            tar.addfile(member)
        for blob in _blobs(store, digest):
            with store.blobs.path(blob).open("rb") as source:
                _add(tar, _place(blob), source, store.blobs.size(blob))
        for file, data in (
            ("index.json", index),
            ("manifest.json", documents.canonical([saved])),
            ("oci-layout", LAYOUT),
        ):
            _add(tar, file, io.BytesIO(data), len(data))


def _place(digest: str) -> str:
    return f"blobs/sha256/{digest[7:]}"


def _add(tar: tarfile.TarFile, name: str, source: IO[bytes], size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, 0o644, FIXED_TIME
    tar.addfile(member, source)


class _Files(Protocol):
    """Read access to a layout by relative names."""

    def open(self, name: str) -> IO[bytes]:
        """Raises KeyError if there is no such file."""
        ...


class _Folder:
    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, name: str) -> IO[bytes]:
        try:
            fd = os.open(self._root / clean(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise KeyError(name) from None
        except OSError as error:
            raise ImageError(f"{name} of the layout cannot be read: {error.strerror}") from None
        return os.fdopen(fd, "rb")


class _Tar:
    """Symbolic links of an archive (old `docker save` shares layers by them) are followed inside it."""

    def __init__(self, reader: TarReader) -> None:
        self._reader = reader
        self._members: Mapping[str, Member] = {member.name: member for member in reader}

    def open(self, name: str) -> IO[bytes]:
        name = clean(name)
        member = self._members.get(name)
        if member is not None and member.kind == "symlink":
            target = os.path.normpath(os.path.join(os.path.dirname(name), member.link))
            member = self._members.get(clean(target))
        elif member is not None and member.kind == "hardlink":
            member = self._members.get(member.link)
        if member is None or member.kind != "file":
            raise KeyError(name)
        return self._reader.data(member)


def read(store: ImageStore, path: Path, *, name: str | None = None) -> list[tuple[str, str]]:
    """Take in every image of a layout or archive; returns (name, digest) of each.

    Names are those that the archive gives, or `name` for an archive with one image; an image without a
    name is called after the file. Raises ImageError or UnsafeTar with one sentence; FileNotFoundError.
    """
    with store.writing(), _files(store, path) as files:
        found = list(_images(store, files))
        if not found:
            raise ImageError(f"{path} holds no image")
        if name is not None and len(found) > 1:
            raise ImageError(f"{path} holds {len(found)} images: they keep their own names")
        result: list[tuple[str, str]] = []
        for number, (own, manifest) in enumerate(found):
            digest = store.adopt_image(manifest)
            called = name or own or (f"{path.stem}-{number}" if len(found) > 1 else path.stem)
            store.tag(called, digest)
            result.append((called, digest))
    return result


@contextmanager
def _files(store: ImageStore, path: Path) -> Generator[_Files]:
    if path.is_dir():
        yield _Folder(path)
        return
    with path.open("rb") as file, store.blobs.temporary() as plain:
        archive: IO[bytes] = file
        if file.read(2) == b"\x1f\x8b":
            file.seek(0)
            inflate(file, plain, str(path))
            archive = plain
        with TarReader(archive) as reader:
            yield _Tar(reader)


def _images(store: ImageStore, files: _Files) -> Iterator[tuple[str | None, bytes]]:
    """(name, manifest) of every image, its blobs stored."""
    try:
        layout = files.open("oci-layout")
    except KeyError:
        yield from _saved(store, files)
        return
    layout.close()
    index = documents.parse(Index, _document(files, "index.json"), "index.json")
    for entry in index.manifests:
        called = (entry.annotations or {}).get(documents.REF_NAME)
        for manifest in _manifests(files, entry):
            parsed = documents.manifest_of(manifest, entry.digest)
            for blob in (parsed.config, *parsed.layers):
                _store(store, files, _place(documents.check_digest(blob.digest)), blob)
            yield called, manifest


def _manifests(files: _Files, entry: Descriptor, depth: int = 0) -> Iterator[bytes]:
    """The manifest that an entry means here: itself, or that of this machine's platform below an index."""
    data = _document(files, _place(documents.check_digest(entry.digest)))
    if documents.digest_of(data) != entry.digest:
        raise ImageError(f"the manifest {entry.digest} has another content")
    if entry.mediaType in (documents.INDEX, documents.DOCKER_LIST):
        if depth > 2:
            raise ImageError("the layout's indexes are nested too deeply")
        chosen = documents.choose(documents.parse(Index, data, entry.digest))
        yield from _manifests(files, chosen, depth + 1)
    else:
        yield data


def _saved(store: ImageStore, files: _Files) -> Iterator[tuple[str | None, bytes]]:
    """Images of Docker's form. Their manifests are made here, from configuration and layers."""
    try:
        data = _document(files, "manifest.json")
    except ImageError:
        raise ImageError("neither an OCI layout nor what `docker save` writes") from None
    try:
        entries = TypeAdapter(tuple[_Saved, ...]).validate_json(data)
    except ValidationError as error:
        raise ImageError(f"manifest.json is damaged: {error.errors()[0]['msg']}") from None
    for entry in entries:
        config = _document(files, entry.Config)
        store.blobs.put(config)
        parsed = documents.parse(documents.Config, config, "the configuration")
        if len(parsed.rootfs.diff_ids) != len(entry.Layers):
            raise ImageError("the image's configuration and manifest list different layers")
        layers: list[Descriptor] = []
        for layer, diff_id in zip(entry.Layers, parsed.rootfs.diff_ids, strict=True):
            descriptor = Descriptor(mediaType=documents.LAYER, digest=documents.check_digest(diff_id), size=0)
            _store(store, files, layer, descriptor, sized=False)
            layers.append(descriptor.model_copy(update={"size": store.blobs.size(diff_id)}))
        manifest = documents.write_manifest(config, tuple(layers))
        names = entry.RepoTags or (None,)
        for called in names:
            yield called, manifest


def _document(files: _Files, name: str) -> bytes:
    try:
        with files.open(name) as file:
            data = file.read(documents.MAX_DOCUMENT + 1)
    except KeyError:
        raise ImageError(f"{name} is missing") from None
    if len(data) > documents.MAX_DOCUMENT:
        raise ImageError(f"{name} is larger than {documents.MAX_DOCUMENT >> 20} MiB")
    return data


def _store(store: ImageStore, files: _Files, name: str, blob: Descriptor, *, sized: bool = True) -> None:
    if store.blobs.touch(blob.digest):
        return
    try:
        file = files.open(name)
    except KeyError:
        raise ImageError(f"blob {blob.digest} is missing") from None
    with file:
        chunks = iter(lambda: file.read(BLOCK), b"")
        store.blobs.put_stream(chunks, blob.digest, blob.size if sized else None)
