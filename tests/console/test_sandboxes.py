"""`posttrain sandbox` against real sandboxes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from console.cli import main
from console.errors import FAULT, USER, explain
from sandbox.base import AdmissionRefused, SandboxSpec, SandboxUnavailable
from sandbox.namespace import NamespaceProvider


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def test_check_runs_the_named_checks(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["exit_code_is_data", "list_is_argv"]
    assert (
        main(["--home", str(home), "--json", "sandbox", "check", "namespace", *names, "--rounds", "1"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["status"]) for each in found["checks"]] == [
        (name, "passed") for name in names
    ]
    assert found["network_none"] is True
    assert main(["--home", str(home), "sandbox", "check", "--quick", "--rounds", "1"]) == 0
    assert "Median of 1" in capsys.readouterr().out


def test_escape_tells_what_was_tried(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--home", str(home), "sandbox", "escape", "namespace", "pivot_root"]) == 0
    assert "2 of 2 attempts were contained." in capsys.readouterr().out


async def story(home: Path) -> str:
    async with NamespaceProvider(home / "images") as provider:
        spec = SandboxSpec(image=provider.images.host_base())
        async with await provider.create(spec) as box:
            await box.exec("echo hello; exit 4")
            await box.exec("cat /proc/sys/kernel/random/uuid")
            return box.id


def test_log_and_replay(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    id = asyncio.run(story(home))
    assert main(["--home", str(home), "sandbox", "log", id]) == 0
    assert "echo hello; exit 4\texited 4" in capsys.readouterr().out
    assert main(["--home", str(home), "sandbox", "replay", id]) == FAULT
    out = capsys.readouterr().out
    assert "same     exec echo hello; exit 4" in out
    assert "(stdout)" in out
    assert "1 same, 1 differs, 0 skipped, 0 unknown" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["check", "nonsense"], "unknown sandbox backend 'nonsense'; choose namespace"),
        (["check", "namespace", "nonsense", "--rounds", "1"], "unknown check 'nonsense'"),
        (["check", "--settings", "[1]"], "--settings is no JSON object"),
        (["escape", "namespace", "nonsense"], "unknown attempt 'nonsense'"),
        (["log", "nothing"], "no log of a sandbox nothing"),
        (["replay", "../nothing"], "is no sandbox id"),
    ],
)
def test_errors_are_sentences(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert main(["--home", str(home), "sandbox", *arguments]) == USER
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("kind", [SandboxUnavailable, AdmissionRefused])
def test_a_host_that_cannot_is_told_in_a_sentence(kind: type[SandboxUnavailable]) -> None:
    error = AdmissionRefused("full", "sandboxes") if kind is AdmissionRefused else kind("full")
    assert explain(error) == (USER, "This host cannot run the sandbox: full.")
