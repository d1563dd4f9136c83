"""A git diff turned round: what it added it removes. Turning it round again gives the same bytes.

SWE-smith keeps the diff that made a bug, where everybody else keeps the one that mends it.
"""

from __future__ import annotations

import re

from envfactory.formats.fields import FormatError

_HUNK = re.compile(rb"@@ -(\d+(?:,\d+)?) \+(\d+(?:,\d+)?) @@(.*)", re.S)
_SWAPS = {
    b"new file mode ": b"deleted file mode ",
    b"deleted file mode ": b"new file mode ",
    b"old mode ": b"new mode ",
    b"new mode ": b"old mode ",
    b"rename from ": b"rename to ",
    b"rename to ": b"rename from ",
}


def reverse(diff: bytes) -> bytes:
    """The opposite of a git diff. Raises FormatError for what has none (copies, damaged hunks)."""
    lines = diff.splitlines(keepends=True) if b"\r" not in diff else _split(diff)
    out: list[bytes] = []
    place = 0
    while place < len(lines):
        line = lines[place]
        if line.startswith(b"@@ "):
            place = _hunk(lines, place, out)
        elif line.startswith(b"GIT binary patch"):
            place = _binary(lines, place, out)
        elif line.startswith(b"diff --git "):
            place = _header(lines, place, out)
        else:
            out.append(line)
            place += 1
    return b"".join(out)


def _split(diff: bytes) -> list[bytes]:
    return [line + b"\n" for line in diff.removesuffix(b"\n").split(b"\n")] if diff else []


def _header(lines: list[bytes], place: int, out: list[bytes]) -> int:
    """The lines before a file's first hunk, in git's order."""
    head = lines[place]
    place += 1
    body: list[bytes] = []
    while place < len(lines) and not lines[place].startswith((b"@@ ", b"GIT binary patch", b"diff --git ")):
        body.append(lines[place])
        place += 1
    names = [line for line in body if line.startswith((b"--- ", b"+++ "))]
    if any(line.startswith((b"copy from ", b"copy to ")) for line in body):
        raise FormatError("a diff that copies a file has no opposite: make it without --find-copies")
    out.append(_renamed(head, body))
    rest = [_swapped(line) for line in body if line not in names]
    order = (b"old mode ", b"new mode ", b"similarity", b"rename from ", b"rename to ")
    rest.sort(
        key=lambda line: next((i for i, start in enumerate(order) if line.startswith(start)), len(order))
    )
    out += rest
    if len(names) == 2:
        old, new = names[0][4:], names[1][4:]
        out += [b"--- " + _side(new, b"a/", b"b/"), b"+++ " + _side(old, b"b/", b"a/")]
    return place


def _renamed(head: bytes, body: list[bytes]) -> bytes:
    """The first line, names exchanged where the file was renamed."""
    old = next((line[12:].rstrip(b"\r\n") for line in body if line.startswith(b"rename from ")), None)
    new = next((line[10:].rstrip(b"\r\n") for line in body if line.startswith(b"rename to ")), None)
    if old is None or new is None:
        return head

    def quoted(side: bytes, name: bytes) -> bytes:
        return b'"' + side + name[1:] if name.startswith(b'"') else side + name

    return b"diff --git " + quoted(b"a/", new) + b" " + quoted(b"b/", old) + b"\n"


def _swapped(line: bytes) -> bytes:
    for start, other in _SWAPS.items():
        if line.startswith(start):
            return other + line[len(start) :]
    if match := re.fullmatch(rb"index ([0-9a-f]+)\.\.([0-9a-f]+)(.*)", line, re.S):
        old, new, rest = match.groups()
        return b"index " + new + b".." + old + rest
    return line


def _side(name: bytes, wanted: bytes, had: bytes) -> bytes:
    if name.startswith(b'"' + had):
        return b'"' + wanted + name[1 + len(had) :]
    return wanted + name[len(had) :] if name.startswith(had) else name


def _hunk(lines: list[bytes], place: int, out: list[bytes]) -> int:
    match = _HUNK.fullmatch(lines[place])
    if match is None:
        raise FormatError("the diff has a damaged hunk: make it again with git diff")
    old, new, rest = match.groups()
    out.append(b"@@ -" + new + b" +" + old + b" @@" + rest)
    left = [int(part.rpartition(b",")[2]) if b"," in part else 1 for part in (old, new)]
    place += 1
    removed: list[bytes] = []
    added: list[bytes] = []
    last = None

    def flush() -> None:
        # In git's diffs what is removed stands before what is added.
        out.extend(added)
        out.extend(removed)
        removed.clear()
        added.clear()

    while place < len(lines) and (left[0] > 0 or left[1] > 0 or lines[place].startswith(b"\\")):
        line = lines[place]
        place += 1
        if line.startswith(b"-"):
            if last is added:
                flush()
            removed.append(b"+" + line[1:])
            last, left[0] = removed, left[0] - 1
        elif line.startswith(b"+"):
            added.append(b"-" + line[1:])
            last, left[1] = added, left[1] - 1
        elif line.startswith(b"\\") and last is not None:
            last.append(line)
        else:
            flush()
            out.append(line)
            last = out
            left = [left[0] - 1, left[1] - 1]
    flush()
    if any(left):
        raise FormatError("the diff has a damaged hunk: make it again with git diff")
    return place


def _binary(lines: list[bytes], place: int, out: list[bytes]) -> int:
    """Two blocks (new content, old content), each up to an empty line, are exchanged."""
    out.append(lines[place])
    place += 1
    blocks: list[list[bytes]] = []
    while place < len(lines) and lines[place].startswith((b"literal ", b"delta ")) and len(blocks) < 2:
        block: list[bytes] = []
        while place < len(lines):
            block.append(lines[place])
            place += 1
            if not block[-1].strip():
                break
        blocks.append(block)
    if len(blocks) != 2:
        raise FormatError("a binary diff without the old content has no opposite: make it with --binary")
    out += [line for block in reversed(blocks) for line in block]
    return place
