"""The whole factory on a tiny repository: audited tasks, kill -9, the same tasks again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from catalog.models import Status
from catalog.store import Catalog
from envfactory.config import SynthConfig
from envfactory.stages.inspector import GATES
from envfactory.synthesis import Synthesis, Tools, synthesize
from sandbox.base import SandboxProvider
from sandbox.images import ImageStore
from tests.console.test_chain import NUMBER_TESTS, PROJECT, WORD_TESTS
from tests.envfactory.packages import repository
from tests.envfactory.tiny import NUMBERS, WORDS

FILES = {
    "tiny/__init__.py": "",
    "tiny/numbers.py": NUMBERS,
    "tiny/words.py": WORDS,
    "tests/test_numbers.py": NUMBER_TESTS,
    "tests/test_words.py": WORD_TESTS,
    "pyproject.toml": PROJECT,
}
BEFORE = FILES | {
    "tiny/words.py": WORDS.replace('    if not parts:\n        return ""\n', ""),
    "tests/test_words.py": WORD_TESTS.replace('    assert initials("") == ""\n', ""),
}
CONFIG = SynthConfig(tasks={"train": 3, "dev": 0, "test": 2})
SCRIPT = """
import asyncio, json, sys
from pathlib import Path
from catalog.store import Catalog
from envfactory.config import SynthConfig
from envfactory.synthesis import Tools, synthesize
from sandbox.base import provider
from sandbox.images import ImageStore

async def main(source, home, config):
    backend = provider("namespace", store=home / "images")
    with Catalog.open(home) as catalog:
        tools = Tools(catalog, backend, ImageStore(home / "images"))
        await synthesize(source, home, tools, config, tick=lambda *_: print("tick", flush=True))
    await backend.close()

asyncio.run(main(sys.argv[1], Path(sys.argv[2]), SynthConfig.model_validate_json(sys.argv[3])))
"""

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture
def source(tmp_path: Path) -> str:
    # A source that is not UTF-8, and a name that is not: both run, and neither is edited.
    latin = {
        "tiny/latin.py": "# coding: latin-1\nNAME = 'caf\xe9'\n".encode("latin-1"),
        os.fsdecode(b"tiny/caf\xe9.py"): "",
    }
    states = [(BEFORE | latin, "first"), (FILES | latin, "No initials of nothing")]
    return str(repository(tmp_path / "tiny", states))


async def make(source: str, home: Path, sandboxes: SandboxProvider, images: ImageStore) -> Synthesis:
    with Catalog.open(home) as catalog:
        return await synthesize(source, home, Tools(catalog, sandboxes, images), CONFIG)


def judged(home: Path) -> Mapping[str, Any]:
    """Task id -> status, gates and candidates."""
    with Catalog.open(home) as catalog:
        reports = {report.task_id: report for report in catalog.list_reports()}
        return {
            task.id: (
                task.status,
                [(gate.name, gate.passed) for gate in reports[task.id].gates],
                catalog.find_candidates(task.id),
            )
            for task in catalog.list_tasks()
        }


@pytest.mark.timeout(300)
async def test_tasks_pass_every_gate_and_come_back_without_a_run(
    source: str, home: Path, sandboxes: SandboxProvider, images: ImageStore
) -> None:
    made = await make(source, home, sandboxes, images)
    assert {task.origin.kind for task in made.tasks} == {"procedural", "commit"}
    assert made.funnel.mined == {"found": 1}
    for task in made.tasks:
        assert task.status is Status.ACCEPTED
        _, gates, _ = judged(home)[task.id]
        assert [name for name, _ in gates] == list(GATES)
        assert all(passed for _, passed in gates)
    assert made.candidates, "no task offers a choice"
    for id, choices in made.candidates.items():
        assert 1 <= sum(choices.passes) <= 2, id
        assert all(
            visible for visible, right in zip(choices.passes_visible, choices.passes, strict=True) if right
        )
        assert [bool(text) for text in choices.messages] == [not passed for passed in choices.passes_visible]
    before = judged(home)
    again = await make(source, home, sandboxes, images)
    assert [task.id for task in again.tasks] == [task.id for task in made.tasks]
    assert again.funnel == made.funnel
    assert judged(home) == before


@pytest.mark.timeout(300)
async def test_a_killed_synthesis_ends_as_an_undisturbed_one(
    source: str, tmp_path: Path, home: Path, sandboxes: SandboxProvider, images: ImageStore
) -> None:
    await make(source, home, sandboxes, images)
    killed = tmp_path / "killed"
    command = [sys.executable, "-c", SCRIPT, source, str(killed), CONFIG.model_dump_json()]
    for ticks in (1, 3):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(ticks):
            process.stdout.readline()
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    first, second = judged(home), judged(killed)
    assert json.dumps(sorted(first)) == json.dumps(sorted(second))
    assert first == second
