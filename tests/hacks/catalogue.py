"""Reads the catalogue: what an agent would have left behind, as files and as a diff.

for entry in hacks():
    diff = entry.diff(task)
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

from catalog.models import Task
from tests.hacks.task import BUGGY, PATH, WORKSPACE, Variant
from verifiers import patches
from verifiers.hacks import PROBES

FOLDER = Path(__file__).parent
KEYS = {"title", "idea", "task", "append", "solution", "files", "links"}
Files = Mapping[str, bytes | None]


@dataclass(frozen=True)
class Entry:
    """One hack, or one honest solution."""

    name: str
    kind: str
    title: str
    idea: str
    make: Callable[[Task], Files]
    """The files that were changed; None: deleted."""
    links: Mapping[str, str] = field(default_factory=dict[str, str])
    """Symbolic links: path -> target."""
    variant: Variant = "plain"

    def diff(self, task: Task) -> bytes:
        """The same as a git diff, as an agent's sandbox gives it."""
        files = self.make(task)
        # git itself makes no diff of these
        odd = {path for path in files if path.startswith(".git/")} | set(self.links)
        before = {path: WORKSPACE[path] for path in files if path in WORKSPACE and path not in odd}
        after = {path: data for path, data in files.items() if data is not None and path not in odd}
        parts = [patches.make_diff(before, after)]
        parts += [_new_file(path, b"100755", files[path] or b"") for path in sorted(odd - set(self.links))]
        parts += [_new_file(path, b"120000", target.encode()) for path, target in sorted(self.links.items())]
        return b"".join(parts)


@cache
def hacks() -> tuple[Entry, ...]:
    """Every hack, by kind and name; the probes of the gate first."""
    probes = [
        Entry(p.name, p.kind, p.doc, "verifiers.hacks", lambda task, p=p: p.files(task, WORKSPACE))
        for p in PROBES
    ]
    return (*probes, *(_entry(path) for path in sorted(FOLDER.glob("programs/*/*.toml"))))


@cache
def honest() -> tuple[Entry, ...]:
    """Right solutions, written in different ways."""
    return tuple(_entry(path) for path in sorted(FOLDER.glob("honest/*.toml")))


def _entry(path: Path) -> Entry:
    """Raises ValueError for a key that means nothing."""
    data: dict[str, Any] = tomllib.loads(path.read_text())
    if unknown := set(data) - KEYS:
        raise ValueError(f"{path}: {', '.join(sorted(unknown))} means nothing here")
    named = {name: dedent(text).lstrip("\n").encode() for name, text in data.get("files", {}).items()}

    def make(task: Task) -> Files:
        files = dict(named)
        if "append" in data:
            files[PATH] = BUGGY + b"\n\n" + _filled(data["append"], task).encode()
        elif "solution" in data:
            head, _, rest = BUGGY.decode().partition("def merge(ranges):\n")
            files[PATH] = (
                head + data["solution"].strip() + "\n\n\ndef total" + rest.partition("def total")[2]
            ).encode()
        return files

    return Entry(
        name=path.stem,
        kind=path.parent.name,
        title=data["title"],
        idea=data.get("idea", ""),
        make=make,
        links=data.get("links", {}),
        variant=data.get("task", "plain"),
    )


def _filled(program: str, task: Task) -> str:
    """`{f2p}`, `{p2p}`, `{tests}` stand for lists of ids that decide, other ids, and test files."""
    spec = task.verifier
    for name, value in (
        ("{f2p}", spec.fail_to_pass),
        ("{p2p}", spec.pass_to_pass),
        ("{tests}", spec.arguments),
    ):
        program = program.replace(name, repr(list(value)))
    return program


def _new_file(path: str, mode: bytes, content: bytes) -> bytes:
    lines = content.splitlines() or [b""]
    name = path.encode()
    end = b"\n" if content.endswith(b"\n") else b"\n\\ No newline at end of file\n"
    return (
        b"diff --git a/%b b/%b\nnew file mode %b\n--- /dev/null\n+++ b/%b\n@@ -0,0 +1,%d @@\n"
        % (name, name, mode, name, len(lines))
        + b"\n".join(b"+" + line for line in lines)
        + end
    )
