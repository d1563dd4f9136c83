"""Blobs on a disk and in fsspec's memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from catalog.atomic import write_atomic
from catalog.blobs import BlobCorrupt, BlobMissing, Blobs, blob_ref


@pytest.fixture(params=["file", "memory"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "blobs" if request.param == "file" else f"memory://{tmp_path.name}")


def test_bytes_come_back_by_their_digest(blobs: Blobs) -> None:
    empty, data = blobs.put(b""), blobs.put(b"\x00\xff" * 1000)
    assert data == blob_ref(b"\x00\xff" * 1000) == blobs.put(b"\x00\xff" * 1000)
    assert (blobs.get(data), blobs.get(empty)) == (b"\x00\xff" * 1000, b"")
    assert blobs.exists(data)
    assert not blobs.exists(blob_ref(b"other"))
    with pytest.raises(BlobMissing):
        blobs.get(blob_ref(b"other"))


@pytest.mark.parametrize("name", ["", "sha256:abc", "../../etc/passwd", "sha256:" + "A" * 64])
def test_only_digests_are_names(blobs: Blobs, name: str) -> None:
    with pytest.raises(ValueError, match="not a blob name"):
        blobs.get(name)


def test_damage_is_an_error_and_a_short_file_is_replaced(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    ref = blobs.put(b"precious")
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    file.chmod(0o644)
    file.write_bytes(b"PRECIOUS")
    with pytest.raises(BlobCorrupt):
        blobs.get(ref)
    file.write_bytes(b"prec")
    blobs.put(b"precious")
    assert blobs.get(ref) == b"precious"


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a.json"
    write_atomic(target, b"old")

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]
