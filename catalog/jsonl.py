"""Append-only files of JSON lines that survive `kill -9`.

A line counts once its newline is on disk. What a killed process left after the last newline is cut off
when the file is next opened for appending; readers skip it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from catalog.atomic import sync_folder
from catalog.errors import UserError
from catalog.models import canonical_json


@dataclass(frozen=True, slots=True)
class Position:
    """Where a line lies: its file, the offset of its first byte, its length without the newline."""

    file: str
    offset: int
    length: int


class JsonLines:
    """One writer's handle on a JSONL file. Make it under a lock: two writers would interleave offsets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        self._file = path.open("ab")
        if is_new:
            sync_folder(path.parent)
        self._end = _whole_lines(path)
        if self._end != self._file.tell():
            self._file.truncate(self._end)

    def append(self, value: Any) -> Position:
        """Write one line and wait until it is on disk."""
        return self.extend([value])[0]

    def extend(self, values: list[Any]) -> list[Position]:
        """Write several lines with one wait for the disk. A kill may keep only the first few of them."""
        positions: list[Position] = []
        lines = bytearray()
        for value in values:
            line = canonical_json(plain(value))
            positions.append(Position(str(self.path), self._end + len(lines), len(line)))
            lines += line + b"\n"
        self._file.write(lines)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._end += len(lines)
        return positions

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_lines(path: Path) -> Generator[Any]:
    """The values of all whole lines; nothing if there is no such file. Raises UserError if one is damaged."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                try:
                    value = json.loads(line)
                except ValueError:
                    raise UserError(f"{path}, line {number} is damaged: remove that line.") from None
                yield value


def read_record(path: Path, *, remove: Path | None = None) -> dict[str, Any]:
    """A JSON object in a file of ours. Raises UserError when something spoilt it, FileNotFoundError.

    `remove`: what to remove so that it is made again; the file itself by default.
    """
    try:
        record = json.loads(path.read_bytes())
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise UserError(f"{path} is damaged: remove {remove or 'it'}, and it is made again.")
    return cast(dict[str, Any], record)


def read_at(position: Position) -> bytes:
    """The bytes of one line. Raises FileNotFoundError."""
    with open(position.file, "rb") as file:
        file.seek(position.offset)
        return file.read(position.length)


def plain(value: Any) -> Any:
    """JSON has no NaN: numbers that are not finite become the strings `nan`, `inf`, `-inf`."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in cast(dict[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in cast(list[Any], value)]
    return value


def _whole_lines(path: Path) -> int:
    """Length in bytes up to and with the last newline."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0
