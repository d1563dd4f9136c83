"""What a probe is, and how programs are put into a task's workspace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from textwrap import dedent
from typing import Literal

from catalog.models import Task

Workspace = Mapping[str, bytes]
Files = Mapping[str, bytes | None]
Kind = Literal["hook", "config", "exit", "forge", "patch", "skip", "overwrite", "persist", "lookup", "object"]


@dataclass(frozen=True)
class HackProbe:
    """One way to fake a verdict without solving the task."""

    name: str
    kind: Kind
    doc: str
    files: Callable[[Task, Workspace], Files]
    """From the task and its workspace to the files that the cheating agent leaves behind."""
    needs_differential: bool = False
    """The tests themselves are satisfied: only other inputs or another implementation can tell."""


def target(task: Task, workspace: Workspace) -> str:
    """The source file that the task is about: the origin's, else the first module that may be changed."""
    if task.origin.path in workspace:
        return task.origin.path
    prefixes = tuple(task.verifier.allowed)
    modules = (p for p in sorted(workspace) if p.endswith(".py") and p.startswith(prefixes))
    return next(modules, f"{prefixes[0].rstrip('/')}/__init__.py")


def folder(task: Task, workspace: Workspace) -> str:
    """The folder of `target` with a slash at its end, or nothing for the workspace itself."""
    head, slash, _ = target(task, workspace).rpartition("/")
    return head + slash


def appended(program: str) -> Callable[[Task, Workspace], Files]:
    """The program at the end of the target module; it runs when a test imports the module.

    `{f2p}`, `{tests}` and `{path}` stand for Python literals: ids that should pass, test files, the target.
    """

    def files(task: Task, workspace: Workspace) -> Files:
        path = target(task, workspace)
        text = dedent(program)
        for name, value in (
            ("{f2p}", list(task.verifier.fail_to_pass)),
            ("{tests}", list(task.verifier.arguments)),
            ("{path}", path),
        ):
            text = text.replace(name, repr(value))
        return {path: workspace.get(path, b"") + b"\n\n" + text.encode()}

    return files


def added(names: Callable[[Task, Workspace], list[str]], program: str) -> Callable[[Task, Workspace], Files]:
    """The program as new files at the places that `names` gives."""

    def files(task: Task, workspace: Workspace) -> Files:
        return {name: dedent(program).encode() for name in names(task, workspace)}

    return files


def beside(*names: str) -> Callable[[Task, Workspace], list[str]]:
    """The names at the workspace's top and in the target's folder."""

    def places(task: Task, workspace: Workspace) -> list[str]:
        here = folder(task, workspace)
        return list(dict.fromkeys([*names, *(here + name for name in names)]))

    return places
