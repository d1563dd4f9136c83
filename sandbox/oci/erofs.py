"""A layer's tar as an EROFS file system, without unpacking it.

The index made here holds folders, inodes and names; the files' bytes stay where they are, in the tar, which
becomes the file system's second device (entries of a tar start at multiples of 512, so that is its block
size). Linux mounts both files directly from 6.12 on (CONFIG_EROFS_FS_BACKED_BY_FILE). On-disk format: the
kernel's Documentation/filesystems/erofs.rst and fs/erofs/erofs_fs.h; all numbers are little-endian.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from sandbox.oci.layers import permissions, shown_ids
from sandbox.oci.tars import Kind, Member, TarReader

BLOCK_BITS = 9
BLOCK = 1 << BLOCK_BITS
_MAGIC = 0xE0F5E1E2
_CHUNKED, _DEVICES = 0x4, 0x8  # incompatible features
_PLAIN, _INLINE, _CHUNK = 0, 2, 4  # data layouts
_INDEXES = 0x20  # chunk format: 8-byte indexes that name a device
_SLOT = 32  # inodes are numbered by 32-byte slots
_INODE = 64
_DEVICE_SLOT = 128
_SUPER_AT = 1024
_META = 3
"""First block of the inodes: behind superblock and device table."""
_USER = 1  # xattr name index of `user.`
_MAX_XATTRS = 256
_TYPES: dict[Kind, tuple[int, int]] = {
    "file": (stat.S_IFREG, 1), "folder": (stat.S_IFDIR, 2), "whiteout": (stat.S_IFCHR, 3),
    "symlink": (stat.S_IFLNK, 7),
}  # fmt: skip


@dataclass(eq=False, slots=True)
class _Node:
    kind: Kind
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    size: int = 0
    at: int = 0
    """Offset of a file's bytes in the tar."""
    link: bytes = b""
    xattrs: bytes = b""
    children: dict[bytes, _Node] = field(default_factory=dict[bytes, "_Node"])
    links: int = 1
    nid: int = 0
    block: int = 0
    """First block of a folder's or long link's data in the index."""


def supported() -> bool:
    """Whether this host can mount what `write_index` makes: root, and a kernel that has the driver."""
    release = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    try:
        known = Path("/proc/filesystems").read_text()
    except OSError:
        return False
    return os.geteuid() == 0 and release >= (6, 12) and "\terofs\n" in known


