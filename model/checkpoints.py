"""A run's checkpoints and metrics on disk, so written that a kill at any instant leaves a usable folder.

    RUN/config.json               the resolved configuration
    RUN/metrics.jsonl             one object a line, `step` always
    RUN/checkpoints/00000012/     everything of step 12; appears by rename, so it is complete or absent

On resume, metrics of steps after the checkpoint are cut off: they are computed again. No torch here.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

FORMAT = 1


class Monitor(Protocol):
    """Where metrics go."""

    def log(self, step: int, metrics: Mapping[str, float | int | str]) -> None: ...

    def close(self) -> None: ...


class JsonlMonitor:
    """`metrics.jsonl`. Lines after `last_step` and a torn last line, left by a killed run, are removed.

    Args:
        path: the file; made when missing.
        last_step: step of the checkpoint that the run goes on from; None or 0 starts afresh.
    """

    def __init__(self, path: Path, last_step: int | None = None) -> None:
        self.path = path
        kept = [line for line in read_metrics(path) if int(line["step"]) <= (last_step or 0)]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(_line(line) for line in kept), encoding="utf-8")
        os.replace(partial, path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        self._file.write(_line({"step": step, **metrics}))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _line(values: Mapping[str, Any]) -> str:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps(finite) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a metrics file, oldest first; empty when there is none."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]


class Checkpoints:
    """Checkpoints of one run, newest last.

    Args:
        root: the run's `checkpoints` folder; made when missing, leftovers of killed writers are removed.
        keep: how many stay.
    """

    def __init__(self, root: Path, keep: int = 2) -> None:
        self.root = root
        self.keep = keep
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(".partial-*"):
            shutil.rmtree(leftover)

    def steps(self) -> list[int]:
        return sorted(int(path.name) for path in self.root.iterdir() if path.name.isdigit())

    def folder(self, step: int) -> Path:
        return self.root / f"{step:08d}"

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return max(self.steps(), default=None)

    def write(self, step: int, fill: Callable[[Path], None]) -> Path:
        """`fill` writes into a folder that takes its name only when it is complete.

        Files are flushed to the device before the rename; a checkpoint of that step that exists already
        is kept (it was written by the same deterministic computation, or by the run before the kill).
        """
        final = self.folder(step)
        if final.exists():
            return final
        partial = self.root / f".partial-{step:08d}-{os.getpid()}-{time.monotonic_ns()}"
        partial.mkdir()
        fill(partial)
        for path in partial.rglob("*"):
            if path.is_file():
                _sync(path)
        os.replace(partial, final)
        _sync(self.root)
        for old in self.steps()[: -self.keep]:
            # Out of sight first: a kill in the middle of a deletion must not leave half a checkpoint.
            doomed = self.root / f".partial-old-{old:08d}"
            os.replace(self.folder(old), doomed)
            shutil.rmtree(doomed)
        return final


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically; sorted keys, one trailing newline."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def claim_run(run: Path, config: dict[str, Any]) -> None:
    """Make the run folder, or check that it belongs to this resolved configuration.

    Raises:
        ValueError: it was started with other settings; names the first few that differ.
    """
    run.mkdir(parents=True, exist_ok=True)
    path = run / "config.json"
    if not path.exists():
        write_json(path, config)
        return
    before = read_json(path)
    now = json.loads(json.dumps(config))
    other = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if other:
        raise ValueError(
            f"{run} was started with other settings ({', '.join(other[:3])}): use another folder, "
            "or delete it to start afresh"
        )
