from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox import trees
from sandbox.oci.layers import unpack
from sandbox.oci.tars import UnsafeTar


def make(root: Path) -> Path:
    (root / "a/b").mkdir(parents=True)
    (root / "a/b/file").write_bytes(b"data")
    (root / "run").write_bytes(b"#!/bin/sh\n")
    (root / "run").chmod(0o700)
    (root / "link").symlink_to("a/b/file")
    return root


def test_digest_sees_content_names_modes_and_links_only(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two")
    os.utime(two / "run", (1, 1))
    (two / "a/b/file").chmod(0o600)
    os.mkfifo(two / "pipe")
    digest = trees.tree_digest(one)
    assert digest == trees.tree_digest(two)
    for change in (
        lambda: (two / "a/b/file").write_bytes(b"dat a"),
        lambda: (two / "run").chmod(0o600),
        lambda: (two / "new").mkdir(),
        lambda: ((two / "link").unlink(), (two / "link").symlink_to("run")),
    ):
        change()
        changed = trees.tree_digest(two)
        assert changed != digest
        digest = changed


def test_pack_is_deterministic_and_unpacks_equal(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two")
    os.utime(two / "run", (1, 1))
    assert trees.pack_bytes(one) == trees.pack_bytes(two)
    target = tmp_path / "target"
    target.mkdir()
    unpack(io.BytesIO(trees.pack_bytes(one)), target)
    assert trees.tree_digest(target) == trees.tree_digest(one)


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    files=st.dictionaries(
        NAMES.filter(lambda name: name not in (".", "..")), st.binary(max_size=50), max_size=5
    )
)
def test_any_names_survive(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
    files = {name: data for name, data in files.items() if len(name.encode()) < 200}
    target = tmp_path_factory.mktemp("any")
    unpack(io.BytesIO(trees.pack_files(files)), target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == files
    again = tmp_path_factory.mktemp("again")
    unpack(io.BytesIO(trees.pack_bytes(target)), again)
    assert trees.tree_digest(again) == trees.tree_digest(target)


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


@pytest.mark.parametrize(
    "members",
    [
        [entry("../out")],
        [entry("/out")],
        [entry("a/../../out")],
        [entry("l", tarfile.SYMTYPE, ".."), entry("l/out")],
        [entry("l", tarfile.SYMTYPE, "/tmp"), entry("l/out")],
        [entry("d", tarfile.CHRTYPE)],
        [entry("p", tarfile.FIFOTYPE)],
        [entry("h", tarfile.LNKTYPE, "../secret")],
        [entry("l", tarfile.SYMTYPE, "/etc/passwd"), entry("h", tarfile.LNKTYPE, "l")],
    ],
)
def test_unsafe_entries_are_refused(tmp_path: Path, members: list[tarfile.TarInfo]) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in members:
            tar.addfile(member)
    buffer.seek(0)
    (tmp_path / "secret").write_text("x")
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(UnsafeTar):
        unpack(buffer, target)
    assert not (tmp_path / "out").exists()
