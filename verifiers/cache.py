"""Verdicts that need not be computed again."""

from __future__ import annotations

from typing import Protocol

from catalog.models import Verdict, digest_json

GRADER_VERSION = 2
"""Part of every key: raise it when grading changes what a verdict can be."""


class VerdictTable(Protocol):
    """Where verdicts are kept; `catalog.verdicts.VerdictTable` is one."""

    def get(self, key: str) -> Verdict | None: ...

    def put(self, key: str, verdict: Verdict) -> None: ...


class MemoryVerdicts:
    """A table that lives as long as the process."""

    def __init__(self) -> None:
        self._verdicts: dict[str, Verdict] = {}

    def get(self, key: str) -> Verdict | None:
        return self._verdicts.get(key)

    def put(self, key: str, verdict: Verdict) -> None:
        self._verdicts.setdefault(key, verdict)


class VerdictCache:
    """Verdicts by digest of (image, change, verifier). Counts hits and misses; keeps no unjudged verdict."""

    def __init__(self, table: VerdictTable | None = None) -> None:
        self._table = table or MemoryVerdicts()
        self.hits = 0
        self.misses = 0

    @staticmethod
    def key(image: str, change: object, verifier: str) -> str:
        """`change` is anything JSON that determines the graded tree given the image."""
        return digest_json([GRADER_VERSION, image, change, verifier])

    def get(self, key: str, *, last: bool = True) -> Verdict | None:
        """The verdict, marked as cached. With `last` False another key follows, and no miss is counted."""
        verdict = self._table.get(key)
        if verdict is None:
            self.misses += last
            return None
        self.hits += 1
        return verdict.model_copy(update={"cached": True})

    def put(self, key: str, verdict: Verdict) -> None:
        """Keep a verdict; one that could not be judged is dropped, for it may succeed the next time."""
        if verdict.reward is not None:
            self._table.put(key, verdict.model_copy(update={"cached": False}))
