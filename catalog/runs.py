"""The folder of a run: what was asked, what happened, and enough to go on after a kill.

    with RunFolder.open(path, kind=RunKind.RL, config=config, seed=0, resume=True) as run:
        run.log(step, loss=..., reward=...)
        run.finish({"reward": ...})

Files: `config.json` (resolved), `run.json` (the `Run` record), `metrics.jsonl` (one line a step, on disk
before `log` returns), `progress.json`, `summary.json` (atomic). A lock that dies with its process keeps
two processes out of one folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from catalog.atomic import write_atomic
from catalog.errors import UserError
from catalog.jsonl import JsonLines, plain, read_lines
from catalog.models import Run, RunKind, canonical_json


class RunFolder:
    """One run's folder, held by this process until `close`."""

    def __init__(self, path: Path, run: Run, lock: int, resumed: bool) -> None:
        self.path = path
        self.run = run
        self.resumed = resumed
        """The folder held an earlier part of this run."""
        self._lock = lock
        self._metrics = JsonLines(path / "metrics.jsonl")

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        kind: RunKind,
        config: dict[str, Any],
        seed: int,
        resume: bool = False,
    ) -> Self:
        """Make the folder, or with `resume` go on in it.

        Raises UserError if another process holds the folder, if it holds a run and `resume` is false, or
        if that run had another configuration.
        """
        path = Path(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
        except OSError as error:
            raise UserError(
                f"Cannot write to {path} ({error.strerror}): choose another run folder."
            ) from error
        try:
            run = _start(path, kind, plain(config), seed, resume)
            return cls(path, run, lock, resumed=(path / "metrics.jsonl").exists())
        except BaseException:
            os.close(lock)
            raise

    def log(self, step: int, **values: Any) -> None:
        """Append one line to `metrics.jsonl`; it is on disk when this returns."""
        self._metrics.append({"step": step, "at": round(time.time(), 3), **values})

    def metrics(self) -> list[dict[str, Any]]:
        """Every line logged so far."""
        return list(read_lines(self.path / "metrics.jsonl"))

    def rewind(self, step: int) -> None:
        """Drop the lines of later steps than `step`, the one that the checkpoint to go on from is of."""
        kept = [line for line in self.metrics() if line["step"] <= step]
        self._metrics.close()
        data = b"".join(canonical_json(line) + b"\n" for line in kept)
        write_atomic(self.path / "metrics.jsonl", data)
        self._metrics = JsonLines(self.path / "metrics.jsonl")

    def progress(self, stage: str, done: int, total: int | None = None) -> None:
        """Say how far the run is, for whoever looks at the folder."""
        state = {"stage": stage, "done": done, "total": total, "at": round(time.time(), 3)}
        write_atomic(self.path / "progress.json", canonical_json(state) + b"\n")

    def finish(self, summary: dict[str, Any]) -> Run:
        """Write `summary.json` and mark the run finished. Finishing again replaces the summary."""
        return self._end("finished", summary)

    def fail(self, reason: str) -> Run:
        """Mark the run failed; opening it with `resume` may still go on with it."""
        return self._end("failed", {"error": reason})

    def close(self) -> None:
        """Let another process have the folder."""
        self._metrics.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _end(self, state: str, summary: dict[str, Any]) -> Run:
        summary = plain(summary)
        text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
        write_atomic(self.path / "summary.json", text.encode())
        changed = {"state": state, "finished": time.time(), "summary": summary}
        self.run = Run.model_validate(self.run.model_dump() | changed)
        _write_run(self.path, self.run)
        return self.run


@contextmanager
def held(path: Path) -> Generator[None]:
    """Keep other processes out of a run's folder meanwhile. Raises UserError if one is in it."""
    try:
        lock = _lock(path)
    except FileNotFoundError:
        raise UserError(f"There is no folder {path}: check the path.") from None
    try:
        yield
    finally:
        os.close(lock)


def read_run(path: Path) -> Run:
    """The record in a run folder. Raises UserError if there is none."""
    try:
        return Run.model_validate_json((path / "run.json").read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} is not a run folder: it has no run.json.") from None
    except ValidationError:
        raise UserError(f"{path / 'run.json'} is damaged: choose another run folder.") from None


def _start(path: Path, kind: RunKind, config: dict[str, Any], seed: int, resume: bool) -> Run:
    file = path / "run.json"
    if not file.exists():
        # The id names kind, time and folder, so that two runs started in one second differ.
        where = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:6]
        id = f"{kind.value}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{where}"
        run = Run(id=id, kind=kind, folder=str(path), config=config, seed=seed, created=time.time())
        write_atomic(path / "config.json", json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n")
        _write_run(path, run)
        return run
    run = read_run(path)
    if not resume:
        raise UserError(f"{path} holds run {run.id} already: use another folder.")
    if run.kind is not kind or run.seed != seed or canonical_json(run.config) != canonical_json(config):
        keys = sorted(run.config.keys() | config.keys())
        what = ", ".join(k for k in keys if run.config.get(k) != config.get(k)) or "kind or seed"
        raise UserError(f"{path} was started with another {what}: use the same, or use another folder.")
    run = run.model_copy(update={"state": "running", "finished": None})
    _write_run(path, run)
    return run


def _write_run(path: Path, run: Run) -> None:
    write_atomic(path / "run.json", run.model_dump_json(indent=2).encode() + b"\n")


def _lock(path: Path) -> int:
    handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 20).decode() or "?"
        os.close(handle)
        raise UserError(f"Process {holder} works in {path}: wait for it, or use another folder.") from None
    os.truncate(handle, 0)
    os.write(handle, str(os.getpid()).encode())
    return handle
