"""Running a sandbox's log again: does the same story come out?

    async for step in replay(provider, SandboxLog(store, id)):
        print(step.entry.operation, step.verdict, *step.differences)

A fresh sandbox of the same image and spec gets every recorded call in the order in which they began, one
after the other; results are compared byte for byte, snapshots by digest. What the log does not hold
(conversations with spawned processes, streamed or very large inputs, commands that were cancelled) is skipped
with the reason: what follows may differ because of it. Left out: overlap in time, clocks, random numbers;
commands that use them differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

from sandbox.base import ExecResult, Outcome, Sandbox, SandboxProvider
from sandbox.log import Entry, SandboxLog

COMPARED = ("outcome", "exit_code", "signal", "stdout", "stderr", "stdout_total", "stderr_total")


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded call, and what came of it now."""

    entry: Entry
    verdict: Literal["same", "differs", "skipped", "unknown"]
    """`unknown`: it ran, but no end is recorded to compare with."""
    differences: tuple[str, ...] = ()
    """Names of what differs, or why it was skipped."""
    result: ExecResult | None = None


async def replay(
    provider: SandboxProvider, log: SandboxLog, *, owner: str = "replay", image: str | None = None
) -> AsyncIterator[Step]:
    """Every step in its order. KeyError if the image is not in `provider`'s store any more.

    `image` replaces the recorded one, `owner` the recorded owner. Host networks and leases are not taken
    over.
    """
    spec = dataclasses.replace(log.spec, owner=owner, lease_s=None)
    if image is not None:
        spec = dataclasses.replace(spec, image=image)
    if spec.policy.mode == "host":
        spec = dataclasses.replace(spec, network="none")
    ran: set[str] = set()
    async with await provider.create(spec) as box:
        for entry in log.entries():
            step = await _step(box, log, entry, ran)
            if entry.key is not None and step.verdict != "skipped":
                ran.add(entry.key)
            yield step


async def _step(box: Sandbox, log: SandboxLog, entry: Entry, ran: set[str]) -> Step:
    if reason := _why_not(entry, ran):
        return Step(entry, "skipped", (reason,))
    try:
        data = log.data(entry)
    except FileNotFoundError:
        return Step(entry, "skipped", ("its input was too large to be recorded",))
    if entry.operation == "exec":
        return _compared(entry, await _exec(box, entry, data))
    error = ""
    image: str | None = None
    try:
        if entry.operation == "write":
            await box.write(entry.call["path"], data or b"", mode=entry.call["mode"])
        elif entry.operation == "put_tree":
            await box.put_tree(entry.call["path"], data or b"")
        elif entry.operation == "snapshot":
            image = await box.snapshot()
        else:
            return Step(entry, "skipped", (f"{entry.operation} is not replayed",))
    except (OSError, ValueError) as raised:
        error = type(raised).__name__
    return _ended(entry, error, image)


def _why_not(entry: Entry, ran: set[str]) -> str:
    if entry.key in ran:
        return "the command of its key ran before"
    if entry.operation == "spawn":
        return "what was said to a spawned process is not recorded"
    if entry.call.get("streamed"):
        return "its input came as a stream, which is not recorded"
    if entry.result is not None and entry.result.outcome in (Outcome.CANCELLED, Outcome.LOST):
        return f"it ended as {entry.result.outcome.value}"
    return ""


async def _exec(box: Sandbox, entry: Entry, data: bytes | None) -> ExecResult:
    call: dict[str, Any] = {
        name: entry.call[name] for name in ("cwd", "env", "user", "timeout", "max_output")
    }
    return await box.exec(list(entry.call["argv"]), stdin=data, **call)


def _compared(entry: Entry, result: ExecResult) -> Step:
    if entry.result is None:
        return Step(entry, "unknown", result=result)
    different = tuple(name for name in COMPARED if getattr(result, name) != getattr(entry.result, name))
    return Step(entry, "differs" if different else "same", different, result)


def _ended(entry: Entry, error: str, image: str | None) -> Step:
    """Compare the end of a call that has no ExecResult."""
    if entry.end is None:
        return Step(entry, "unknown")
    recorded = str(entry.end.get("error", "")).partition(":")[0]
    different = tuple(
        name
        for name, now, then in (("error", error, recorded), ("image", image, entry.end.get("image")))
        if now != then
    )
    return Step(entry, "differs" if different else "same", different)
