"""The contract of every sandbox backend, and the factory that finds one by name.

Rules that every backend keeps, worth more than the signatures (`posttrain sandbox check BACKEND` proves
them):

- A non-zero exit is data, never an exception; only our own failures raise. `str` means `/bin/sh -c`, a list
  is an argv.
- `exec` returns when its direct child exits plus a short drain grace, not at pipe EOF; output that was
  written before the exit is complete. Background processes neither hold the call nor die with it.
- A timeout kills the whole tree below the command (new sessions, double forks) and keeps partial output;
  cancelling the awaiting task kills the same tree.
- Nothing is retried unless a `key` is given: then a command that finished is not run again, also after the
  client was killed; its recorded result comes back with `replayed=True`.
- A transfer that comes short is an error, never a success. No path of the sandbox is followed on the host.
- Every sandbox has an ordered, durable log of commands and results (`sandbox.log`).
- What commands do to their own sandbox is a `Repercussion`, on the result or on SandboxLost: the agent's
  fault. SandboxLost without it, SandboxUnavailable and AdmissionRefused are ours.
- What cannot be enforced is refused before anything starts, or stands in `Capabilities.unenforced`.
- Sandboxes carry their owner and end with their client, or with their lease; no other owner's are ever
  touched.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from sandbox.values import (
    AdmissionRefused,
    Capabilities,
    Chunk,
    ExecResult,
    KeyReused,
    NetworkPolicy,
    Outcome,
    PolicyUnsupported,
    ProcessInfo,
    Repercussion,
    SandboxError,
    SandboxInfo,
    SandboxLost,
    SandboxSpec,
    SandboxUnavailable,
    Size,
)

if TYPE_CHECKING:
    from sandbox.images import ImageStore

__all__ = [
    "AdmissionRefused", "Capabilities", "Chunk", "ExecResult", "KeyReused", "NetworkPolicy", "Outcome",
    "PolicyUnsupported", "Process", "ProcessInfo", "Repercussion", "Sandbox", "SandboxError", "SandboxInfo",
    "SandboxLost", "SandboxProvider", "SandboxSpec", "SandboxUnavailable", "Size", "provider",
]  # fmt: skip

Data = bytes | AsyncIterable[bytes]
"""Bytes at once, or as they come."""


@runtime_checkable
class Sandbox(Protocol):
    """One isolated place; single-use. An async context manager that closes it."""

    id: str
    spec: SandboxSpec
    capabilities: Capabilities

    async def exec(
        self,
        argv: Sequence[str] | str,
        *,
        stdin: Data | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = 60,
        max_output: int = 1 << 20,
        key: str | None = None,
    ) -> ExecResult:
        """Run to completion.

        Without `stdin` the command reads an empty input. `cwd` defaults to the spec's work folder; `env`
        comes over the image's and the spec's, and nothing of the host's is in it. `user` is `agent` (uid
        1000, no capabilities; default) or `root` (inside the sandbox). `timeout` in seconds. `max_output`
        bytes are kept of each stream, head and tail around the cut.

        `key` names this command once and for all in this sandbox. If it finished, its recorded result
        returns; if it is still running (its first client was killed), this call waits for that run; else it
        runs, goes on when its client is killed, and is recorded before it is reported. A `key` given for
        another command raises KeyReused (argv, cwd, env, user and stdin count, so stdin must be bytes or
        None). One that was cancelled did not finish and may run again. A backend without `capabilities.log`
        raises PolicyUnsupported for `key`.

        Raises SandboxLost if the sandbox was gone before the command started; one that ends under a command
        is outcome LOST. ValueError for an unknown user, an empty command or a NUL character.
        """
        ...

    async def spawn(
        self,
        argv: Sequence[str] | str,
        *,
        pty: Size | None = None,
        tag: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Process:
        """Start a long-lived process.

        With `pty` it has a controlling terminal of that size: one stream, echo and line editing as terminals
        do; without, three pipes and no terminal. With `tag` it lives on when its client detaches or is
        killed, and `process(tag)` attaches again; without, it is killed with its client. A tag names one
        process for ever: ValueError if it was given before. PolicyUnsupported where `pty` or `tags` is not
        among the capabilities.
        """
        ...

    async def process(self, tag: str, *, offset: int = 0) -> Process:
        """Attach to the process of that tag, from any client. Whoever was attached sees the end of his
        streams, and his `wait` raises SandboxError.

        The streams go on at byte `offset` of all output (both streams together), as far as it is kept
        (at least the last 256 KiB). One that has ended still delivers its kept output and its result.
        KeyError if no process ever had the tag.
        """
        ...

    async def processes(self) -> list[ProcessInfo]:
        """Tagged processes, living and ended, in the order of their start."""
        ...

    async def read(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """A regular file's bytes, all of them. `path` is relative to the work folder or absolute.

        FileNotFoundError, IsADirectoryError, PermissionError; ValueError for what is larger than `max_bytes`
        or no regular file (fifos do not block).
        """
        ...

    async def write(self, path: str, data: Data, *, mode: int = 0o644) -> None:
        """Write a file and its parent folders, owned by the agent. OSError as `open` and `write` raise it
        (ENOSPC where the disk limit is met); a planted fifo or link is replaced, not followed."""
        ...

    async def put_tree(self, path: str, tar: Data) -> None:
        """Unpack a tar beneath `path`, owned by the agent. ValueError for entries that would leave it (names,
        links planted earlier or in the tar), for devices and fifos, and for what is no whole tar."""
        ...

    async def get_tree(self, path: str, *, max_bytes: int = 256 << 20) -> bytes:
        """A tar of the regular files, folders and links beneath `path`, sorted by name; links are not
        followed, fifos, sockets and devices are left out. ValueError if the files exceed `max_bytes`."""
        ...

    async def snapshot(self) -> str:
        """Freeze the writable layer as one more image layer; returns the new image's digest in the image
        store.

        Files alone (no processes, nothing under /tmp, /run and /dev/shm); times are normalised, so the same
        changes give the same digest.
        """
        ...

    async def fork(self, n: int = 1) -> list[Self]:
        """`n` new sandboxes with this one's spec and files as of now, sharing its layers. Either all or
        none."""
        ...

    async def set_network(self, policy: NetworkPolicy) -> None:
        """Change what can be reached, for running processes too. PolicyUnsupported if it cannot be enforced;
        then nothing has changed."""
        ...

    async def alive(self) -> bool:
        """Whether commands can still be sent to it."""
        ...

    async def close(self) -> None:
        """Idempotent; kills everything inside and frees the writable layer. Closing a handle that came from
        `attach` only detaches while the sandbox's creator lives. Afterwards every call raises SandboxLost."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...


