"""The values that the contract of sandboxes speaks in: errors, outcomes, requests, results, capabilities.

`sandbox.base` holds the Protocols and exports all of this; import from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from enum import StrEnum
from typing import Any, Literal, Self


class Repercussion(StrEnum):
    """What commands of a sandbox did to that very sandbox: a failed trajectory, never infrastructure."""

    INIT = "init"
    """Its first process, or a helper of ours inside it, ended because of what ran inside (killed, or out of
    memory)."""
    SYSTEM = "system"
    """Its shell, its system folders or its work folder are gone: no further command can start."""
    PROCESSES = "processes"
    """What commands left running fills the process limit: no further command can start."""
    DISK = "disk"
    """What commands wrote fills the disk limit."""


class SandboxError(Exception):
    """Base of failures that are ours. They must never be shown to a policy as command output."""


class SandboxUnavailable(SandboxError):
    """This host or backend cannot run sandboxes; the message says what to change."""


class AdmissionRefused(SandboxUnavailable):
    """This node is full: the sandbox was not made, nothing was started, and a later or another place may do.

    `limit` names what is full (`sandboxes`, `memory`, `available_memory`).
    """

    def __init__(self, message: str, limit: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.limit = limit
        self.retry_after_s = retry_after_s


class SandboxLost(SandboxError):
    """The sandbox is gone. `repercussion` says that its own commands ended it; None means a fault of ours."""

    def __init__(self, message: str, repercussion: Repercussion | None = None) -> None:
        super().__init__(message)
        self.repercussion = repercussion


class PolicyUnsupported(SandboxError):
    """The request asks for something that this backend cannot enforce."""


class KeyReused(SandboxError, ValueError):
    """A `key` that named one command was given for another."""


class Outcome(StrEnum):
    """How a command ended."""

    EXITED = "exited"
    SIGNALED = "signaled"
    TIMEOUT = "timeout"
    OOM = "oom"
    """It failed and the sandbox's memory limit killed something meanwhile."""
    PIDS = "pids"
    """It failed, or could not start, and the process limit refused something meanwhile."""
    DISK = "disk"
    """It failed and the sandbox's disk is full."""
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
    repercussion: Repercussion | None = None
    """What commands of this sandbox have destroyed of it, as seen at this command's end."""
    replayed: bool = False
    """The result comes from the sandbox's log (`key`); the command did not run again."""

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.EXITED and self.exit_code == 0

    @property
    def text(self) -> str:
        """Standard output and error, decoded once."""
        return (self.stdout + self.stderr).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """What a sandbox may reach. Loopback inside it always works; link-local and metadata addresses never
    do."""

    mode: Literal["none", "allow", "host"] = "none"
    """`allow` reaches exactly `allow` through the backend's proxy; `host` is for builds of the user's own."""
    allow: tuple[str, ...] = ()
    """`name:port` or `*.name:port`. Empty means nothing, never everything."""
    index_before: date | None = None
    """A package index that shows only what was released before that day (mode `allow`)."""
    index_without: tuple[str, ...] = ()
    """Packages that this index does not have at all, such as the one that a task is about."""

    def encode(self) -> dict[str, Any]:
        """As JSON takes it."""
        day = self.index_before.isoformat() if self.index_before else None
        return {**asdict(self), "index_before": day}

    @classmethod
    def decode(cls, value: Mapping[str, Any]) -> Self:
        """What `encode` made."""
        day = value["index_before"]
        return cls(
            value["mode"],
            tuple(value["allow"]),
            date.fromisoformat(day) if day else None,
            tuple(value["index_without"]),
        )


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What to create. A backend rejects what it cannot enforce (PolicyUnsupported) before it starts
    anything."""

    image: str
    """Image digest in the image store."""
    owner: str = "default"
    """Whose it is: `list` and `reap` go by it, compared exactly. Part of every label and name."""
    workdir: str = "/workspace"
    memory_mb: int = 1024
    pids: int = 256
    disk_mb: int = 512
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    network: Literal["none", "host"] | NetworkPolicy = "none"
    """`host` is for builds that the user asked for; agents and graders never get it."""
    nested: bool = False
    """Keep inside the sandbox the right to make further namespaces (the grader's fork server needs it).
    Only for commands of ours: what runs with it must itself drop the right before it runs foreign code."""
    lease_s: float | None = None
    """Seconds that the sandbox outlives its client: a new client that attaches in time finds it, afterwards
    it ends by itself. None: it ends with its client."""
    scheduling: Literal["latency", "batch"] = "latency"
    """`batch`: its commands run when no other sandbox and nothing of the host wants the processor."""
    runtime: str = ""
    """Docker runtime or Kubernetes runtime class (gVisor, Kata); "" is the backend's default."""

    def check_scheduling(self) -> None:
        """PolicyUnsupported for a class that does not exist."""
        if self.scheduling not in ("latency", "batch"):
            raise PolicyUnsupported(f"scheduling must be latency or batch, not {self.scheduling!r}")

    @property
    def policy(self) -> NetworkPolicy:
        """`network` as a policy."""
        return self.network if isinstance(self.network, NetworkPolicy) else NetworkPolicy(self.network)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What this backend enforces on this host, and what it does not (each with a reason).

    Conformance checks that need a capability which is False are "not applicable", so a backend sets True only
    for what it does; everything that an operator must know stands in `unenforced`.
    """

    network_none: bool
    memory_limit: bool
    pids_limit: bool
    disk_limit: bool
    user_namespace: bool
    unenforced: tuple[str, ...] = ()
    disk_limit_everywhere: bool = False
    """Work folder, /tmp and /dev/shm count against one disk limit, empty files too."""
    seccomp: bool = False
    """bpf, keyrings, io_uring, perf and foreign socket families are refused."""
    read_only_system: bool = False
    """The image's /usr cannot be changed, by root inside neither."""
    pty: bool = False
    tags: bool = False
    """Spawned processes outlive a disconnected client and are attached again by tag."""
    attach: bool = False
    """`attach` works from another process than the one that created the sandbox."""
    snapshot: bool = False
    fork: bool = False
    log: bool = False
    """`exec(key=)` and the durable log."""
    lease: bool = False
    """A sandbox with `lease_s` survives `kill -9` of its client."""
    nested: bool = False
    networks: tuple[str, ...] = ("none",)
    """Modes of NetworkPolicy that can be enforced."""
    set_network: bool = False
    """`set_network` can change a living sandbox."""
    scheduling: bool = False
    """Sandboxes of the class `batch` wait for all others."""
    core_scheduling: bool = False
    """Two threads of one processor core never run different sandboxes at once."""
    numa_nodes: int = 1
    """Memory nodes that sandboxes are spread over."""


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """One line of `list`."""

    id: str
    owner: str
    image: str
    created: float
    """Seconds since the epoch."""
    orphan: bool = False
    """Its client is gone; it lives on its lease."""


@dataclass(frozen=True, slots=True)
class Size:
    """A terminal's size in characters."""

    rows: int = 24
    columns: int = 80


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of one stream of a process, in the order of their arrival. A pseudo-terminal has stdout alone."""

    stream: Literal["stdout", "stderr"]
    data: bytes


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """One line of `processes`."""

    tag: str
    argv: tuple[str, ...]
    running: bool
