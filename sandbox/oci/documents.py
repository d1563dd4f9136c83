"""The JSON documents of an image: descriptors, manifest, index, configuration (OCI image spec 1.1).

Documents of others are read by the fields that are used here and kept byte for byte, since their digest is
their name. Ours are canonical JSON: sorted keys, no spaces, so that the same image has the same digest
on every machine.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
REF_NAME = "org.opencontainers.image.ref.name"
COMPRESSED = {
    LAYER: "none",
    f"{LAYER}+gzip": "gzip",
    "application/vnd.docker.image.rootfs.diff.tar.gzip": "gzip",
    "application/vnd.docker.image.rootfs.diff.tar": "none",
}
"""Layer media types that are understood."""
CREATED = "2000-01-01T00:00:00Z"
MAX_DOCUMENT = 4 << 20
_T = TypeVar("_T", bound=BaseModel)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class ImageError(ValueError):
    """An image, archive or registry that cannot be used; the message says what is wrong with it."""


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # the documents of others have more fields


class Platform(_Document):
    architecture: str = ""
    os: str = ""
    variant: str | None = None


class Descriptor(_Document):
    """Points at a blob."""

    mediaType: str
    digest: str
    size: int = Field(ge=0)
    annotations: Mapping[str, str] | None = None
    platform: Platform | None = None


class Manifest(_Document):
    """An image: its configuration and its layers, lowest first."""

    schemaVersion: Literal[2] = 2
    mediaType: str = MANIFEST
    config: Descriptor
    layers: tuple[Descriptor, ...]


class Index(_Document):
    """Several images, by platform or by name."""

    schemaVersion: Literal[2] = 2
    mediaType: str = INDEX
    manifests: tuple[Descriptor, ...] = ()


class Settings(_Document):
    """How programs start in the image."""

    Env: tuple[str, ...] | None = None
    WorkingDir: str | None = None
    User: str | None = None
    Labels: Mapping[str, str] | None = None


class RootFs(_Document):
    type: Literal["layers"] = "layers"
    diff_ids: tuple[str, ...]


class Config(_Document):
    """What the layers unpack to (`diff_ids` are digests of uncompressed tars) and how programs start."""

    architecture: str = ""
    os: str = ""
    config: Settings | None = None
    rootfs: RootFs


def digest_of(data: bytes) -> str:
    """`sha256:HEX` of the bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def check_digest(digest: str) -> str:
    """The digest itself; ImageError if it is not `sha256:` and 64 hexadecimal digits."""
    if not _DIGEST.fullmatch(digest):
        raise ImageError(f"{digest[:100]!r} is no digest of the form sha256:HEX")
    return digest


def canonical(document: Mapping[str, Any] | list[dict[str, Any]]) -> bytes:
    """Canonical JSON."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def architecture() -> str:
    """This machine in OCI's words."""
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def parse(kind: type[_T], data: bytes, what: str) -> _T:
    """Raises ImageError, naming `what`, for anything that is not such a document."""
    if len(data) > MAX_DOCUMENT:
        raise ImageError(f"{what} is larger than {MAX_DOCUMENT >> 20} MiB")
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "it"
        raise ImageError(f"{what} is no {kind.__name__.lower()}: {place}: {first['msg']}") from None


def manifest_of(data: bytes, what: str) -> Manifest:
    """A manifest whose digests and layer types are known. Raises ImageError."""
    manifest = parse(Manifest, data, what)
    for descriptor in (manifest.config, *manifest.layers):
        check_digest(descriptor.digest)
    for layer in manifest.layers:
        if layer.mediaType not in COMPRESSED:
            raise ImageError(f"{what} has a layer of the type {layer.mediaType}: use tar or tar+gzip")
    return manifest


def write_config(
    diff_ids: tuple[str, ...], env: Mapping[str, str], labels: Mapping[str, str], workdir: str
) -> bytes:
    """The configuration of an image of ours."""
    return canonical(
        {
            "architecture": architecture(),
            "os": "linux",
            "created": CREATED,
            "config": {
                "Env": [f"{name}={value}" for name, value in sorted(env.items())],
                "Labels": dict(labels),
                "WorkingDir": workdir,
            },
            "rootfs": {"type": "layers", "diff_ids": list(diff_ids)},
            "history": [{"created": CREATED, "created_by": "posttrain"} for _ in diff_ids],
        }
    )


def write_manifest(config: bytes, layers: tuple[Descriptor, ...]) -> bytes:
    """The manifest of a configuration and layers."""
    return canonical(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "digest": digest_of(config), "size": len(config)},
            "layers": [
                {"mediaType": layer.mediaType, "digest": layer.digest, "size": layer.size} for layer in layers
            ],
        }
    )


def write_index(entries: list[tuple[str, int, str | None, str]]) -> bytes:
    """The index of (digest, size, name, media type) of manifests."""
    manifests: list[dict[str, Any]] = []
    for digest, size, name, media_type in entries:
        entry: dict[str, Any] = {"mediaType": media_type, "digest": digest, "size": size}
        if name is not None:
            entry["annotations"] = {REF_NAME: name}
        manifests.append(entry)
    return canonical({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests})


def choose(index: Index) -> Descriptor:
    """The entry for this machine. Raises ImageError if there is none."""
    fitting = [
        entry
        for entry in index.manifests
        if entry.platform is None
        or (entry.platform.os, entry.platform.architecture) == ("linux", architecture())
    ]
    if not fitting:
        offered = sorted({f"{p.os}/{p.architecture}" for entry in index.manifests if (p := entry.platform)})
        raise ImageError(f"no image for linux/{architecture()}, only for {', '.join(offered) or 'nothing'}")
    return next((entry for entry in fitting if entry.platform), fitting[0])