def write_index(tar: IO[bytes], out: IO[bytes], name: str) -> None:
    """Write the EROFS index of an uncompressed tar (a seekable file) to the empty file `out`.

    `name`: 64 characters that name the tar, such as its digest. Raises UnsafeTar as unpacking would.
    """
    length = tar.seek(0, os.SEEK_END)
    root = _read(tar)
    nodes = list(_walk(root))
    parents = {
        id(child): node for node in nodes for child in node.children.values() if child.kind == "folder"
    }
    end = _number(nodes)
    block = _META + -(-end // BLOCK)
    for node in nodes:
        if node.kind == "folder":
            node.size = _folder_size(node)
        if node.kind == "folder" or (node.kind == "symlink" and not _is_inline(node)):
            node.block = block
            block += -(-node.size // BLOCK)
    _write_head(out, root, len(nodes), block, -(-length // BLOCK), name)
    for node in nodes:
        out.seek(_META * BLOCK + node.nid * _SLOT)
        out.write(_record(node))
        if node.block:
            out.seek(node.block * BLOCK)
            out.write(node.link if node.kind == "symlink" else _folder(node, parents.get(id(node), node)))
    out.truncate(block * BLOCK)
    out.flush()


def _read(tar: IO[bytes]) -> _Node:
    root = _Node("folder")
    by_name: dict[str, _Node] = {"": root}

    def folder(name: str) -> _Node:
        """The folder of that name; an entry may come before its parents, or without them."""
        missing: list[str] = []
        while name not in by_name:
            missing.append(name)
            name = name.rpartition("/")[0]
        found = by_name[name]
        for each in reversed(missing):
            made = by_name[each] = _Node("folder")
            found.children[_encode(each.rpartition("/")[2])] = made
            found = made
        return found

    with TarReader(tar) as reader:
        for member in reader:
            if member.kind == "opaque":
                folder(member.name).xattrs += _xattr(b"overlay.opaque", b"y")
            elif member.kind == "folder":
                _describe(folder(member.name), member)
            else:
                node = by_name[member.link] if member.kind == "hardlink" else _Node(member.kind, links=0)
                node.links += 1
                if member.kind != "hardlink":
                    _describe(node, member)
                above, _, last = member.name.rpartition("/")
                by_name[member.name] = folder(above).children[_encode(last)] = node
    return root


def _describe(node: _Node, member: Member) -> None:
    info = member.info
    if node.kind == "whiteout":
        node.mode = 0o600
        return
    node.mode, node.mtime = permissions(member), max(0, int(info.mtime))
    node.uid, node.gid = shown_ids(info)
    if node.kind == "file":
        node.size, node.at = info.size, info.offset_data
    elif node.kind == "symlink":
        node.mode, node.link = 0o777, _encode(member.link)
        node.size = len(node.link)
    for name, value in member.xattrs.items():
        if name.startswith("user.") and node.kind != "symlink":
            more = _xattr(_encode(name.removeprefix("user.")), value)
            if len(node.xattrs) + len(more) <= _MAX_XATTRS:
                node.xattrs += more


def _walk(root: _Node) -> Iterator[_Node]:
    """Every node once, the root first."""
    seen = {id(root)}
    queue = [root]
    for node in queue:
        yield node
        for key in sorted(node.children):
            child = node.children[key]
            if id(child) not in seen:
                seen.add(id(child))
                queue.append(child)


def _number(nodes: list[_Node]) -> int:
    """Give every inode its place (none crosses a block); returns where they end."""
    at = 2 * _SLOT  # number 0 stays free
    for node in nodes:
        size = -(-len(_record(node)) // _SLOT) * _SLOT
        if at % BLOCK + size > BLOCK:
            at = -(-at // BLOCK) * BLOCK
        node.nid = at // _SLOT
        at += size
    return at


def _is_inline(node: _Node) -> bool:
    return node.kind == "symlink" and node.size <= BLOCK - _INODE


def _record(node: _Node) -> bytes:
    """An inode with its attributes, and with what follows it: a chunk index or a short link."""
    kind, _ = _TYPES[node.kind]
    chunked = node.kind == "file" and node.size > 0
    layout = _CHUNK if chunked else _INLINE if _is_inline(node) else _PLAIN
    chunk_bits = max(0, (node.size - 1).bit_length() - BLOCK_BITS) if chunked else 0
    place = chunk_bits | _INDEXES if chunked else node.block
    links = node.links
    if node.kind == "folder":
        links = 2 + sum(child.kind == "folder" for child in node.children.values())
    xattrs = struct.pack("<IB7x", 0, 0) + node.xattrs if node.xattrs else b""
    count = 1 + (len(xattrs) - 12) // 4 if xattrs else 0
    inode = struct.pack(
        "<HHHHQIIIIQII16x", 1 | layout << 1, count, kind | node.mode, 0, node.size, place, node.nid, node.uid,
        node.gid, node.mtime, 0, links,
    )  # fmt: skip
    head = inode + xattrs
    if chunked:
        head += bytes(-len(head) % 8) + struct.pack("<HHI", 0, 1, node.at >> BLOCK_BITS)
    return head + node.link if layout == _INLINE else head


def _xattr(name: bytes, value: bytes) -> bytes:
    entry = struct.pack("<BBH", len(name), _USER, len(value)) + name + value
    return entry + bytes(-len(entry) % 4)


def _entries(node: _Node, parent: _Node) -> list[tuple[bytes, _Node]]:
    return sorted([(b".", node), (b"..", parent), *node.children.items()], key=lambda entry: entry[0])


def _folder_size(node: _Node) -> int:
    """Bytes of a folder's data: every block but the last counts whole."""
    blocks = list(_blocks(_entries(node, node)))
    return BLOCK * (len(blocks) - 1) + sum(12 + len(name) for name, _ in blocks[-1])


def _blocks(entries: list[tuple[bytes, _Node]]) -> Iterator[list[tuple[bytes, _Node]]]:
    block: list[tuple[bytes, _Node]] = []
    used = 0
    for entry in entries:
        need = 12 + len(entry[0])
        if used + need > BLOCK:
            yield block
            block, used = [], 0
        block.append(entry)
        used += need
    yield block


def _folder(node: _Node, parent: _Node) -> bytes:
    """A folder's data: blocks of entries, then their names."""
    parts: list[bytes] = []
    for block in _blocks(_entries(node, parent)):
        heads, names, at = b"", b"", 12 * len(block)
        for name, child in block:
            heads += struct.pack("<QHBx", child.nid, at, _TYPES[child.kind][1])
            names += name
            at += len(name)
        parts.append(heads + names)
    return b"".join(part.ljust(BLOCK, b"\0") for part in parts[:-1]) + parts[-1]


def _write_head(out: IO[bytes], root: _Node, count: int, blocks: int, tar_blocks: int, name: str) -> None:
    devices = _SUPER_AT // _DEVICE_SLOT + 1
    superblock = struct.pack(
        "<IIIBBHQQIIII16s16sIHHHBBIQ24x", _MAGIC, 0, 0, BLOCK_BITS, 0, root.nid, count, 0, 0, blocks, _META,
        0, bytes.fromhex(name[:32]), b"", _CHUNKED | _DEVICES, 0, 1, devices, 0, 0, 0, 0,
    )  # fmt: skip
    assert len(superblock) == _DEVICE_SLOT
    out.seek(_SUPER_AT)
    out.write(superblock + struct.pack("<64sII56x", name.encode(), tar_blocks, 0))


def _encode(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")
