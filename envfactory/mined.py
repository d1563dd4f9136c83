"""Mined drafts on record: a synthesis that is started again reads them and runs nothing.

A draft begins at a revision of the history, which says what its tree and its layout are; so the record holds
what leads from there. What a time limit cut off stays cut off: the tasks of a home are decided once.
"""

from __future__ import annotations

import time
from dataclasses import replace

from catalog.blobs import Blobs
from catalog.models import BlobRef, Limits, Origin, Record, TestStatus
from catalog.store import Catalog
from envfactory.build import Build
from envfactory.layout import detect
from envfactory.mining import MiningConfig, mine
from envfactory.packaging import Draft
from envfactory.sanitize import clean
from envfactory.sources.base import History, Progress
from sandbox.base import SandboxProvider
from sandbox.images import ImageStore
from verifiers import changes

FORMAT = 1
"""Raise it when mining finds something else in the same history."""


class MinedDraft(Record):
    """A `Draft` whose base is the revision `origin.revision` of its history."""

    origin: Origin
    slug: str
    solved: BlobRef
    """Changes from the base to the solved workspace (`verifiers.changes`)."""
    tests: BlobRef
    """The same to the verifier's test files."""
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    expected: dict[str, TestStatus]
    arguments: tuple[str, ...]
    visible: tuple[str, ...]
    statement: str
    interface: str
    limits: Limits

    @classmethod
    def of(cls, draft: Draft, blobs: Blobs) -> MinedDraft:
        """The record of a draft; its contents go into blobs."""
        own = {name: getattr(draft, name) for name in cls.model_fields.keys() - {"solved", "tests"}}
        solved, tests = (blobs.put(changes.dump(some)) for some in (draft.solved, draft.tests))
        return cls(solved=solved, tests=tests, **own)

    def draft(self, history: History, blobs: Blobs) -> Draft:
        """The draft again."""
        parent = next(one for one in history.revisions if one.name == self.origin.revision)
        base = clean(history.tree(parent))
        own = {name: getattr(self, name) for name in MinedDraft.model_fields.keys() - {"solved", "tests"}}
        return Draft(
            base=base,
            start={},
            solved=changes.load(blobs.get(self.solved)),
            tests=changes.load(blobs.get(self.tests)),
            layout=detect(base, history.name),
            **own,
        )


async def mined(
    history: History,
    build: Build,
    catalog: Catalog,
    provider: SandboxProvider,
    images: ImageStore,
    config: MiningConfig,
    progress: Progress,
) -> tuple[list[Draft], dict[str, int]]:
    """Drafts from the history and what became of its changes, by reason; mined once in a home."""
    key = catalog.stages.key(FORMAT, build.image, build.pinned, config.model_dump(mode="json"))
    known = catalog.stages.get("mined", key)
    if known is None:
        began = time.monotonic()
        found, funnel = await mine(history, build, provider, images, config=config, progress=progress)
        # The old state may hang where the new one does not: no run may take much longer than the suite.
        suite_s = sum(build.suite.durations.values())
        limits = Limits(timeout_s=round(min(60.0, max(4.0, 2 * suite_s)), 1))
        records = [MinedDraft.of(replace(draft, limits=limits), catalog.blobs) for draft in found]
        value = {
            "drafts": [record.model_dump(mode="json") for record in records],
            "counts": funnel.counts,
        }
        value = catalog.stages.put("mined", key, value, seconds=time.monotonic() - began)
    else:
        value = known.value
    drafts = [MinedDraft.model_validate(row).draft(history, catalog.blobs) for row in value["drafts"]]
    return drafts, value["counts"]
