"""A repository with one commit and nothing else, made from memory without running git.

A task's repository must hold one root commit and no object beyond it; otherwise the history gives the
solution away. Two hundred tasks of one package differ in two or three files. So objects are hashed and
deflated once per content, and a task's pack is mostly a concatenation: a few milliseconds, two files.

Formats: gitformat-pack(5) version 2, gitformat-index(5) version 2. `envfactory.sanitize` asks the real
git afterwards whether the result is whole and closed.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass, field

from envfactory.trees import File, Tree

AUTHOR = "posttrain <posttrain@localhost>"
DATE = 946684800
"""2000-01-01T00:00:00Z: the date of every root commit, so that it says nothing."""
MESSAGE = "Initial commit\n"
BRANCH = "main"

_KINDS = {"commit": 1, "tree": 2, "blob": 3}
_CONFIG = (
    b"[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n\tlogallrefupdates = true\n"
)
_EXCLUDE = b"__pycache__/\n*.pyc\n.pytest_cache/\n.hypothesis/\n"


def object_id(kind: str, data: bytes) -> bytes:
    """SHA-1 name of a git object (20 bytes)."""
    return hashlib.sha1(f"{kind} {len(data)}\0".encode() + data, usedforsecurity=False).digest()


@dataclass(frozen=True, slots=True)
class _Packed:
    oid: bytes
    entry: bytes
    """Header and deflated data, as they stand in a pack."""
    crc: int


@dataclass
class PackWriter:
    """Makes repositories; remembers the deflated form of every blob that it has seen."""

    _blobs: dict[bytes, _Packed] = field(default_factory=dict[bytes, _Packed])
    _ids: dict[int, tuple[bytes, bytes]] = field(default_factory=dict[int, tuple[bytes, bytes]])

    def repository(self, tree: Tree) -> dict[str, File]:
        """The files of `.git` (paths relative to it) for one root commit over this tree."""
        blobs = {path: self._blob(file.data) for path, file in tree.items()}
        objects: dict[bytes, _Packed] = {packed.oid: packed for packed in blobs.values()}
        root = _trees(tree, blobs, objects)
        text = (
            f"tree {root.hex()}\nauthor {AUTHOR} {DATE} +0000\ncommitter {AUTHOR} {DATE} +0000\n\n{MESSAGE}"
        )
        commit = _pack("commit", text.encode())
        objects[commit.oid] = commit
        pack, index, name = _pack_files(objects)
        return {
            "HEAD": File(f"ref: refs/heads/{BRANCH}\n".encode()),
            "config": File(_CONFIG),
            "index": File(_staging(tree, blobs)),
            "info/exclude": File(_EXCLUDE),
            f"objects/pack/pack-{name}.idx": File(index),
            f"objects/pack/pack-{name}.pack": File(pack),
            f"refs/heads/{BRANCH}": File(commit.oid.hex().encode() + b"\n"),
        }

    def _blob(self, data: bytes) -> _Packed:
        # Hashing a megabyte a task would be half of the cost: the bytes object itself is the first key.
        known = self._ids.get(id(data))
        if known is not None and known[0] is data:
            return self._blobs[known[1]]
        oid = object_id("blob", data)
        if oid not in self._blobs:
            self._blobs[oid] = _pack("blob", data)
        self._ids[id(data)] = (data, oid)
        return self._blobs[oid]


def _pack(kind: str, data: bytes) -> _Packed:
    size = len(data)
    byte = (_KINDS[kind] << 4) | (size & 15)
    size >>= 4
    header = bytearray()
    while size:
        header.append(byte | 0x80)
        byte = size & 0x7F
        size >>= 7
    header.append(byte)
    entry = bytes(header) + zlib.compress(data, 3)
    return _Packed(object_id(kind, data), entry, zlib.crc32(entry))


def _trees(tree: Tree, blobs: dict[str, _Packed], objects: dict[bytes, _Packed]) -> bytes:
    """Add the tree objects of a tree to `objects`; the id of the root."""
    nested: dict[str, object] = {}
    for path in tree:
        *folders, name = path.split("/")
        place = nested
        for folder in folders:
            place = place.setdefault(folder, {})  # type: ignore[assignment]
        place[name] = path

    def add(place: dict[str, object]) -> bytes:
        # git sorts a folder as if its name ended with a slash.
        rows: list[tuple[bytes, bytes]] = []
        for name, item in place.items():
            raw = name.encode("utf-8", "surrogateescape")
            if isinstance(item, dict):
                rows.append((raw + b"/", b"40000 " + raw + b"\0" + add(item)))
            else:
                path = str(item)
                rows.append((raw, tree[path].mode.encode() + b" " + raw + b"\0" + blobs[path].oid))
        packed = _pack("tree", b"".join(row for _, row in sorted(rows)))
        objects[packed.oid] = packed
        return packed.oid

    return add(nested)


def _pack_files(objects: dict[bytes, _Packed]) -> tuple[bytes, bytes, str]:
    """A pack, its index and the hexadecimal name that both carry."""
    ordered = [objects[oid] for oid in sorted(objects)]
    parts = [struct.pack(">4sII", b"PACK", 2, len(ordered))]
    offsets: list[int] = []
    position = 12
    for packed in ordered:
        offsets.append(position)
        parts.append(packed.entry)
        position += len(packed.entry)
    if position >= 1 << 31:
        raise ValueError("a workspace of more than 2 GiB does not fit into one task")
    pack = b"".join(parts)
    checksum = hashlib.sha1(pack, usedforsecurity=False).digest()
    fanout = [0] * 256
    for packed in ordered:
        fanout[packed.oid[0]] += 1
    for i in range(1, 256):
        fanout[i] += fanout[i - 1]
    index = b"".join(
        (
            struct.pack(">4sI256I", b"\377tOc", 2, *fanout),
            b"".join(packed.oid for packed in ordered),
            struct.pack(f">{len(ordered)}I", *(packed.crc for packed in ordered)),
            struct.pack(f">{len(offsets)}I", *offsets),
            checksum,
        )
    )
    index += hashlib.sha1(index, usedforsecurity=False).digest()
    return pack + checksum, index, checksum.hex()


def _staging(tree: Tree, blobs: dict[str, _Packed]) -> bytes:
    """The index file. Its times are zero, so the first `git status` looks at the content and stores them."""
    names = sorted((path.encode("utf-8", "surrogateescape"), path) for path in tree)
    parts = [struct.pack(">4sII", b"DIRC", 2, len(names))]
    for raw, path in names:
        file = tree[path]
        stat = (0, 0, 0, 0, 0, 0, int(file.mode, 8), 0, 0, len(file.data) & 0xFFFFFFFF)
        entry = struct.pack(">10I20sH", *stat, blobs[path].oid, min(len(raw), 0xFFF)) + raw
        parts.append(entry + b"\0" * (8 - len(entry) % 8))
    data = b"".join(parts)
    return data + hashlib.sha1(data, usedforsecurity=False).digest()
