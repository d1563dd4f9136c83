"""`posttrain sandbox`: whether a backend keeps foreign code in, and what sandboxes remember."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from console.errors import FAULT, OK
from console.session import InSession, Session, clean, print_table

if TYPE_CHECKING:
    from sandbox.base import Capabilities, SandboxProvider
    from sandbox.check import CheckResult
    from sandbox.escapes import EscapeResult
    from sandbox.replay import Step

app = App(name="sandbox", help="Whether a backend keeps foreign code in, and what its sandboxes remember.")

Settings = Annotated[str, Parameter(help="Settings of the backend, as a JSON object.")]

app.command("console.sandbox_run:run", name="run")

_NAMES = {
    "network_none": "no network",
    "memory_limit": "memory limit",
    "pids_limit": "process limit",
    "disk_limit": "disk limit",
    "user_namespace": "user namespace",
}
_MARKS = {"passed": "✓", "contained": "✓", "failed": "✗", "escaped": "✗", "inconclusive": "?"}


@app.command
def check(
    backend: str = "namespace",
    *names: str,
    image: str | None = None,
    settings: Settings = "{}",
    quick: bool = False,
    rounds: int = 10,
    session: InSession,
) -> int:
    """Prove a backend: what it enforces here, how long it takes, and every check of the conformance suite.

    The exit code is 1 if a check fails.

    Parameters
    ----------
    backend
        namespace, docker, kubernetes, or one that a package adds.
    names
        Checks to run; all without.
    image
        Image of the sandboxes, with sh, coreutils and python3 (this host's own system).
    quick
        Only what is enforced, and the times.
    rounds
        Sandboxes to make and time.
    """
    options = _settings(settings)
    return asyncio.run(_check(session, backend, names, image, options, quick=quick, rounds=max(1, rounds)))


@app.command
def escape(
    backend: str = "namespace",
    *names: str,
    image: str | None = None,
    settings: Settings = "{}",
    session: InSession,
) -> int:
    """Try to get out of a backend's sandboxes, as agent and as root. The exit code is 1 if anything escapes.

    Parameters
    ----------
    backend
        namespace, docker, kubernetes, or one that a package adds.
    names
        Attempts to make; all without.
    image
        Image of the sandboxes, with sh, coreutils and python3 (this host's own system).
    """
    from sandbox import escapes

    async def run() -> list[EscapeResult]:
        made = _provider(session, backend, _settings(settings))
        try:
            return await escapes.run(
                made, image or made.images.host_base(), names, told=lambda r: _tell(session, r)
            )
        finally:
            await made.close()

    results = asyncio.run(run())
    out = [result for result in results if result.status != "contained"]
    session.emit(
        [asdict(result) for result in results],
        lambda: print(f"{len(results) - len(out)} of {len(results)} attempts were contained."),
    )
    return FAULT if out else OK


@app.command
def log(id: str, *, session: InSession) -> None:
    """Show the commands of a sandbox and how they ended, also after it is gone.

    Parameters
    ----------
    id
        The sandbox's id.
    """
    from sandbox.log import SandboxLog

    try:
        opened = SandboxLog(session.store(), id)
    except FileNotFoundError:
        raise ValueError(f"there is no log of a sandbox {id} in {session.store() / 'logs'}") from None
    entries = opened.entries()
    rows = [(_when(entry.started), entry.operation, _what(entry.call), _how(entry)) for entry in entries]
    opened.close()
    value = [
        {"operation": e.operation, "call": dict(e.call), "key": e.key, "started": e.started,
         "end": dict(e.end) if e.end else None}
        for e in entries
    ]  # fmt: skip
    columns = ("time", "call", "what", "end")
    session.emit(value, lambda: print_table(columns, rows, empty="It was never asked for anything."))


@app.command
def replay(
    id: str,
    *,
    backend: str | None = None,
    image: str | None = None,
    settings: Settings = "{}",
    session: InSession,
) -> int:
    """Run a sandbox's log again in a fresh one and compare. The exit code is 1 if anything differs.

    Parameters
    ----------
    id
        The sandbox's id.
    backend
        Where to run it (the backend that it had).
    image
        Another image to start from (the one that it had).
    """
    from sandbox.log import SandboxLog
    from sandbox.replay import replay as run_again

    try:
        opened = SandboxLog(session.store(), id)
    except FileNotFoundError:
        raise ValueError(f"there is no log of a sandbox {id} in {session.store() / 'logs'}") from None

    async def run() -> list[Step]:
        made = _provider(session, backend or opened.backend, _settings(settings))
        steps: list[Step] = []
        try:
            async for step in run_again(made, opened, image=image):
                steps.append(step)
                note = f" ({', '.join(step.differences)})" if step.differences else ""
                what = f"{step.entry.operation} {_what(step.entry.call)}"
                print(f"{step.verdict:8} {what}{note}", file=session.log, flush=True)
        except KeyError as error:
            raise ValueError(f"{error.args[0]}; give --image") from None
        finally:
            await made.close()
        return steps

    steps = asyncio.run(run())
    counts = {
        name: sum(step.verdict == name for step in steps)
        for name in ("same", "differs", "skipped", "unknown")
    }
    session.emit(
        {"counts": counts, "steps": [_step(step) for step in steps]},
        lambda: print(", ".join(f"{number} {name}" for name, number in counts.items())),
    )
    return FAULT if counts["differs"] else OK


def _step(step: Step) -> dict[str, Any]:
    entry = step.entry
    return {"operation": entry.operation, "call": dict(entry.call), "verdict": step.verdict,
            "differences": list(step.differences)}  # fmt: skip


def _what(call: Any) -> str:
    words: Sequence[str] = call.get("argv") or [call.get("path", "")]
    if list(words[:2]) == ["/bin/sh", "-c"]:
        words = words[2:]
    text = clean(" ".join(words)).replace("\n", " ")
    return text if len(text) <= 70 else text[:69] + "…"


def _how(entry: Any) -> str:
    if entry.result is not None:
        code = entry.result.exit_code
        return entry.result.outcome.value + (f" {code}" if code is not None else "")
    if entry.end is None:
        return "no end recorded"
    return str(entry.end.get("error") or entry.end.get("image") or "done")


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _settings(text: str) -> dict[str, Any]:
    try:
        found: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--settings is no JSON object: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("--settings is no JSON object: write '{\"name\": value}'")
    return found


def _provider(session: Session, backend: str, settings: dict[str, Any]) -> SandboxProvider:
    from sandbox.base import provider

    return provider(backend, store=session.store(), **settings)


def _tell(session: Session, result: CheckResult | EscapeResult) -> None:
    """One line for each check or attempt, as it comes."""
    mark = _MARKS.get(result.status, "-")
    name = getattr(result, "user", None)
    title = f"{result.name} ({name})" if name else result.name
    print(f"{mark} {title}: {clean(result.detail) or result.status}", file=session.log, flush=True)


async def _check(
    session: Session,
    backend: str,
    names: Sequence[str],
    image: str | None,
    settings: dict[str, Any],
    *,
    quick: bool,
    rounds: int,
) -> int:
    from sandbox import check as suite

    made = _provider(session, backend, settings)
    results: list[CheckResult] = []
    try:
        capabilities = made.capabilities()
        start = image or made.images.host_base()
        timings = await _timings(made, start, rounds)
        if not session.json:
            _show(capabilities, timings, rounds)
        if not quick:
            results = await suite.run(made, start, names, settings=settings, told=lambda r: _tell(session, r))
    finally:
        await made.close()
    failed = [result for result in results if result.status == "failed"]
    if session.json:
        value = {**asdict(capabilities), **timings, "checks": [asdict(result) for result in results]}
        json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
        print()
    elif results:
        passed = sum(result.status == "passed" for result in results)
        print(f"{passed} passed, {len(failed)} failed, {len(results) - passed - len(failed)} do not apply.")
    return FAULT if failed else OK


def _show(capabilities: Capabilities, timings: dict[str, float], rounds: int) -> None:
    for name, label in _NAMES.items():
        print(f"{'✓' if getattr(capabilities, name) else '✗'} {label}")
    for reason in capabilities.unenforced:
        print(f"  not enforced: {clean(reason)}")
    create, run = timings["create_ms"], timings["exec_ms"]
    print(f"Median of {rounds}: {create} ms to make one and run a command, {run} ms for another command.")


async def _timings(made: SandboxProvider, image: str, rounds: int) -> dict[str, float]:
    from sandbox.base import SandboxSpec, SandboxUnavailable

    creates: list[float] = []
    execs: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        async with await made.create(SandboxSpec(image=image, owner="check", workdir="/")) as box:
            first = await box.exec(["true"])
            creates.append(time.perf_counter() - started)
            started = time.perf_counter()
            second = await box.exec(["true"])
            execs.append(time.perf_counter() - started)
        for result in (first, second):
            if not result.ok:
                raise SandboxUnavailable(
                    f"a sandbox was made but `true` ended as {result.outcome.value} in it: {result.text}"
                )
    medians = {"create_ms": statistics.median(creates), "exec_ms": statistics.median(execs)}
    return {name: round(seconds * 1000, 1) for name, seconds in medians.items()}
