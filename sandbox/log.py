"""The memory of a sandbox: an ordered, durable log of every command and its result.

    STORE/logs/ID.jsonl       one event a line: `sandbox` first, then `start` and `end` of every call, in
    order STORE/logs/inputs/HEX     inputs larger than 2 KiB, by content

Backend-neutral. A backend calls `start` before it sends a command and `finish` with its result; `recall`
answers a `key` from what is recorded. Lines are in the page cache when a call returns, so they survive `kill
-9`; those of keyed commands are on the disk before their result is reported. What is typed into spawned
processes is not recorded, and inputs over 8 MiB are recorded by digest alone: replay says so instead of
guessing. `prune` removes logs that nothing was added to for a while; a store's provider does it when it
starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.node import journal
from sandbox.values import ExecResult, KeyReused, NetworkPolicy, Outcome, Repercussion, SandboxSpec

FORMAT = 1
INLINE_BYTES = 2048
KEPT_BYTES = 8 << 20
KEPT_DAYS = 30.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One call: what was asked, and how it ended (None if nothing was recorded)."""

    token: str
    operation: str
    call: Mapping[str, Any]
    """Arguments: for `exec` argv, cwd, env, user, timeout, max_output, stdin; for `write` path, mode,
    data."""
    key: str | None
    started: float
    """Seconds since the epoch."""
    result: ExecResult | None
    """Of `exec` and `spawn`."""
    end: Mapping[str, Any] | None
    """The recorded end of any call: `error` if it raised."""


