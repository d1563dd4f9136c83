"""Run folders: resuming, locking, torn lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from catalog.errors import UserError
from catalog.jsonl import JsonLines, read_at, read_lines, read_record
from catalog.models import RunKind
from catalog.runs import RunFolder, read_run

CONFIG = {"rate": 0.1, "steps": 3}


def open_run(path: Path, *, resume: bool = False, config: dict[str, object] = CONFIG) -> RunFolder:
    return RunFolder.open(path, kind=RunKind.RL, config=config, seed=1, resume=resume)


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a"
    with open_run(path) as run:
        assert not run.resumed
        first = run.run
        run.log(1, loss=0.5, grad=float("nan"))
        run.log(2, loss=0.4)
        run.progress("steps", 2, 3)
    with pytest.raises(UserError, match="another folder"):
        open_run(path)
    with pytest.raises(UserError, match="another rate"):
        open_run(path, resume=True, config={"rate": 0.2, "steps": 3})
    with open_run(path, resume=True) as run:
        assert run.resumed
        assert run.run.id == first.id
        assert [(m["step"], m["loss"]) for m in run.metrics()] == [(1, 0.5), (2, 0.4)]
        assert run.metrics()[0]["grad"] == "nan"
        run.rewind(1)
        run.log(2, loss=0.3)
        assert [m["loss"] for m in run.metrics()] == [0.5, 0.3]
        run.finish({"reward": 1.0})
    assert json.loads((path / "summary.json").read_bytes()) == {"reward": 1.0}
    assert json.loads((path / "progress.json").read_bytes())["done"] == 2
    assert read_run(path).state == "finished"
    assert json.loads((path / "config.json").read_bytes()) == CONFIG
    with pytest.raises(UserError, match="not a run folder"):
        read_run(tmp_path)


def test_two_processes_cannot_work_in_one_folder_and_a_kill_frees_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tests.catalog.test_runs import open_run\n"
        "run = open_run(Path(sys.argv[1])); run.log(1, loss=1.0); print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "a")], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=f"Process {child.pid} works in"):
            open_run(tmp_path / "a", resume=True)
        child.kill()
        child.wait()
    with open_run(tmp_path / "a", resume=True) as run:
        assert [m["loss"] for m in run.metrics()] == [1.0]


def test_a_torn_line_is_cut_off_and_positions_stay_right(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with JsonLines(path) as lines:
        lines.append({"n": 1})
    with path.open("ab") as file:
        file.write(b'{"n": ' + b"9" * 70_000)
    assert list(read_lines(path)) == [{"n": 1}], "readers skip what is not whole"
    with JsonLines(path) as lines:
        second, third = lines.extend([{"n": "é"}, {"n": float("inf")}])
    assert list(read_lines(path)) == [{"n": 1}, {"n": "é"}, {"n": "inf"}]
    assert json.loads(read_at(second)) == {"n": "é"}
    assert json.loads(read_at(third)) == {"n": "inf"}
    assert list(read_lines(tmp_path / "none")) == []


def test_a_damaged_line_or_record_names_its_place(tmp_path: Path) -> None:
    lines, record = tmp_path / "t.jsonl", tmp_path / "build.json"
    lines.write_bytes(b'{"a": 1}\n{"a"\n{"a": 3}\n{"torn')
    with pytest.raises(UserError, match=r"t\.jsonl, line 2 is damaged"):
        list(read_lines(lines))
    for spoilt in (b"", b'{"format":', b"\xff\x00", b"[]"):
        record.write_bytes(spoilt)
        with pytest.raises(UserError, match=r"build\.json is damaged: remove it"):
            read_record(record)
    (tmp_path / "run.json").write_bytes(b'{"id":')
    with pytest.raises(UserError, match=r"run\.json is damaged"):
        read_run(tmp_path)
