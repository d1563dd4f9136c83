"""The contract of every sandbox backend.

A non-zero exit is data, never an exception; only our own failures raise. `str` means `/bin/sh -c`, a
list is an argv. `exec` returns when its direct child exits plus a short drain grace, not at pipe EOF.
A timeout kills the whole tree and keeps partial output; cancelling the awaiting task kills the process.
Nothing is retried unless a `key` is given: then a command that finished is not run again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol, Self, runtime_checkable


class SandboxError(Exception):
    """Base of failures that are ours. They must never be shown to a policy as command output."""


class SandboxUnavailable(SandboxError):
    """This host or backend cannot run sandboxes; the message says what to change."""


class SandboxLost(SandboxError):
    """The sandbox died under us (killed init, host fault)."""


class PolicyUnsupported(SandboxError):
    """The request asks for something that this backend cannot enforce."""


class Outcome(StrEnum):
    """How a command ended."""

    EXITED = "exited"
    SIGNALED = "signaled"
    TIMEOUT = "timeout"
    OOM = "oom"
    PIDS = "pids"
    DISK = "disk"
    CANCELLED = "cancelled"
    LOST = "sandbox_lost"


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a command did. `exit_code` is None unless it exited by itself."""

    outcome: Outcome
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    stdout_total: int
    """Bytes produced; more than `len(stdout)` means the middle was cut (head and tail are kept)."""
    stderr_total: int
    duration_s: float
    signal: int | None = None
    peak_memory: int | None = None
    """Bytes, where the host accounts for it."""

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.EXITED and self.exit_code == 0

    @property
    def text(self) -> str:
        """Standard output and error, decoded once."""
        return (self.stdout + self.stderr).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What to create. A backend rejects what it cannot enforce."""

    image: str
    """Image digest in the image store."""
    owner: str = "default"
    workdir: str = "/workspace"
    memory_mb: int = 1024
    pids: int = 256
    disk_mb: int = 512
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    network: Literal["none", "host"] = "none"
    """`host` is for builds that the user asked for; agents and graders never get it."""
    nested: bool = False
    """Keep inside the sandbox the right to make further namespaces (the grader's fork server needs it).
    Only for commands of ours: what runs with it must itself drop the right before it runs foreign code."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What this backend enforces on this host, and what it does not (each with a reason)."""

    network_none: bool
    memory_limit: bool
    pids_limit: bool
    disk_limit: bool
    user_namespace: bool
    unenforced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    id: str
    owner: str
    image: str
    created: float


@runtime_checkable
class Sandbox(Protocol):
    """One isolated place; single-use."""

    id: str
    capabilities: Capabilities

    async def exec(
        self,
        argv: Sequence[str] | str,
        *,
        stdin: bytes | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = 60,
        max_output: int = 1 << 20,
        key: str | None = None,
    ) -> ExecResult:
        """Run to completion. `user` is `agent` (default) or `root` (inside the sandbox)."""
        ...

    async def spawn(
        self,
        argv: Sequence[str] | str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Process:
        """Start a long-lived process with its pipes."""
        ...

    async def read(self, path: str, *, max_bytes: int = 64 << 20) -> bytes: ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file and its parent folders, owned by the agent."""
        ...

    async def put_tree(self, path: str, tar: bytes) -> None:
        """Unpack a tar beneath `path`; entries that would leave it are an error."""
        ...

    async def get_tree(self, path: str, *, max_bytes: int = 256 << 20) -> bytes:
        """A tar of the tree beneath `path`."""
        ...

    async def snapshot(self) -> str:
        """Freeze the writable layer as one more image layer; returns the new image's digest."""
        ...

    async def close(self) -> None:
        """Idempotent; kills everything inside and frees the writable layer."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...


@runtime_checkable
class Process(Protocol):
    """A running process with pipes."""

    async def write(self, data: bytes) -> None: ...

    async def close_stdin(self) -> None: ...

    async def readline(self) -> bytes:
        """Next line of standard output, b'' at the end."""
        ...

    async def kill(self) -> None: ...

    async def wait(self) -> ExecResult: ...


@runtime_checkable
class SandboxProvider(Protocol):
    """A backend: namespace, docker or kubernetes."""

    name: str

    def capabilities(self) -> Capabilities: ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Raises PolicyUnsupported for what cannot be enforced, SandboxUnavailable if the host cannot."""
        ...

    async def attach(self, id: str) -> Sandbox: ...

    async def list(self, owner: str) -> list[SandboxInfo]: ...

    async def reap(self, owner: str) -> int:
        """Remove what dead clients of this owner left behind; returns how many."""
        ...

    async def close(self) -> None: ...


def provider(name: str = "namespace", *, store: Path | None = None) -> SandboxProvider:
    """The backend of that name. `store` is the image store's folder (default: the user's cache folder)."""
    if name == "namespace":
        from sandbox.namespace import NamespaceProvider

        return NamespaceProvider(store)
    raise ValueError(f"unknown sandbox backend {name!r}; choose namespace")
