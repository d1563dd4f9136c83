"""The commands one after another on a real repository: make tasks, audit, act, train, report."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
from pathlib import Path

import pytest

from catalog.jsonl import read_lines
from catalog.store import Catalog
from console.cli import main
from tests.envfactory.tiny import NUMBERS, WORDS

NUMBER_TESTS = """\
from tiny.numbers import clamp, total, windows


def test_clamp():
    assert clamp(5, 1, 3) == 3
    assert clamp(0, 1, 3) == 1
    assert clamp(2, 1, 3) == 2


def test_total():
    assert total([1, None, 2]) == 3
    assert total([1], 5) == 6


def test_windows():
    assert windows([1, 2, 3], 2) == [[1, 2], [2, 3]]
"""
WORD_TESTS = """\
from tiny.words import initials, is_title


def test_initials():
    assert initials("ab cd") == "A.C."
    assert initials("") == ""


def test_is_title():
    assert is_title("Abc")
    assert not is_title("aBc")
"""
PROJECT = '[project]\nname = "tiny"\nversion = "1.0"\n'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "tiny-repository"
    for path, text in {
        "tiny/__init__.py": "",
        "tiny/numbers.py": NUMBERS,
        "tiny/words.py": WORDS,
        "tests/test_numbers.py": NUMBER_TESTS,
        "tests/test_words.py": WORD_TESTS,
        "pyproject.toml": PROJECT,
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    for line in ("init -q", "add -A", "-c user.name=t -c user.email=t@localhost commit -qm first"):
        subprocess.run(["git", *line.split()], cwd=root, check=True)
    return root


@pytest.mark.timeout(400)
def test_from_a_repository_to_a_trained_policy(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from model.policy import load_policy

    def run(*words: str | Path) -> dict[str, object] | list[dict[str, object]]:
        code = main([*map(str, words), "--home", str(tmp_path / "home"), "--json"])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return json.loads(captured.out)

    settings = ("--tasks.train", "2", "--tasks.dev", "0", "--tasks.test", "0", "--history", "false")
    made = run("tasks", "synth", repository, *settings)
    assert isinstance(made, dict)
    assert made["accepted"] == 2
    again = run("tasks", "synth", repository, *settings)
    assert isinstance(again, dict)
    assert again | {"minutes": 0} == made | {"minutes": 0}, "the same tasks, and no work twice"

    tasks = run("tasks", "list", "--status", "accepted")
    assert isinstance(tasks, list)
    (report,) = run("tasks", "audit", str(tasks[0]["id"]))
    assert [gate["name"] for gate in report["gates"]].count("hacks") == 1  # type: ignore[union-attr]
    assert report["history"][-1]["action"] == "audited", report  # type: ignore[index]

    load_policy("flash-nano", seed=0).save(tmp_path / "policy")
    trained = run(
        "train", "rl", tmp_path / "rl", "--train.policy", tmp_path / "policy", "--train.steps", "1",
        "--service.batch_prompts", "1", "--service.samples", "2",
    )  # fmt: skip
    assert isinstance(trained, dict)
    assert trained["steps"] == 1
    measured = run(
        "rollout", "evaluate", tmp_path / "eval", "--policy", tmp_path / "rl" / "policy",
        "--split", "train", "--evaluation.samples", "2",
    )  # fmt: skip
    assert isinstance(measured, dict)
    assert (measured["tasks"], measured["draws"], measured["failed"]) == (2, 4, 0)
    listed = run("runs", "list")
    assert {one["kind"] for one in listed} == {"rl", "evaluation"}  # type: ignore[index]
    assert run("tasks", "report", "--out", tmp_path / "r.html") == {
        "file": str(tmp_path / "r.html"),
        "tasks": len(run("tasks", "list")),
    }


@pytest.mark.timeout(400)
async def test_the_demo_s_runs_are_entered_once(repository: Path, tmp_path: Path) -> None:
    from console.demo import stages
    from console.demo.config import DemoConfig
    from console.demo.run import domains
    from console.demo.split import Parts
    from console.progress import Stages
    from opd.config import TeacherConfig
    from sandbox.base import provider
    from sandbox.images import ImageStore

    little = {"in_flight": 4, "batch_prompts": 1, "samples": 2}
    config = DemoConfig.model_validate(
        {
            "source": str(repository),
            "synth": {"tasks": {"train": 2, "dev": 0, "test": 0}, "history": False},
            "variants": 1,
            "sft": {"steps": 1, "batch_samples": 2},
            "rl": {"steps": 1},
            "service": little,
            "opd": {"steps": 1},
            "opd_service": little,
            "engine": {"slots": 4},
        }
    )
    images = ImageStore(tmp_path / "home" / "images")
    backend = provider("namespace", store=images.root)
    with Catalog.open(tmp_path / "home") as catalog, Stages(file=io.StringIO()) as log:
        bench = stages.Bench(config, tmp_path, catalog, backend, images, {})
        try:
            with log.stage("tasks") as stage:
                made = await stages.make_tasks(bench, stage)
            bench = stages.Bench(config, tmp_path, catalog, backend, images, made.candidates)
            some = tuple(task for task in made.tasks if task.id in made.candidates)
            parts = Parts(sft=some, rl=some, dev=(), test=some)

            async def everything() -> dict[str, tuple[str, str, int]]:
                sft = await asyncio.to_thread(stages.fine_tune, bench, parts, config.sft, "sft")
                rl = await stages.reinforce(bench, parts, sft, "rl")
                teachers = (TeacherConfig(name="rl", policy=str(rl)),)
                await stages.distil(bench, parts, sft, teachers, domains(parts))
                await stages.measure(bench, parts.test, rl, "rl")
                return {
                    run.folder: (run.id, run.state, len(catalog.list_trajectories(run_id=run.id)))
                    for run in catalog.list_runs()
                }

            first = await everything()
            # A stage that was killed after its last step and before its run was entered does this again.
            assert await everything() == first
        finally:
            await backend.close()
    folders = [tmp_path / name for name in ("sft", "rl", "opd", "evaluation/rl")]
    assert sorted(first) == sorted(map(str, folders))
    for folder in folders:
        _, state, trajectories = first[str(folder)]
        log_file = folder / "rollout" / "trajectories.jsonl"
        assert state == "finished"
        assert trajectories == (len(list(read_lines(log_file))) if folder.name != "sft" else 0)
    assert first[str(tmp_path / "evaluation/rl")][2] == len(some)
