"""What verifiers of every kind share: the workspace they judge, three outcomes, and a table of kinds.

    verdict = await judge(bench, task, Change(files))

A verifier is a function `judge(bench, task, change) -> Verdict` in a module of its own, found by the kind
that stands in the task's verifier. Others join through the entry point group `posttrain.verifiers`. Left out:
pytest, which `verifiers.grading` runs itself.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError

from catalog.models import Failure, Record, Task, Verdict
from sandbox.base import ExecResult, Sandbox, SandboxError, SandboxLost, SandboxProvider, SandboxSpec
from verifiers import patches

KINDS = {
    "state": "verifiers.state:judge",
    "command": "verifiers.command:judge",
    "rubric": "verifiers.rubric:judge",
    "weighted": "verifiers.weighted:judge",
    "suite": "verifiers.suite:judge",
}
"""Kind -> module:function."""

OURS = (SandboxError, OSError, subprocess.SubprocessError, LookupError)
"""What can break on our side. A missing blob is a LookupError."""
_SETUP_S = 60.0
_Settings = TypeVar("_Settings", bound=Record)


class Unjudgeable(Exception):
    """The verifier has nothing to go by; never the solution's fault. The message is one sentence."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Blobs(Protocol):
    """Files by content; `catalog.blobs.Blobs` is one."""

    def get(self, ref: str) -> bytes: ...

    def put(self, data: bytes) -> str: ...


class Images(Protocol):
    """The part of the image store that grading uses; `sandbox.images.ImageStore` is one."""

    def exists(self, digest: str) -> bool: ...


class ChatModel(Protocol):
    """A model that answers in a given shape; `verifiers.chat.Endpoint` is one."""

    identity: str
    """Names model and sampling: a part of the key under which verdicts are cached."""

    async def ask(self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any], seed: int) -> str:
        """The text of one reply, asked for as JSON of that schema. Raises OSError when there is none."""
        ...


@dataclass(frozen=True)
class Change:
    """What the agent leaves behind: paths of the workspace -> new content, None where deleted."""

    files: Mapping[str, bytes | None]
    executable: frozenset[str] = frozenset()


JudgePart = Callable[[Task, Change], Awaitable[Verdict]]
Judge = Callable[["Bench", Task, Change], Awaitable[Verdict]]


@dataclass(frozen=True)
class Bench:
    """Where verifiers work."""

    provider: SandboxProvider
    images: Images
    blobs: Blobs
    chat: ChatModel | None
    part: JudgePart
    """Judges the same change by another verifier, whatever its kind."""

    @asynccontextmanager
    async def clean(self, task: Task) -> AsyncGenerator[Sandbox]:
        """A fresh sandbox on the task's own image. Raises SandboxError, Unjudgeable."""
        environment = task.environment
        if not self.images.exists(environment.image):
            raise Unjudgeable("image", f"image {environment.image} is not in the store: build the task again")
        limits = environment.limits
        spec = SandboxSpec(
            image=environment.image,
            owner="verifier",
            workdir=environment.workdir,
            memory_mb=limits.memory_mb,
            pids=limits.pids,
            disk_mb=limits.disk_mb,
        )
        sandbox = await self.provider.create(spec)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    async def apply(self, task: Task, diff: bytes) -> patches.Applied:
        """Apply a diff to the task's workspace. Raises patches.PatchRefused and what `clean` raises."""
        names = [name for name in await asyncio.to_thread(patches.touched, diff) if not strange(name)]
        async with self.clean(task) as box:
            before = await read_files(box, task.environment.workdir, names)
        return await asyncio.to_thread(patches.apply, diff, before.get, task.verifier.allowed)


def settings_of(task: Task, shape: type[_Settings]) -> _Settings:
    """The verifier's settings. Raises Unjudgeable where they are not of that shape."""
    try:
        return shape.model_validate_json(json.dumps(task.verifier.settings))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "settings"
        raise Unjudgeable("settings", f"verifier settings, {place}: {first['msg']}") from error