@runtime_checkable
class Process(Protocol):
    """A spawned process. Read it by lines, by size or as chunks, not in several ways at once."""

    tag: str | None

    async def write(self, data: bytes) -> None:
        """All of `data` to its input; BrokenPipeError once it no longer reads."""
        ...

    async def close_stdin(self) -> None:
        """End of input (for a pseudo-terminal: its end-of-file character)."""
        ...

    async def readline(self) -> bytes:
        """Next line of standard output, b'' at the end."""
        ...

    async def read_exactly(self, size: int) -> bytes:
        """Exactly `size` bytes of standard output; asyncio.IncompleteReadError at its end."""
        ...

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Both streams until their ends, nothing lost however slow the reader who begins with the process."""
        ...

    async def resize(self, size: Size) -> None:
        """Set the terminal's size. ValueError without one."""
        ...

    async def signal(self, number: int) -> None:
        """Send a signal to the process and its group; nothing happens if it has ended."""
        ...

    async def kill(self) -> None:
        """Kill the process and everything it started; `wait` then reports `cancelled`."""
        ...

    async def wait(self) -> ExecResult:
        """Its result (stdout empty, the end of stderr). Cancelling the call kills an untagged process."""
        ...

    async def detach(self) -> None:
        """Let go of a tagged process without ending it. ValueError without a tag."""
        ...


@runtime_checkable
class SandboxProvider(Protocol):
    """A backend: namespace, docker or kubernetes. Constructed as `Provider(store: Path | None,
    **settings)`."""

    name: str
    images: ImageStore

    def capabilities(self) -> Capabilities:
        """What is enforced here. Raises SandboxUnavailable if this host has nothing to run sandboxes on."""
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A fresh sandbox, ready for commands.

        KeyError for an unknown image, PolicyUnsupported for what cannot be enforced, AdmissionRefused where
        the node is full, SandboxUnavailable if the host cannot. A failed or cancelled creation leaves
        nothing.
        """
        ...

    async def attach(self, id: str) -> Sandbox:
        """A living sandbox by id, of this or another process. SandboxLost if there is none."""
        ...

    async def list(self, owner: str) -> list[SandboxInfo]:
        """Living sandboxes of exactly that owner, of every client."""
        ...

    async def reap(self, owner: str) -> int:
        """Remove what dead clients of exactly this owner left behind and whose lease is over; how many."""
        ...

    async def close(self) -> None:
        """Close this client's sandboxes (those with a lease too) and let go of the backend; idempotent."""
        ...


BACKENDS = {
    "namespace": "sandbox.namespace:NamespaceProvider",
    "docker": "sandbox.docker:DockerProvider",
    "kubernetes": "sandbox.kubernetes:KubernetesProvider",
}
"""Name -> module:class. Others join through the entry point group `posttrain.sandboxes`."""


def provider(name: str = "namespace", *, store: Path | None = None, **settings: Any) -> SandboxProvider:
    """The backend of that name; its module is imported only now.

    `store` is the image store's folder (default: the user's cache folder), `settings` are the backend's own.
    ValueError for an unknown name, SandboxUnavailable where the backend's packages are not installed.
    """
    places = {point.name: point.value for point in entry_points(group="posttrain.sandboxes")} | BACKENDS
    if name not in places:
        raise ValueError(f"unknown sandbox backend {name!r}; choose {', '.join(places)}")
    module, _, kind = places[name].partition(":")
    try:
        made: SandboxProvider = getattr(importlib.import_module(module), kind)(store, **settings)
    except ModuleNotFoundError as error:
        raise SandboxUnavailable(
            f"the {name} backend needs {error.name}: run `pip install posttrain[{name}]`"
        ) from error
    return made
