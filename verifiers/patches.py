"""Git diffs as bytes: applied safely in a scratch folder, and made from two sets of files.

git does the work (binary deltas, renames, modes, CRLF are its business) with no user configuration, hooks,
attributes or repository in reach. What a diff did is then read off the scratch folder, not off the diff's own
words: what git wrote is what is judged against the allowed paths. Nothing here executes a file.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_DIFF = 8 << 20
"""Bytes of the largest diff that is looked at."""

_MODE = re.compile(
    rb"^(?:new file mode|new mode|old mode|deleted file mode|index [0-9a-f.]+) (\d{6})\s*$", re.M
)
_MODE_NAMES = {b"120000": "a symbolic link", b"160000": "a submodule"}
_FROM = re.compile(rb"^(?:rename|copy) from (.+?)\r?$", re.M)
_GIT_FILES = frozenset({".git", ".gitattributes", ".gitmodules"})
_LFS = b"version https://git-lfs.github.com/spec/"
_OPTIONS = (
    "core.hooksPath=/dev/null",
    "core.attributesFile=/dev/null",
    "core.autocrlf=false",
    "core.eol=lf",
    "core.fileMode=true",
    "core.symlinks=true",
    "core.quotePath=true",
    "diff.algorithm=myers",
    "diff.noprefix=false",
    "diff.mnemonicPrefix=false",
)


class PatchRefused(ValueError):
    """The diff may not or cannot be applied; the message is one sentence for people."""


@dataclass(frozen=True)
class Applied:
    """What a diff did to a workspace."""

    files: dict[str, bytes | None]
    """Changed paths -> new content, None where deleted. Unchanged files are left out."""
    executable: frozenset[str]
    """Paths among `files` with the execute bit."""


@dataclass(frozen=True)
class SourceFile:
    """A file before the diff."""

    content: bytes
    executable: bool = False


def touched(diff: bytes) -> list[str]:
    """Every path that `diff` names, old and new, in order. Raises PatchRefused when git cannot read it."""
    if not diff.strip():
        return []
    if len(diff) > MAX_DIFF:
        raise PatchRefused(f"the diff has {len(diff):,} bytes, more than {MAX_DIFF:,}")
    for mode in _MODE.findall(diff):
        if mode in _MODE_NAMES:
            raise PatchRefused(f"the diff holds {_MODE_NAMES[mode]}, which is not supported")
    with tempfile.TemporaryDirectory(prefix="patch-") as scratch:
        # numstat names a rename by its new path alone; the reversed patch names the old one
        forward = _git(["apply", "--numstat", "-z"], scratch, diff)
        backward = _git(["apply", "--numstat", "-z", "-R"], scratch, diff)
    names = [
        entry.split(b"\t", 2)[2] for entry in (forward + backward).split(b"\0") if entry.count(b"\t") >= 2
    ]
    sources = [name for name in _FROM.findall(diff) if not name.startswith(b'"')]
    return list(dict.fromkeys(name.decode("utf-8", "surrogateescape") for name in (*names, *sources)))


def apply(
    diff: bytes, read: Callable[[str], SourceFile | None], allowed: Iterable[str] | None = None
) -> Applied:
    """Apply a git diff to the files that it names.

    Args:
        diff: output of `git diff --binary`, possibly empty.
        read: the workspace: path -> file, None if there is none.
        allowed: path prefixes that may be changed; None allows everything inside the workspace.

    Raises PatchRefused with a one-sentence reason: outside of `allowed`, links, submodules, LFS pointers, a
    path that leaves the workspace, or a diff that does not apply as a whole (there is no partial result).
    """
    prefixes = None if allowed is None else tuple(allowed)
    names = touched(diff)
    if not names:
        return Applied({}, frozenset())
    before: dict[str, SourceFile] = {}
    for name in names:
        _check(name, prefixes)
        found = read(name)
        if found is not None:
            before[name] = found
    with tempfile.TemporaryDirectory(prefix="patch-") as scratch:
        root = Path(scratch) / "tree"
        root.mkdir()
        for name, file in before.items():
            _write(root / name, file)
        _git(["apply", "--check", "--whitespace=nowarn"], root, diff)
        _git(["apply", "--whitespace=nowarn"], root, diff)
        after = _read_tree(root)
    changed: dict[str, bytes | None] = {name: None for name in before if name not in after}
    for name, file in after.items():
        if before.get(name) != file:
            _check(name, prefixes)
            if file.content.startswith(_LFS):
                raise PatchRefused(f"{name} is a Git LFS pointer: its content is not in the diff")
            changed[name] = file.content
    for name in changed:
        _check(name, prefixes)
    return Applied(changed, frozenset(name for name in changed if name in after and after[name].executable))


def make_diff(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> bytes:
    """The git diff (binary, full object names, no rename detection) from one set of files to another.

    The same inputs give the same bytes, and `apply` gives `after` back.
    """
    if dict(before) == dict(after):
        return b""
    stream = bytearray()
    for files in (before, after):
        stream += b"commit refs/heads/x\ncommitter x <x> 0 +0000\ndata 0\ndeleteall\n"
        for name in sorted(files):
            content = files[name]
            stream += b"M 100644 inline " + _quoted(name) + b"\ndata %d\n" % len(content) + content + b"\n"
    with tempfile.TemporaryDirectory(prefix="patch-") as scratch:
        repository = f"{scratch}/r"
        _git(["init", "--quiet", "--bare", "--template=", repository], scratch)
        _git(["--git-dir", repository, "fast-import", "--quiet"], scratch, bytes(stream))
        show = ["diff-tree", "-p", "--binary", "--full-index", "--no-renames", "--no-color", "--no-ext-diff"]
        show += ["--no-textconv", "-r", "refs/heads/x^", "refs/heads/x"]
        return _git(["--git-dir", repository, *show], scratch)


def is_allowed(path: str, allowed: Iterable[str]) -> bool:
    """Whether `path` is one of the prefixes or lies in a folder that is one; `.` stands for everything."""
    return any(p == "." or path == p.rstrip("/") or path.startswith(p.rstrip("/") + "/") for p in allowed)


def _check(name: str, allowed: tuple[str, ...] | None) -> None:
    shown = name.encode("utf-8", "backslashreplace").decode()
    parts = name.split("/")
    if name.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\0" in name:
        raise PatchRefused(f"the diff names {shown!r}, which is not a path inside the workspace")
    if any(part.lower() in _GIT_FILES for part in parts):
        raise PatchRefused(f"the diff touches {shown!r}, which would change how git itself behaves")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise PatchRefused(f"the diff names {shown!r}, which is not UTF-8") from None
    if allowed is not None and not is_allowed(name, allowed):
        raise PatchRefused(
            f"the diff touches {shown!r}, outside of {', '.join(allowed) or 'nothing allowed'}"
        )


def _write(path: Path, file: SourceFile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file.content)
    path.chmod(0o755 if file.executable else 0o644)


def _read_tree(root: Path) -> dict[str, SourceFile]:
    found: dict[str, SourceFile] = {}
    for folder, _, files in os.walk(os.fsencode(root)):
        for file in files:
            path = os.path.join(folder, file)
            name = os.path.relpath(path, os.fsencode(root)).decode("utf-8", "surrogateescape")
            mode = os.lstat(path).st_mode
            if not stat.S_ISREG(mode):
                raise PatchRefused(f"the diff makes {name!r} something other than a file")
            with open(path, "rb") as handle:
                found[name] = SourceFile(handle.read(), bool(mode & stat.S_IXUSR))
    return found


def _quoted(name: str) -> bytes:
    """A path for git's fast-import: always quoted, bytes outside of printable ASCII in octal."""
    plain = frozenset(range(0x20, 0x7F)) - {0x22, 0x5C}
    data = name.encode("utf-8", "surrogateescape")
    return b'"' + b"".join(bytes((b,)) if b in plain else b"\\%03o" % b for b in data) + b'"'


def _git(arguments: list[str], folder: Path | str, stdin: bytes = b"") -> bytes:
    """git without anybody's configuration; raises PatchRefused with git's first complaint."""
    command = ["git"]
    for option in _OPTIONS:
        command += ["-c", option]
    environment = {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "HOME": "/nonexistent",
        "LC_ALL": "C.UTF-8",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": os.path.realpath(os.path.dirname(os.fspath(folder))),
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ATTR_NOSYSTEM": "1",
    }
    done = subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, input=stdin, capture_output=True, timeout=60
    )
    if done.returncode != 0:
        text = done.stderr.decode(errors="replace").strip().split("\n")[0] or f"exit code {done.returncode}"
        raise PatchRefused(
            f"git cannot apply the diff: {text.removeprefix('error: ').removeprefix('fatal: ')}"
        )
    return done.stdout