async def judge(bench: Bench, task: Task, change: Change) -> Verdict:
    """Judge by the verifier of the task's kind; what breaks on our side is a typed failure."""
    for name in change.files:
        if strange(name) or ".git" in name.lower().split("/"):
            return Verdict(reward=0.0, evidence=f"Refused: {name!r} is no file of a workspace.")
    try:
        return await _find(task.verifier.kind)(bench, task, change)
    except patches.PatchRefused as refused:
        return Verdict(reward=0.0, evidence=f"Refused: {refused}.")
    except SandboxLost as lost:
        if lost.repercussion is None:
            return unjudged(lost)
        return Verdict(reward=0.0, evidence=f"The solution destroyed its sandbox ({lost.repercussion}).")
    except (*OURS, Unjudgeable) as error:
        return unjudged(error)


def unjudged(error: Exception) -> Verdict:
    """The third outcome, for what broke on our side."""
    boundary = "sandbox" if isinstance(error, SandboxError) else "verifier"
    kind = error.kind if isinstance(error, Unjudgeable) else type(error).__name__
    failure = Failure(boundary=boundary, kind=kind, message=f"{error}"[:1000] or type(error).__name__)
    return Verdict(reward=None, failure=failure, evidence="Could not be judged.")


def strange(name: str) -> bool:
    """Names that no workspace has; patches.apply refuses them with a reason."""
    return name.startswith("/") or "\0" in name or any(p in ("", ".", "..") for p in name.split("/"))


async def read_files(box: Sandbox, workdir: str, names: Collection[str]) -> dict[str, patches.SourceFile]:
    """Those of the named files of the workspace that are regular ones. Raises OSError, SandboxError."""
    found: dict[str, patches.SourceFile] = {}
    script = 'for f; do [ -f "$f" ] && [ -x "$f" ] && printf "%s\\0" "$f"; done; true'
    listed = await each(box, ["sh", "-c", script, "sh"], workdir, names)
    executable = set(listed.stdout.decode("utf-8", "surrogateescape").split("\0"))
    for name in names:
        try:
            content = await box.read(f"{workdir}/{name}")
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            continue
        found[name] = patches.SourceFile(content, f"./{name}" in executable)
    return found


async def lay(box: Sandbox, workdir: str, change: Change, trusted: Mapping[str, bytes]) -> None:
    """Put a change on a clean workspace, and the task's protected files over it, owned by root."""
    gone = [name for name, data in change.files.items() if data is None]
    if gone:
        await each(box, ["rm", "-f", "--"], workdir, gone)
    for name, data in change.files.items():
        if data is not None:
            await box.write(f"{workdir}/{name}", data, mode=0o755 if name in change.executable else 0o644)
    for name, data in trusted.items():
        await box.write(f"{workdir}/{name}", data)
    if trusted:
        await each(box, ["chown", "-h", "0:0", "--"], workdir, trusted)


async def each(box: Sandbox, command: list[str], workdir: str, names: Collection[str]) -> ExecResult:
    """Run a command on these files of the workspace."""
    data = b"".join(b"./" + name.encode("utf-8", "surrogateescape") + b"\0" for name in names)
    argv = ["xargs", "-0", "-r", *command]
    result = await box.exec(argv, stdin=data, cwd=workdir, user="root", timeout=_SETUP_S, max_output=8 << 20)
    if not result.ok:
        raise Unjudgeable("setup", f"{command[0]} failed on the workspace: {result.text[-300:]}")
    return result


def _find(kind: str) -> Judge:
    places = {point.name: point.value for point in entry_points(group="posttrain.verifiers")} | KINDS
    if kind not in places:
        raise Unjudgeable("kind", f"unknown verifier {kind!r}; choose pytest, {', '.join(places)}")
    module, _, name = places[kind].partition(":")
    try:
        found: Judge = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise Unjudgeable("kind", f"the {kind} verifier cannot be imported: {error}") from error
    return found
