"""What survives `kill -9`: a write-ahead journal per sample, and a log of finished trajectories.

A sample's journal gets a line for each given turn, each sampled token, each segment and each tool result,
before anyone acts on it. After a crash the agent's code runs again from its start and is answered from
the journal until that ends; then the policy's context is computed again from the exact ids and generation
goes on at the very token. Starting an unfinished sample over would be wrong: short answers survive
interruption more often, so it would bias lengths.

A line is `crc32 json`. Writing stops anywhere: the first line that is torn or damaged ends the journal,
and what follows is cut off before the next append. A process that is killed loses nothing that it wrote.
`sync` guards against loss of power as well: after each turn, after each token, or (samples in flight, by
default) not at all, since a sync takes longer than a token and blocks everybody.

Finished trajectories go to `trajectories.jsonl`, each id once; then the sample's journal is deleted.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from catalog.trajectory import Trajectory

FORMAT = 1
SyncPolicy = Literal["never", "turn", "token"]


class JournalError(Exception):
    """A journal cannot be read: written by another format, or for something else."""

    exit_code = 2


def encode_line(value: dict[str, Any]) -> bytes:
    """One journal line with its checksum."""
    body = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def decode_lines(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """The intact lines from the start, and how many bytes they take. The rest is torn."""
    values: list[dict[str, Any]] = []
    position = 0
    while (end := data.find(b"\n", position)) >= 0:
        checksum, separator, body = data[position:end].partition(b" ")
        if not separator or len(checksum) != 8 or checksum != b"%08x" % zlib.crc32(body):
            break
        values.append(json.loads(body))
        position = end + 1
    return values, position


class Journal:
    """An append-only file of checked lines. The first line says what it belongs to.

    Raises JournalError if the file exists and its first line differs from `header`.
    """

    def __init__(self, path: Path, header: dict[str, Any], *, sync: SyncPolicy = "never") -> None:
        self.path = path
        self._sync = sync
        head = json.loads(json.dumps({"format": FORMAT, **header}))
        data = path.read_bytes() if path.exists() else b""
        values, intact = decode_lines(data)
        if values and values[0] != head:
            raise JournalError(f"{path} belongs to {values[0]}, not to {head}; use another run folder")
        self.entries = values[1:]
        """What an earlier process wrote."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._file, intact)
        if not values:
            self.append(head)

    def append(self, value: dict[str, Any], *, turn: bool = False) -> None:
        """Write a line. `turn` marks the end of something: the place where policy `turn` syncs."""
        line = encode_line(value)
        written = os.write(self._file, line)
        if written != len(line):
            raise OSError(f"{self.path}: the disk took {written} of {len(line)} bytes; free some space")
        if self._sync == "token" or (turn and self._sync == "turn"):
            os.fdatasync(self._file)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def remove(self) -> None:
        """Close and delete: the sample is finished and logged elsewhere."""
        self.close()
        self.path.unlink(missing_ok=True)


class TrajectoryLog:
    """`trajectories.jsonl`: one JSON object a line, every id at most once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, tuple[int, int]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._end = 0
        for line in path.read_bytes().splitlines(keepends=True):
            identity = _identity(line)
            if identity is None:
                break
            self._places[identity] = (self._end, len(line))
            self._end += len(line)
        os.ftruncate(self._file, self._end)

    def __contains__(self, id: str) -> bool:
        return id in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Trajectory]:
        return (self[id] for id in list(self._places))

    def __getitem__(self, id: str) -> Trajectory:
        start, length = self._places[id]
        return Trajectory.model_validate_json(os.pread(self._file, length, start))

    def append(self, trajectory: Trajectory) -> bool:
        """Write it durably; False, and nothing written, if its id is there already."""
        if trajectory.id in self._places:
            return False
        line = trajectory.model_dump_json().encode() + b"\n"
        if os.pwrite(self._file, line, self._end) != len(line):
            os.ftruncate(self._file, self._end)
            raise OSError(f"{self.path}: the disk is full; free some space")
        os.fdatasync(self._file)
        self._places[trajectory.id] = (self._end, len(line))
        self._end += len(line)
        return True

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _identity(line: bytes) -> str | None:
    """The id of a whole trajectory line; None if it is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value["id"] if isinstance(value, dict) and "id" in value else None
