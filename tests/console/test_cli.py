"""The command line: exit codes, one sentence for errors, JSON, and how fast it answers."""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from catalog.errors import UserError
from catalog.models import Decision, Gate, QualityReport, SolveRate, Status
from catalog.runs import RunFolder, RunKind
from catalog.store import Catalog
from console.cli import main
from console.errors import FAULT, INTERRUPTED, USER, explain
from tests.catalog.test_store import make_task


@pytest.fixture
def home(tmp_path: Path) -> Path:
    with Catalog.open(tmp_path / "home") as catalog:
        good = make_task("good", status=Status.ACCEPTED, split="test", solution=catalog.blobs.put(b"+gold\n"))
        bad = make_task("bad", status=Status.QUARANTINED)
        catalog.put_task(good)
        catalog.put_task(bad)
        gates = (
            Gate(name="builds", passed=True, evidence="ok"),
            Gate(name="noop", passed=False, evidence="the test \x1b[2Jpasses already"),
        )
        rates = (SolveRate(solver="flash-nano", passed=3, attempts=8),)
        catalog.put_report(QualityReport(task_id=good.id, gates=gates[:1], solve_rates=rates))
        history = (Decision(actor="inspector", action="rejected", reason="no-op passes", at=0.0),)
        catalog.put_report(QualityReport(task_id=bad.id, gates=gates, history=history))
    return tmp_path / "home"


def test_list_filters_and_prints_lines_or_json(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "list", "--status", "accepted", "--home", str(home), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["status"], row["solved"], row["split"]) == ("accepted", "3/8", "test")
    assert main(["--home", str(home), "tasks", "list", "--limit", "1"]) == 0
    head, line, more = capsys.readouterr().out.splitlines()
    assert head.startswith("id\tstatus")
    assert line.count("\t") == head.count("\t")
    assert "--limit 2" in more
    assert main(["tasks", "list", "--split", "dev", "--home", str(home)]) == 0
    assert "No task matches; there are 1 accepted, 1 quarantined." in capsys.readouterr().out


