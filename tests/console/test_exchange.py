"""Documents through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from catalog.models import RunKind, Task
from catalog.runs import RunFolder
from catalog.store import Catalog
from console.cli import main
from console.errors import USER
from rollout.journal import TrajectoryLog
from sandbox.images import ImageStore
from tests.envfactory.formats.made import make_report, make_task
from tests.envfactory.formats.test_trajectories import FOREIGN_MINI, simple


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def task(home: Path, tmp_path: Path) -> Task:
    with Catalog.open(home) as catalog:
        task = make_task(ImageStore(home / "images"), catalog.blobs, tmp_path)
        catalog.put_task(task)
        catalog.put_report(make_report(task))
    return task


def run(home: Path, capsys: pytest.CaptureFixture[str], *words: str) -> object:
    assert main([*words, "--home", str(home), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_tasks_go_out_and_come_in(
    task: Task, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tasks"
    said = run(home, capsys, "tasks", "export", str(out), "--format", "harbor")
    assert said == {"path": str(out), "tasks": 1, "not seen by others": ["limits of processes"]}
    (row,) = run(home, capsys, "tasks", "import", str(out), "-f", "harbor")  # type: ignore[misc]
    assert row == {"id": task.id, "status": "accepted", "notes": "it was here already", "new": False}
    assert main(["tasks", "export", str(out), "--format", "harbor", "--home", str(home)]) == USER
    assert "exists already" in capsys.readouterr().err
    assert main(["tasks", "export", str(out), "--format", "harbour", "--home", str(home)]) == USER
    assert "Did you mean harbor?" in capsys.readouterr().err
    assert main(["tasks", "audit", str(out), "--repo", "x", "--home", str(home)]) == USER
    assert "--format" in capsys.readouterr().err
    assert main(["tasks", "audit", str(out), "more", "-f", "harbor", "--home", str(home)]) == USER
    assert "name one file or folder" in capsys.readouterr().err
    assert main(["tasks", "export", str(out), "-f", "harbor", "--split", "dev", "--home", str(home)]) == USER
    assert "No task matches" in capsys.readouterr().err


def test_trajectories_go_out_and_come_in_and_are_graded_again(
    task: Task, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = simple().model_copy(update={"task_id": task.id})
    with RunFolder.open(tmp_path / "run", kind=RunKind.RL, config={}, seed=0) as folder:
        log = TrajectoryLog(tmp_path / "run/rollout/trajectories.jsonl")
        log.append(first.model_copy(update={"run_id": folder.run.id}))
        log.close()
        folder.finish({})
    for name in ("atif", "mini-swe-agent"):
        out = tmp_path / f"{name}.jsonl"
        said = run(home, capsys, "runs", "export", str(tmp_path / "run"), str(out), "--format", name)
        assert isinstance(said, dict)
        assert said["trajectories"] == 1
        made = run(home, capsys, "runs", "import", str(out), str(tmp_path / f"run-{name}"), "--format", name)
        assert isinstance(made, dict)
        assert made["of unknown tasks"] == []
        with Catalog.open(home) as catalog:
            (row,) = catalog.list_trajectories(run_id=made["run"])
            assert catalog.get_trajectory(row.id).turns == first.turns
    (tmp_path / "a.traj.json").write_text(json.dumps(FOREIGN_MINI))
    folder = str(tmp_path / "strange")
    said = run(home, capsys, "runs", "import", str(tmp_path / "a.traj.json"), folder, "-f", "mini-swe-agent")
    assert isinstance(said, dict)
    assert said["of unknown tasks"] == ["octo__calc-1"]
    judged = run(home, capsys, "regrade", folder)
    assert isinstance(judged, dict)
    assert judged["counts"] == {"skipped": 1}
    assert main(["regrade", "no-such-run", "--home", str(home)]) == USER