class SandboxLog:
    """The log of one sandbox. Any number of processes may append."""

    def __init__(self, store: Path, id: str) -> None:
        """Open an existing log for reading and appending; FileNotFoundError if there is none."""
        self.id = id
        self.path = _path(store, id)
        self._inputs = store / "logs" / "inputs"
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self._read = 0
        self._rest = b""
        self._events: dict[str, dict[str, Any]] = {}
        self._ends: dict[str, dict[str, Any]] = {}
        self._keys: dict[str, list[str]] = {}
        self._head: dict[str, Any] = {}

    @classmethod
    def create(cls, store: Path, spec: SandboxSpec, id: str, *, backend: str) -> SandboxLog:
        """The log of a sandbox that is about to be made."""
        path = _path(store, id)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            described = dataclasses.asdict(spec)
            if isinstance(spec.network, NetworkPolicy):
                described["network"] = spec.network.encode()
            journal.append(fd, {"sandbox": id, "format": FORMAT, "backend": backend, "spec": described})
        finally:
            os.close(fd)
        return cls(store, id)

    # ---- writing

    @property
    def fd(self) -> int:
        """For a monitor that appends the end of a keyed command itself."""
        return self._fd

    def start(
        self, operation: str, call: Mapping[str, Any], *, key: str | None = None, data: bytes | None = None
    ) -> str:
        """Record that a call begins; returns the token that its end names. `data` is its input."""
        token = secrets.token_hex(6)
        event: dict[str, Any] = {"start": token, "op": operation, "call": call}
        if key is not None:
            event["key"] = key
        if data is not None:
            event["data"] = self._keep(data)
        journal.append(self._fd, event)
        return token

    def finish(self, token: str, result: ExecResult, *, sync: bool = False) -> None:
        """Record a command's result."""
        self._append({"end": token, "result": encode(result)}, sync=sync)

    def done(self, token: str, **facts: Any) -> None:
        """Record the end of a call that has no ExecResult."""
        self._append({"end": token, **facts})

    def _append(self, event: dict[str, Any], *, sync: bool = False) -> None:
        """Also after `close`: a command under way ends when its sandbox is closed."""
        if self._fd >= 0:
            journal.append(self._fd, event, sync=sync)
            return
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            journal.append(fd, event, sync=sync)
        finally:
            os.close(fd)

    def _keep(self, data: bytes) -> dict[str, Any]:
        if len(data) <= INLINE_BYTES:
            return journal.pack(data)
        digest = hashlib.sha256(data).hexdigest()
        place = self._inputs / digest
        if place.exists():
            os.utime(place)  # young again for `prune`
        elif len(data) <= KEPT_BYTES:
            new = place.with_name(f".{digest}-{secrets.token_hex(4)}")
            new.write_bytes(data)
            os.rename(new, place)
        return {"sha256": digest, "bytes": len(data)}

    # ---- reading

    @property
    def spec(self) -> SandboxSpec:
        """What the sandbox was created with."""
        self._refresh()
        described = dict(self._head["spec"])
        policy: Any = described["network"]
        if not isinstance(policy, str):
            described["network"] = NetworkPolicy.decode(policy)
        return SandboxSpec(**described)

    @property
    def backend(self) -> str:
        self._refresh()
        return self._head["backend"]

    def recall(self, key: str, call: Mapping[str, Any], data: bytes | None) -> Entry | None:
        """What is recorded of the command of that key: its finished run, else one under way, else None.

        One that was cancelled did not finish: it may run again. KeyReused if the key named another command.
        """
        self._refresh()
        found: Entry | None = None
        for token in self._keys.get(key, ()):
            entry = self._entry(token)
            if _identity(entry.call, self._events[token].get("data")) != _identity(
                call, self._describe(data)
            ):
                raise KeyReused(f"key {key!r} of sandbox {self.id} names another command; use a fresh key")
            if entry.result is not None and entry.result.outcome is not Outcome.CANCELLED:
                return entry
            if entry.result is None:
                found = entry
        return found

    def result(self, token: str) -> ExecResult | None:
        """What is recorded as the end of that call."""
        self._refresh()
        return self._entry(token).result if token in self._events else None

    def _describe(self, data: bytes | None) -> dict[str, Any] | None:
        if data is None:
            return None
        if len(data) <= INLINE_BYTES:
            return journal.pack(data)
        return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}

    def entries(self) -> list[Entry]:
        """All calls in the order in which they began."""
        self._refresh()
        return [self._entry(token) for token in self._events]

    def data(self, entry: Entry) -> bytes | None:
        """The input of a call; None without one. FileNotFoundError if it was too large to be kept."""
        kept = self._events[entry.token].get("data")
        if kept is None:
            return None
        if "sha256" in kept:
            return (self._inputs / kept["sha256"]).read_bytes()
        return journal.unpack(kept)

    def _entry(self, token: str) -> Entry:
        event, end = self._events[token], self._ends.get(token)
        result = decode(end["result"]) if end is not None and "result" in end else None
        return Entry(token, event["op"], event["call"], event.get("key"), event["time"], result, end)

    def _refresh(self) -> None:
        """Take in what was appended since, by whoever."""
        while block := os.pread(self._fd, 1 << 20, self._read):
            self._read += len(block)
            self._rest += block
        *lines, self._rest = self._rest.split(b"\n")
        for event in _parse(lines):
            if "start" in event:
                self._events[event["start"]] = event
                if "key" in event:
                    self._keys.setdefault(event["key"], []).append(event["start"])
            elif "end" in event:
                self._ends.setdefault(event["end"], event)
            elif "sandbox" in event:
                self._head = event

    def discard(self) -> None:
        """Remove the log of a sandbox that never came to be."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Idempotent; the file stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def encode(result: ExecResult) -> dict[str, Any]:
    """A result as JSON; `replayed` is never recorded."""
    found = dataclasses.asdict(result)
    del found["replayed"]
    return {**found, "stdout": journal.pack(result.stdout), "stderr": journal.pack(result.stderr)}


def decode(value: Mapping[str, Any]) -> ExecResult:
    """The result that `encode` was given."""
    fate = value["repercussion"]
    found: dict[str, Any] = {
        **value,
        "outcome": Outcome(value["outcome"]),
        "stdout": journal.unpack(value["stdout"]),
        "stderr": journal.unpack(value["stderr"]),
        "repercussion": Repercussion(fate) if fate else None,
    }
    return ExecResult(**found)


def prune(store: Path, *, days: float = KEPT_DAYS, spare: Sequence[str] = ()) -> int:
    """Remove logs (not those of the ids in `spare`) and inputs that are older than that; how many logs."""
    before, count = time.time() - days * 86400, 0
    for path in [*(store / "logs").glob("*.jsonl"), *(store / "logs" / "inputs").glob("*")]:
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < before and path.stem not in spare:
                path.unlink()
                count += path.suffix == ".jsonl"
    return count


def _path(store: Path, id: str) -> Path:
    if not id.replace("-", "").replace("_", "").replace(".", "").isalnum() or id.startswith("."):
        raise ValueError(f"{id!r} is no sandbox id")
    (store / "logs" / "inputs").mkdir(parents=True, exist_ok=True)
    return store / "logs" / f"{id}.jsonl"


def _identity(call: Mapping[str, Any], data: Any) -> str:
    """What makes two calls the same command; how long one waits and how much one keeps do not."""
    same = {name: value for name, value in call.items() if name not in ("timeout", "max_output")}
    return json.dumps([same, data], sort_keys=True)


def _parse(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """Whole events; a line torn by a full disk is skipped."""
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            event = json.loads(line)
            if isinstance(event, dict):
                yield event
