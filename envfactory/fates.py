"""What became of a proposal, on record: one row of the catalog's stages, read when the job goes on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from catalog.models import QualityReport, Task


@dataclass(frozen=True)
class Found:
    """A search as it is recorded: what `make_pool` cannot make again."""

    workspace: str
    """Blob: changes from the build's tree to the workspace that the agent finds (`verifiers.changes`)."""
    test_source: str
    search: dict[str, Any]
    """`envfactory.repair.record`."""

    @property
    def found(self) -> bool:
        return self.search["found"] is not None


@dataclass(frozen=True)
class Fate:
    """What became of one proposal."""

    reason: str
    """Empty: accepted."""
    task: Task | None = None
    report: QualityReport | None = None
    search: Found | None = None

    @property
    def accepted(self) -> bool:
        return not self.reason

    @property
    def offers_a_choice(self) -> bool:
        return self.search is not None and self.search.found

    def dump(self) -> dict[str, Any]:
        return {
            "reason": self.reason,
            "task": self.task.model_dump(mode="json") if self.task else None,
            "report": self.report.model_dump(mode="json") if self.report else None,
            "search": asdict(self.search) if self.search else None,
        }

    @classmethod
    def load(cls, value: dict[str, Any]) -> Fate:
        return cls(
            value["reason"],
            Task.model_validate(value["task"]) if value["task"] else None,
            QualityReport.model_validate(value["report"]) if value["report"] else None,
            Found(**value["search"]) if value["search"] else None,
        )
