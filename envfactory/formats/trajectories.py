"""What the trajectory formats share: files of JSON documents, our record less what a format says itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from catalog.atomic import write_atomic
from catalog.trajectory import Trajectory
from envfactory.errors import full_disk_is_a_user_error
from envfactory.formats.fields import Fields, FormatError, checked_id, parse_json
from envfactory.formats.recipes import fresh_folder, write_files
from envfactory.formats.rows import MAX_LINE
from envfactory.trees import File


class TrajectoryFormat(Protocol):
    """One format of trajectories; a module of this package is one."""

    name: str
    summary: str
    missing: tuple[str, ...]
    """What other programs that read this format will not see, though it is in the document."""

    def read(self, path: Path) -> Iterator[Trajectory]:
        """The trajectories of a file or folder. Raises FormatError."""
        ...

    def write(self, trajectories: Iterable[Trajectory], path: Path) -> int:
        """Write a new .jsonl file or folder, whole or not at all; how many. Raises FormatError."""
        ...


def read_documents(path: Path, pattern: str) -> Iterator[Fields]:
    """The JSON objects of a .json or .jsonl file, or of every file of a folder that matches the pattern."""
    if path.is_dir():
        files = sorted(one for one in path.rglob(pattern) if one.is_file() and not one.is_symlink())
        if not files:
            raise FormatError(f"{path} holds no {pattern}: name a folder or file with trajectories")
        for file in files:
            yield from read_documents(file, pattern)
        return
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), start=1):
                place = f"{path}, line {number}"
                if len(line) > MAX_LINE:
                    raise FormatError(f"{place} is longer than {MAX_LINE >> 20} MiB")
                if line.strip():
                    yield Fields.of(parse_json(line, place), place)
        return
    if path.stat().st_size > MAX_LINE:
        raise FormatError(f"{path} is larger than {MAX_LINE >> 20} MiB")
    yield Fields.of(parse_json(path.read_bytes(), str(path)), str(path))


def write_documents(documents: Iterable[tuple[str, dict[str, Any]]], path: Path, ending: str) -> int:
    """Write (id, document) pairs: one a line where `path` ends with .jsonl, else a folder with one a file."""
    seen: set[str] = set()

    def checked() -> Iterator[tuple[str, dict[str, Any]]]:
        for id, document in documents:
            if checked_id(id, "the trajectory's id").lower() in seen:
                raise FormatError(f"the trajectory {id} comes twice: give each an id of its own")
            seen.add(id.lower())
            yield id, document

    if path.suffix == ".jsonl":
        if path.exists():
            raise FormatError(f"{path} exists already: remove it or choose another name")
        lines = [json.dumps(document, ensure_ascii=False) + "\n" for _, document in checked()]
        with full_disk_is_a_user_error(path.parent):
            write_atomic(path, "".join(lines).encode())
        return len(lines)
    with fresh_folder(path) as folder:
        for id, document in checked():
            text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
            write_files({f"{id}/{id}{ending}": File(text.encode())}, folder / ".")
    return len(seen)


def thin(trajectory: Trajectory) -> dict[str, Any]:
    """Our record without the texts of its turns, and without defaults."""
    value = trajectory.model_dump(mode="json", exclude_defaults=True)
    value["turns"] = [{k: v for k, v in turn.items() if k != "text"} for turn in value.get("turns", [])]
    return {"format": 1} | value


def thick(value: Fields, texts: list[str]) -> Trajectory:
    """The inverse of `thin`, with the texts that a document holds. Raises FormatError."""
    turns = value.value.get("turns")
    if not isinstance(turns, list) or len(turns) != len(texts):
        raise FormatError(
            f"{value.place}: the document has {len(texts)} turns and our part of it another number"
        )
    pairs = zip(turns, texts, strict=True)
    full = [Fields.of(turn, value.place).value | {"text": text} for turn, text in pairs]
    return made(value.value | {"turns": full}, value.place)


def made(record: dict[str, Any], place: str) -> Trajectory:
    """A trajectory from plain values. Raises FormatError."""
    try:
        return Trajectory.model_validate(record)
    except ValidationError as error:
        one = error.errors()[0]
        where = ".".join(map(str, one["loc"])) or "the record"
        raise FormatError(f"{place} makes no trajectory ({where}: {one['msg']})") from error


def no_twins(trajectories: Iterable[Trajectory], place: str) -> Iterator[Trajectory]:
    """The trajectories; FormatError when an id comes twice."""
    known: set[str] = set()
    for one in trajectories:
        if one.id in known:
            raise FormatError(f"{place} holds the trajectory {one.id} twice")
        known.add(one.id)
        yield one
