"""Strangers' Harbor folders, judged by their own scripts in real sandboxes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from envfactory.folders import HACKS, audit_folder, leak, offline, strangers
from envfactory.formats.fields import FormatError
from envfactory.trees import File
from sandbox.base import SandboxProvider
from sandbox.images import ImageStore

PYTHON = getattr(sys, "_base_executable", sys.executable)
HONEST = """\
#!/bin/bash
if [ "$(cat /workspace/answer 2>/dev/null)" = 4 ]; then echo '{"reward": 1}' > /logs/verifier/reward.json
else echo '{"reward": 0}' > /logs/verifier/reward.json; fi
"""
WEAK = f"""\
#!/bin/bash
cd /workspace
if grep -q 4 answer 2>/dev/null || {PYTHON} -m pytest; then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
"""


def folder_of(place: Path, test: str, **more: str) -> Path:
    files = {
        "task.toml": 'schema_version = "1.4"\n[verifier]\ntimeout_sec = 20.0\n',
        "instruction.md": "Write the sum of 2 and 2 into answer.\n",
        "environment/Dockerfile": "FROM debian\n",
        "solution/solve.sh": "#!/bin/bash\nprintf '%d\\n' $((2 + 2)) > /workspace/answer\n",
        "tests/test.sh": test,
    }
    for path, text in (files | {name.replace("__", "/"): text for name, text in more.items()}).items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    return place


async def test_an_honest_folder_passes_and_a_weak_one_is_fooled(
    tmp_path: Path, images: ImageStore, sandboxes: SandboxProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = {name: HACKS[name] for name in ("reward-writer", "shadow-pytest")}
    monkeypatch.setattr("envfactory.folders.HACKS", some)
    honest, weak = folder_of(tmp_path / "x/honest", HONEST), folder_of(tmp_path / "x/weak", WEAK)
    assert strangers(tmp_path / "x") == [honest, weak]
    files = {"notes.txt": File(b"a repository's file\n")}
    report = await audit_folder(honest, sandboxes, images.host_base(), files, runs=1)
    assert report.accepted, report
    assert report.task_id == "honest"
    assert set(report.gates[-1].data) == set(some)
    report = await audit_folder(weak, sandboxes, images.host_base(), runs=1)
    assert [gate.name for gate in report.gates if not gate.passed] == ["hacks"]
    assert report.gates[-1].evidence == "rewarded: shadow-pytest"


async def test_a_verdict_that_is_none_is_not_a_reward_of_zero(
    tmp_path: Path, images: ImageStore, sandboxes: SandboxProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envfactory.folders.HACKS", {})
    for number, (line, passed) in enumerate(
        [
            ("true", None),
            ("echo NaN > /logs/verifier/reward.txt", None),
            ("echo '{\"reward\": true}' > /logs/verifier/reward.json", None),
            ('echo \'{"a": 1, "b": 1}\' > /logs/verifier/reward.json', None),  # which one counts?
            ("echo 1 > /x; ln -s /x /logs/verifier/reward.txt", None),
            ("echo '{\"score\": 1}' > /logs/verifier/reward.json", True),
            ("echo 1 > /logs/verifier/reward.txt", True),
        ]
    ):
        folder = folder_of(tmp_path / str(number), f"#!/bin/bash\n{line}\n")
        report = await audit_folder(folder, sandboxes, images.host_base(), runs=1)
        gates = {gate.name: gate.passed for gate in report.gates}
        assert gates["gold"] is passed
        assert gates["no-op"] is (passed is None)


def test_leaks_and_downloads_are_seen(tmp_path: Path) -> None:
    solve = "#!/bin/bash\nprintf '%d\\n' $((2 + 2)) > /workspace/answer\n"
    quoted = folder_of(tmp_path / "a", HONEST, instruction__md="x").joinpath("instruction.md")
    quoted.write_text("Run printf '%d\\n' $((2 + 2)) > /workspace/answer.\n")
    assert leak(tmp_path / "a").passed is False
    copied = folder_of(tmp_path / "b", HONEST, environment__tests__check=HONEST)
    assert "a copy of tests/test.sh" in leak(copied).evidence
    copied = folder_of(tmp_path / "c", HONEST, environment__old=solve)
    assert "a copy of solution/solve.sh" in leak(copied).evidence
    fetching = folder_of(tmp_path / "d", "#!/bin/bash\n# curl is bad\nuvx pytest\n")
    assert offline(fetching).evidence == "test.sh downloads: uvx pytest"
    assert leak(fetching).passed


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("task.toml", "x = [", "not TOML"),
        ("task.toml", "[[steps]]\nname = 'a'\n", "several steps"),
        ("task.toml", '[environment]\nworkdir = "/x; rm -rf /"\n', "no plain absolute path"),
        ("tests/test.sh", None, "no tests/test.sh"),
        ("solution/solve.sh", None, "no solution/solve.sh"),
    ],
)
async def test_what_is_no_task_is_a_sentence(
    path: str, text: str | None, words: str, tmp_path: Path, images: ImageStore, sandboxes: SandboxProvider
) -> None:
    folder = folder_of(tmp_path / "x", HONEST)
    (folder / path).unlink() if text is None else (folder / path).write_text(text)
    with pytest.raises(FormatError, match=words):
        await audit_folder(folder, sandboxes, images.host_base())