def test_show_leads_with_the_verdict_and_hides_the_gold(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = make_task("bad").id, make_task("good").id
    assert main(["tasks", "show", bad, "--home", str(home)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith(f"{bad}  quarantined: gate noop failed, the test")
    assert "\x1b" not in out, "text of tasks must not steer the terminal"
    assert "inspector rejected: no-op passes" in out
    assert main(["tasks", "show", good, "--home", str(home)]) == 0
    assert "+gold" not in capsys.readouterr().out
    assert main(["tasks", "show", good, "--gold", "--home", str(home)]) == 0
    assert "+gold" in capsys.readouterr().out


def test_report_writes_one_file(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "r.html"
    assert main(["tasks", "report", "--out", str(out), "--home", str(home), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(out), "tasks": 2}
    assert out.read_text().startswith("<!DOCTYPE html>")


def test_runs_are_listed_and_shown_by_id_or_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with RunFolder.open(folder, kind=RunKind.RL, config={"lr": 0.1}, seed=0) as run:
        run.log(1, loss=0.25)
        run.progress("steps", 1, 20)
        with Catalog.open(tmp_path / "home") as catalog:
            catalog.put_run(run.run)
    for name in (str(folder), run.run.id):
        assert main(["runs", "show", name, "--home", str(tmp_path / "home"), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["state"], shown["metrics"][0]["loss"], shown["progress"]["total"]) == (
            "running",
            0.25,
            20,
        )
    assert main(["runs", "list", "--home", str(tmp_path / "home")]) == 0
    assert run.run.id in capsys.readouterr().out
    assert main(["runs", "show", str(folder)]) == 0
    assert "steps: 1 of 20" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("tasks lst", 'Unknown command "lst". Did you mean "list"?'),
        ("tasks list --statu x", "Unknown option: --statu. Did you mean --status?"),
        ("tasks list --limit many", "--limit"),
        ("tasks show nothing", "No task is called nothing."),
        ("tasks show", "requires an argument"),
        ("runs show nothing", "No run is called nothing."),
        ("tasks list --home /dev/null/x", "choose another --home"),
        ("frobnicate", 'Unknown command "frobnicate"'),
        ("tasks audit", "Name tasks to audit, or give --all."),
        ("train rl runs/x --train.step 3", "There is no setting train.step. Did you mean train.steps?"),
        ("train opd runs/x", "The setting train is required"),
        ("train rll", 'Did you mean "rl"?'),
        ("rollout evaluate runs/x --config none.toml", "There is no none.toml."),
    ],
)
def test_mistakes_are_one_sentence_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, sentence: str
) -> None:
    assert (
        main(
            ["--home", str(tmp_path), *arguments.split()] if "--home" not in arguments else arguments.split()
        )
        == 2
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("posttrain: ")
    assert sentence in captured.err
    assert captured.err.count("\n") == 1


def test_errors_are_sorted_by_whose_they_are() -> None:
    def caught(function: object) -> tuple[int, str]:
        try:
            function()  # type: ignore[operator]
        except BaseException as error:  # the function under test takes whatever there is
            return explain(error)
        raise AssertionError("nothing was raised")

    def raises(error: BaseException) -> object:
        def function() -> None:
            raise error

        return function

    class OtherRoom(Exception):
        exit_code = 2

    assert caught(raises(UserError("Do this."))) == (USER, "Do this.")
    assert caught(raises(OtherRoom("a\nb"))) == (USER, "a b")
    assert caught(raises(ValueError("rate must be positive"))) == (USER, "rate must be positive")
    code, sentence = caught(lambda: int("x"))
    assert code == FAULT
    assert "Internal error at test_cli.py:" in sentence
    assert caught(raises(KeyError("x")))[0] == FAULT
    assert caught(raises(KeyboardInterrupt()))[0] == INTERRUPTED
    assert caught(raises(OSError(errno.ENOSPC, "No space left on device")))[1].endswith("free some space.")
    assert caught(raises(PermissionError(errno.EACCES, "Permission denied", "/x")))[1].startswith("/x: Permi")
    missing = ModuleNotFoundError("No module named 'torch'", name="torch")
    assert "pip install 'posttrain[torch]'" in caught(raises(missing))[1]


def test_global_options_may_stand_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "rl", "runs/x", "--train.steps", "7", "--dry-run", "--json", "--home", str(tmp_path)]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["train"]["steps"] == 7
    assert main(["train", "settings", "rl", "--json"]) == 0
    names = [line["name"] for line in json.loads(capsys.readouterr().out)]
    assert "--train.loss.clip_low" in names


def test_roles_show_what_trains_each_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "roles", "flash-tiny"]) == 0
    lines = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert ["embedding.weight", "128x32", "adamw"] in lines
    assert main(["train", "roles", "flash-tiny", "--embeddings", "sinkhorn", "--json"]) == 0
    found = {role["name"]: role for role in json.loads(capsys.readouterr().out)}
    assert found["embedding.weight"]["method"] == "sinkhorn"
    assert found["layers.0.attention.query_up.weight"]["blocks"] == 2


def test_debug_keeps_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        main(["tasks", "show", "nothing", "--debug", "--home", str(tmp_path)])


def test_help_answers_at_once_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from console.cli import main; assert main(['--help']) == 0\n"
        "heavy = {'torch', 'sqlalchemy', 'libcst', 'jinja2', 'alembic'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "tasks" in shown.stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 0.5  # processor time: other work does not stretch it


def test_a_closed_pipe_is_no_error(home: Path) -> None:
    line = f"{sys.executable} -m console tasks list --home {home} | true; echo ${{PIPESTATUS[0]}}"
    shown = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (shown.stdout.strip(), shown.stderr) == ("0", "")
