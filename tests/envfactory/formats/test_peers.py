"""The programs that others read these formats with, on a task of ours: `benchmarks.formats`, small."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.formats import NoPython, check, faults, newer_python
from catalog.store import Catalog
from envfactory.formats.exchange import import_tasks
from envfactory.formats.importing import Importer
from sandbox.base import SandboxProvider
from sandbox.images import ImageStore
from tests.envfactory.formats.test_importing import commit_of, row_of
from tests.envfactory.packages import CORE, repository, tiny
from verifiers.grading import Grader

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.services
@pytest.mark.timeout(1500)
async def test_every_peer_takes_what_we_write(
    tmp_path: Path, home: Path, images: ImageStore, sandboxes: SandboxProvider
) -> None:
    try:
        newer_python((3, 12))
    except NoPython as reason:
        pytest.skip(str(reason))
    buggy = CORE.replace("max(low, min(value, high))", "min(value, high)")
    mirror = repository(tmp_path / "tinysum", [(tiny(core=buggy), "Start")])
    row = row_of(commit_of(mirror), test_patch="")
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    with Catalog.open(home) as catalog:
        async with Grader(sandboxes, images, catalog.blobs) as grader:
            importer = Importer(home, catalog.blobs, images, sandboxes, grader, repository=str(mirror))
            (one,) = await import_tasks(tmp_path / "x.jsonl", "swebench", catalog, images, foreign=importer)
        assert not one.notes
        # As if it were ours alone: other people's words for it are another test's business.
        origin = one.task.origin.model_copy(update={"source": "pypi:tinysum==1.0"})
        task = one.task.model_copy(update={"foreign": None, "origin": origin})
        folder = Path(os.environ.get("POSTTRAIN_PEERS") or ROOT / ".venv" / "peers")
        folder.mkdir(parents=True, exist_ok=True)
        # Harbor's mapper reads the folders of terminal-bench, whose own environment is a gigabyte.
        skip = ("terminal-bench",)
        result = await check([task], catalog.blobs, images, sandboxes, folder, skip=skip)
    assert not faults(result)
    assert result["swebench5"]["tasks"] == result["harbor"]["tasks"] == 1
    assert result["harbor"]["mapped"] == [task.id]
    assert result["harbor"]["instructions"] == {task.id: task.problem.statement}
    assert result["mini-swe-agent"]["roles"] == ["system", "user", "assistant", "tool", "assistant"]
