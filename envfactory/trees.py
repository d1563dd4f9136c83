"""A file tree in memory: what a commit, a release or a workspace holds.

Everything between a source and an image works on these mappings; disks are touched only at both ends.
Two hundred tasks of one package share the bytes of all files that they do not change.

Paths are relative, with forward slashes, never with `.`, `..` or an empty part.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from envfactory.errors import full_disk_is_a_user_error


@dataclass(frozen=True, slots=True)
class File:
    """One entry: content and the two mode bits that git keeps. The data of a link is its target."""

    data: bytes
    executable: bool = False
    link: bool = False

    @property
    def mode(self) -> str:
        """Mode as git writes it."""
        return "120000" if self.link else "100755" if self.executable else "100644"


Tree = Mapping[str, File]
"""Path to file."""
Changes = Mapping[str, bytes | None]
"""Path to new content; None deletes."""


def is_text(data: bytes) -> bool:
    """Whether these bytes are UTF-8. A source in another encoding runs, but is never edited."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def changed(tree: Tree, changes: Changes) -> dict[str, File]:
    """A new tree with the changes laid over it; a changed file keeps its mode bits."""
    result = dict(tree)
    for path, data in changes.items():
        if data is None:
            result.pop(path, None)
        else:
            old = result.get(path)
            result[path] = File(data, executable=old.executable if old else False)
    return result


def difference(before: Tree, after: Tree) -> dict[str, bytes | None]:
    """The changes that turn one tree into the other (mode bits and links aside), sorted by path."""
    paths = sorted(set(before) | set(after))
    result: dict[str, bytes | None] = {}
    for path in paths:
        old, new = before.get(path), after.get(path)
        if new is None:
            result[path] = None
        elif old is None or old.data != new.data:
            result[path] = new.data
    return result


def tree_key(tree: Tree) -> str:
    """`sha256:` over sorted (path, mode, content): one name for one tree."""
    digest = hashlib.sha256()
    for path in sorted(tree):
        file = tree[path]
        content = hashlib.sha256(file.data).hexdigest()
        digest.update(f"{path}\0{file.mode}\0{content}\n".encode("utf-8", "surrogateescape"))
    return "sha256:" + digest.hexdigest()


def write_tree(tree: Tree, folder: Path) -> None:
    """Write a tree beneath a new or empty folder."""
    made: set[str] = set()
    root = str(folder)
    os.makedirs(root, exist_ok=True)
    for path, file in tree.items():
        target = f"{root}/{path}"
        parent = target.rpartition("/")[0]
        if parent not in made:
            os.makedirs(parent, exist_ok=True)
            made.add(parent)
        if file.link:
            os.symlink(file.data, os.fsencode(target))
            continue
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755 if file.executable else 0o644)
        with os.fdopen(handle, "wb") as out:
            out.write(file.data)


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder, in memory where the host has room for that.

    Workspaces live on a disk for a few milliseconds only; on a busy one, removing them costs more than
    everything else.
    """
    memory = Path("/dev/shm")
    roomy = os.access(memory, os.W_OK | os.X_OK) and shutil.disk_usage(memory).free > 512 << 20
    place = str(memory) if roomy else None
    with (
        full_disk_is_a_user_error(Path(place or tempfile.gettempdir())),
        tempfile.TemporaryDirectory(prefix="posttrain.", dir=place) as folder,
    ):
        yield Path(folder)


def read_tree(folder: Path, skip: Iterable[str] = (".git",)) -> dict[str, File]:
    """The files beneath a folder, entries named in `skip` left out wherever they are."""
    left_out = set(skip)
    result: dict[str, File] = {}
    for root, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(f"{root}/{name}")]
        folders[:] = sorted(name for name in folders if name not in left_out and name not in links)
        for name in sorted(names + links):
            place = Path(root, name)
            path = place.relative_to(folder).as_posix()
            if name in left_out:
                continue
            if place.is_symlink():
                result[path] = File(os.fsencode(os.readlink(place)), link=True)
            elif place.is_file():
                result[path] = File(place.read_bytes(), executable=os.access(place, os.X_OK))
    return result


def tar_of(tree: Tree) -> bytes:
    """A tar whose bytes depend on the tree alone: sorted, no owner, no time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(tree):
            file = tree[path]
            info = tarfile.TarInfo(path)
            info.mode = 0o755 if file.executable else 0o644
            if file.link:
                info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(file.data)
                tar.addfile(info)
            else:
                info.size = len(file.data)
                tar.addfile(info, io.BytesIO(file.data))
    return buffer.getvalue()


def safe_path(name: str) -> str | None:
    """The path in normal form, or None for one that leaves the tree or reaches into a `.git`."""
    if "\\" in name or "\0" in name or name.startswith("/"):
        return None
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or any(part.lower() == ".git" for part in parts):
        return None
    return "/".join(parts)


def link_stays_inside(path: str, target: str) -> bool:
    """Whether a symbolic link at `path` with this target points into its own tree."""
    if target.startswith("/") or "\0" in target:
        return False
    depth = len(PurePosixPath(path).parts) - 1
    for part in target.split("/"):
        if part == "..":
            depth -= 1
            if depth < 0:
                return False
        elif part not in ("", "."):
            depth += 1
    return True
