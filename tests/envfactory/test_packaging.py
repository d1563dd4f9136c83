import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from catalog.blobs import Blobs
from catalog.models import Origin, TestStatus
from envfactory.build import Build, build
from envfactory.packaging import Draft, Packager, diff, protected, workspace
from envfactory.sources import open_source
from envfactory.trees import File
from sandbox.base import SandboxProvider, SandboxSpec
from sandbox.images import ImageStore
from tests.envfactory.packages import CORE, repository, tiny
from verifiers.grading import Grader

BUG = CORE.replace("max(low,", "min(low,").encode()
FILE = "tests/test_core.py"


def draft_of(made: Build) -> Draft:
    failing = (
        f"{FILE}::test_clamp",
        f"{FILE}::TestClamp::test_inside[3]",
        f"{FILE}::TestClamp::test_inside[5]",
    )
    return Draft(
        origin=Origin(
            kind="procedural", source="tinysum", revision="1.0", path="tinysum/core.py", function="clamp"
        ),
        slug="tinysum-clamp",
        base=made.tree,
        start={"tinysum/core.py": BUG},
        solved={"tinysum/core.py": CORE.encode()},
        fail_to_pass=failing,
        pass_to_pass=tuple(test for test in made.suite.passing if test not in failing and "low" not in test),
        expected=made.suite.statuses,
        arguments=(FILE,),
        visible=failing[:1],
        statement="Mend clamp.",
    )


@pytest.fixture
async def made(
    tmp_path: Path, home: Path, images: ImageStore, sandboxes: SandboxProvider, offline: None
) -> Build:
    history = open_source(str(repository(tmp_path / "tinysum", [(tiny(), "Start")]))).fetch(home)
    return await build(history, home, sandboxes, images)


async def test_a_task_shows_the_bug_and_one_test_and_nothing_else(
    made: Build, home: Path, images: ImageStore, sandboxes: SandboxProvider
) -> None:
    blobs = Blobs(home / "blobs")
    task = Packager(made, images, blobs).package(draft_of(made))
    async with await sandboxes.create(SandboxSpec(image=task.environment.image)) as sandbox:
        run = await sandbox.exec(
            "python -m pytest -q 2>&1 | tail -3; git status --short; git log --oneline --all"
        )
        lines = run.stdout.decode().splitlines()
        assert "1 failed" in " ".join(lines)
        assert "passed" not in " ".join(lines)
        assert lines[-1].endswith("Initial commit")
        assert not any(line.startswith((" M", "??")) for line in lines)
        every = "git cat-file --batch-all-objects --batch | cat - $(git ls-files)"
        objects = f"{every} | grep -c 'max(low\\|test_inside'"
        assert (await sandbox.exec(objects)).stdout == b"0\n"
    with tarfile.open(fileobj=io.BytesIO(blobs.get(task.verifier.protected))) as tar:
        assert tar.getnames() == ["pyproject.toml", FILE]
    assert task.verifier.allowed == ("tinysum/",)
    async with Grader(sandboxes, images, blobs) as grader:
        gold = await grader.grade(task, blobs.get(task.solution))
        nothing = await grader.grade(task, b"")
    assert (gold.reward, nothing.reward) == (1.0, 0.0), gold.evidence


async def test_the_same_draft_gives_the_same_task_in_another_home(
    made: Build, images: ImageStore, tmp_path: Path
) -> None:
    first = Packager(made, images, Blobs(tmp_path / "one")).package(draft_of(made))
    packager = Packager(made, ImageStore(images.root), Blobs(tmp_path / "two"))
    assert packager.package(draft_of(made)) == packager.package(draft_of(made)) == first


def test_diffs_apply_whatever_changes(tmp_path: Path) -> None:
    before = {
        "pkg/a.py": File(b"one\ntwo\n"),
        "pkg/gone.py": File(b"x\n"),
        "pkg/data.bin": File(bytes(range(256))),
        "pkg/sp ace.py": File(b"no newline"),
        "same.py": File(b"same\n"),
    }
    after = {
        "pkg/a.py": File(b"one\n2\n"),
        "pkg/new/file.py": File(b"new\n", executable=True),
        "pkg/data.bin": File(bytes(range(255, -1, -1))),
        "pkg/sp ace.py": File(b"no newline either"),
        "same.py": File(b"same\n"),
    }
    patch = diff(before, after)
    for path, file in before.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(file.data)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch, check=True)
    found = {
        p.relative_to(tmp_path).as_posix()
        for p in tmp_path.rglob("*")
        if p.is_file() and ".git/" not in str(p)
    }
    assert found == set(after)
    assert all((tmp_path / path).read_bytes() == file.data for path, file in after.items())
    assert diff(before, before) == b""


def test_hidden_test_files_stay_away_and_their_data_come_along() -> None:
    base = {
        "p/__init__.py": File(b""),
        "tests/test_a.py": File(b"def test_one():\n    pass\n"),
        "tests/test_other.py": File(b"def test_free():\n    pass\n"),
        "tests/link": File(b"test_a.py", link=True),
        "conftest.py": File(b""),
    }
    draft = Draft(
        origin=Origin(kind="release", source="p", revision="1"),
        slug="p",
        base=base,
        start={},
        solved={"p/__init__.py": b"x = 1\n"},
        fail_to_pass=("tests/test_new.py::test_x",),
        pass_to_pass=(),
        expected={"tests/test_new.py::test_x": TestStatus.PASSED},
        arguments=("tests/test_a.py", "tests/test_new.py"),
        visible=("tests/test_new.py::test_x",),
        statement="",
        tests={
            "tests/test_new.py": b"def test_x():\n    pass\n\n\ndef test_hidden():\n    secret = 1\n",
            "tests/data.txt": b"1\n",
        },
    )
    tree = workspace(draft)
    assert set(tree) == {
        "p/__init__.py",
        "tests/test_new.py",
        "tests/test_other.py",
        "tests/link",
        "tests/data.txt",
        "conftest.py",
    }
    assert tree["tests/test_new.py"].data == b"def test_x():\n    pass\n"
    assert set(protected(draft)) == {
        "conftest.py",
        "tests/data.txt",
        "tests/test_a.py",
        "tests/test_new.py",
        "tests/test_other.py",
    }
