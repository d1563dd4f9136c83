"""What a source gives: a small, bare, local git repository of revisions, oldest to newest.

`pypi:NAME[==VERSION]` and git paths or URLs are built in; other packages add sources through the entry
point group `posttrain.sources` (name = the prefix before the colon; value = a callable that takes the
rest of the name and a `Limits`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, PositiveInt

from catalog.jsonl import read_record
from envfactory import git
from envfactory.errors import NoSpace, SourceError, full_disk_is_a_user_error
from envfactory.trees import File

Progress = Callable[[str], None]
"""Called with a short line whenever there is something to tell."""


def silent(_: str) -> None:
    """The progress callback that says nothing."""


class Limits(BaseModel):
    """How much of a history is fetched."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    releases: PositiveInt = 12
    """Newest releases of a package."""
    commits: PositiveInt = 60
    """Newest commits of a repository's default branch."""
    free_mb: int = 500
    """Free space that the home folder must have before a fetch starts."""


@dataclass(frozen=True, slots=True)
class Revision:
    """One state of the package."""

    name: str
    """Release version or short commit id."""
    commit: str
    """Commit in the history's repository."""
    date: int
    """Seconds since the epoch."""
    message: str = ""


@dataclass(frozen=True)
class History:
    """A fetched source: a bare repository in the home folder, and its revisions, oldest first."""

    source: str
    """As the user named it."""
    pinned: str
    """The same with the newest revision fixed: names this history again tomorrow."""
    name: str
    """Slug of the package: what ids and folders start with."""
    kind: Literal["release", "commit"]
    repository: Path
    revisions: tuple[Revision, ...]

    @property
    def newest(self) -> Revision:
        return self.revisions[-1]

    def tree(self, revision: Revision, *, known: dict[str, bytes] | None = None) -> dict[str, File]:
        """The files of a revision. `known` shares the bytes between revisions."""
        return git.read_commit(self.repository, revision.commit, known=known)


@runtime_checkable
class Source(Protocol):
    """One place that tasks can be made from."""

    name: str

    def fetch(self, home: Path, progress: Progress = silent) -> History:
        """Bring the history into `home`, or find it there. Raises SourceError or NoSpace."""
        ...


def open_source(name: str, limits: Limits | None = None) -> Source:
    """The source of that name: `pypi:NAME[==VERSION]`, a git URL or folder, or a plugin's prefix."""
    from envfactory.sources.pypi import PypiSource
    from envfactory.sources.repository import RepositorySource

    limits = limits or Limits()
    prefix, colon, rest = name.partition(":")
    if prefix == "pypi" and colon:
        return PypiSource(rest, limits)
    if colon and not rest.startswith("//"):
        for point in entry_points(group="posttrain.sources", name=prefix):
            plugin: Callable[[str, Limits], Source] = point.load()
            return plugin(rest, limits)
    return RepositorySource(name, limits)


def slug(name: str) -> str:
    """A name as ids and folders carry it: lower case, digits and single dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "source"


def check_space(home: Path, needed_mb: int) -> None:
    """Raise NoSpace unless the home folder's disk has that much room."""
    home.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(home).free >> 20
    if free < needed_mb:
        raise NoSpace(
            f"{home} has {free} MiB free and {needed_mb} are needed: free some, or choose another home"
        )


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A temporary folder beside `final` that becomes it at the end, or vanishes on any error.

    When another process was quicker, its folder stands and ours is dropped.
    """
    with full_disk_is_a_user_error(final.parent):
        final.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".tmp", dir=final.parent))
        try:
            yield folder
            sync_tree(folder)
            try:
                os.rename(folder, final)
            except OSError:
                if not final.is_dir():
                    raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Put every file beneath a folder on the disk, and its name."""
    for root, _, names in os.walk(folder):
        for place in [*(os.path.join(root, name) for name in names), root] if names else []:
            if os.path.islink(place):
                continue
            handle = os.open(place, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def save_history(history: History, folder: Path) -> None:
    """Write the record beside the repository (`history.json`, format 1)."""
    record = asdict(history) | {"repository": "repo.git", "format": 1}
    (folder / "history.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def load_history(folder: Path, source: str) -> History | None:
    """The history in a folder, or None when there is none."""
    try:
        record = read_record(folder / "history.json", remove=folder)
    except FileNotFoundError:
        return None
    if record.pop("format") != 1:
        raise SourceError(f"{folder} was written by another version: remove that folder")
    record["repository"] = folder / record["repository"]
    record["revisions"] = tuple(Revision(**row) for row in record["revisions"])
    record["source"] = source
    return History(**record)
