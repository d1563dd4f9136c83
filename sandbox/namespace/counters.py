"""How often a sandbox hit its limits, read from its control groups on the host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Counters:
    """Folders of one sandbox, None where the host has no such controller."""

    memory: Path | None
    pids: Path | None

    def read(self) -> dict[str, int]:
        """Events so far: `oom` kills and refused forks (`pids`)."""
        found: dict[str, int] = {}
        if self.memory is not None:
            found["oom"] = _field(self.memory, ("memory.events", "memory.oom_control"), "oom_kill")
        if self.pids is not None:
            found["pids"] = _field(self.pids, ("pids.events",), "max")
        return found

    def rose(self, before: dict[str, int]) -> set[str]:
        """Names of the counters that are higher than `before`."""
        return {name for name, value in self.read().items() if value > before.get(name, 0)}


def _field(folder: Path, files: tuple[str, ...], name: str) -> int:
    for file in files:
        try:
            text = (folder / file).read_text()
        except OSError:
            continue
        for line in text.splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
