"""Every format of tasks: out and back is the same, in this home and in another; nothing is half written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catalog.blobs import Blobs
from catalog.models import Status, Task
from catalog.store import Catalog
from envfactory.formats import recipes, swebench, swesmith
from envfactory.formats.base import Foreign, Parcel
from envfactory.formats.exchange import export_tasks, import_tasks
from envfactory.formats.fields import FormatError
from envfactory.formats.parcels import pack, unpack
from envfactory.formats.registry import TASKS
from sandbox.images import ImageStore
from tests.envfactory.formats.made import BUGGY, bare, make_report, make_task

PLACES = [
    *((name, ending) for name in ("swebench", "swe-smith", "swe-rebench") for ending in (".jsonl", ".json")),
    ("swebench", ".parquet"),
    ("swe-smith", ".parquet"),
    ("swe-rebench", ".parquet"),
    ("swebench-v5", ".jsonl"),
    ("swebench-v5", ".parquet"),
    *((name, "") for name in ("swebench-v5", "harbor", "terminal-bench", "openenv", "huggingface")),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageStore, Blobs, list[Task], list[Parcel]]:
    root = tmp_path_factory.mktemp("formats")
    images, blobs = ImageStore(root / "images"), Blobs(root / "blobs")
    tasks = sorted((make_task(images, blobs, root, number) for number in (1, 2)), key=lambda task: task.id)
    return images, blobs, tasks, [pack(task, blobs, images, make_report(task)) for task in tasks]


def test_a_task_that_lists_no_tests_is_not_exported(place: Any) -> None:
    """An empty list of tests would let everything pass in the peers' harnesses."""
    images, blobs, tasks, _ = place
    spec = tasks[0].verifier.model_copy(update={"kind": "state", "fail_to_pass": (), "expected": {}})
    with pytest.raises(FormatError, match="only pytest tasks are exported"):
        pack(tasks[0].model_copy(update={"verifier": spec}), blobs, images)


def test_every_format_of_the_registry_is_tested() -> None:
    assert {name for name, _ in PLACES} == set(TASKS)


@pytest.mark.parametrize(("name", "ending"), PLACES)
def test_out_and_back_is_the_same(name: str, ending: str, place: Any, tmp_path: Path) -> None:
    images, blobs, tasks, parcels = place
    format, path = TASKS[name], tmp_path / f"tasks{ending}"
    assert format.write(iter(parcels), path) == 2
    back = sorted(format.read(path), key=lambda parcel: parcel.id)
    assert back == parcels
    assert [unpack(parcel, tmp_path, blobs, images).task for parcel in back] == tasks
    with pytest.raises(FormatError, match="exists already"):
        format.write(iter(parcels), path)
    assert sorted(one.name for one in tmp_path.iterdir()) == [path.name]


@pytest.mark.parametrize(("name", "ending"), PLACES)
def test_a_task_that_cannot_be_written_leaves_nothing(
    name: str, ending: str, place: Any, tmp_path: Path
) -> None:
    twice = [*place[3], place[3][0]]
    with pytest.raises(FormatError, match="twice"):
        TASKS[name].write(iter(twice), tmp_path / f"tasks{ending}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "ending"), [one for one in PLACES if one[1] in (".jsonl", "")])
def test_what_strangers_said_comes_back_through_our_catalog(
    name: str, ending: str, place: Any, tmp_path: Path
) -> None:
    """A foreign field of another format rides along in every document, and is the task's after import."""
    images, blobs, tasks, parcels = place
    said = (
        Foreign(format="import", fields={"repo": "octo/calc"}),
        Foreign(format="elsewhere", fields={"x": [1, "é"]}),
    )
    path = tmp_path / f"tasks{ending}"
    TASKS[name].write([dataclasses.replace(parcels[0], foreign=said)], path)
    (back,) = TASKS[name].read(path)
    assert set(map(str, back.foreign)) == set(map(str, said))
    task = unpack(back, tmp_path, blobs, images).task
    assert task.foreign is not None
    assert task.model_copy(update={"foreign": None}) == tasks[0]
    again = pack(task, blobs, images)
    assert again.repo == "octo/calc"
    assert {one.format for one in again.foreign} == {"import", "elsewhere"}


@pytest.mark.parametrize(("name", "ending"), [("swebench", ".jsonl"), ("harbor", ""), ("terminal-bench", "")])
def test_an_edited_document_makes_another_task(name: str, ending: str, place: Any, tmp_path: Path) -> None:
    """Own fields of the format win over our extension; the gates are not inherited."""
    images, blobs, tasks, parcels = place
    path = tmp_path / f"tasks{ending}"
    TASKS[name].write(parcels[:1], path)
    texts = [path] if path.is_file() else list(path.rglob("instruction.md")) + list(path.rglob("task.yaml"))
    for text in texts:
        text.write_text(text.read_text().replace("is 5.", "is 6."))
    (back,) = TASKS[name].read(path)
    made = unpack(back, tmp_path, blobs, images)
    assert "is 6." in made.task.problem.statement
    assert made.task.id != tasks[0].id
    assert made.task.status is Status.DRAFT
    assert "changed after its export" in made.notes[-1]


async def test_import_enters_drafts_once_and_trusts_only_when_told(place: Any, tmp_path: Path) -> None:
    images, blobs, tasks, _ = place
    with Catalog.open(tmp_path / "one") as one:
        for task in tasks:
            one.put_task(task)
            one.put_report(make_report(task))
        source = Catalog(one._engine, one.home, blobs)  # pyright: ignore[reportPrivateUsage]
        assert export_tasks(tasks, source, images, "swebench", tmp_path / "x.jsonl")[0] == 2
    for trust, status in ((False, Status.DRAFT), (True, Status.ACCEPTED)):
        with Catalog.open(tmp_path / f"two{trust}") as two:
            first = await import_tasks(tmp_path / "x.jsonl", "swebench", two, images, trust=trust)
            assert [(done.fresh, done.task.status) for done in first] == [(True, status)] * 2
            report = two.find_report(tasks[0].id)
            assert report is not None
            assert bool(report.gates) is trust
            assert report.history[-1].actor == "importer"
            again = await import_tasks(tmp_path / "x.jsonl", "swebench", two, images)
            assert not any(done.fresh for done in again)
            assert two.find_report(tasks[0].id) == report


async def test_an_import_that_fails_in_the_middle_enters_nothing(place: Any, tmp_path: Path) -> None:
    images, _, _, parcels = place
    TASKS["swebench"].write(parcels, tmp_path / "x.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    rows[1]["test_patch"] = rows[1]["test_patch"].replace("b/tests/", "b/../tests/")
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Catalog.open(tmp_path / "home") as catalog:
        with pytest.raises(FormatError, match="test patch of"):
            await import_tasks(tmp_path / "x.jsonl", "swebench", catalog, images)
        assert not catalog.list_tasks()


def test_another_home_makes_the_environment_again(offline: None, place: Any, tmp_path: Path) -> None:
    """The workspace is the same, bit for bit."""
    _, _, tasks, parcels = place
    other, blobs = ImageStore(tmp_path / "images"), Blobs(tmp_path / "blobs")
    setup = parcels[0].setup.model_copy(update={"requirements": ()})
    made = unpack(dataclasses.replace(parcels[0], setup=setup), tmp_path / "home", blobs, other)
    assert made.task.environment.tree == tasks[0].environment.tree
    assert made.task.id == tasks[0].id
    assert made.notes == ("the environment was made again and differs from the exported one",)
    assert other.exists(made.task.environment.image)


# ---- rows of others -----------------------------------------------------------------------------------

_text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
_word = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
_ids = st.lists(_text.filter(lambda text: len(text) > 0), min_size=1, max_size=4, unique=True)
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_word, inner, max_size=3),
    max_leaves=6,
)
_columns = {"repo", "instance_id", "base_commit", "patch", "test_patch", "problem_statement", "posttrain"}
_columns |= {"hints_text", "created_at", "version", "environment_setup_commit", "image", "split", "datasets"}
_more = st.dictionaries(_word.filter(lambda name: name not in _columns), _json, max_size=3)


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    """A row as a stranger might write it."""
    tests = draw(_ids)
    cut = draw(st.integers(1, len(tests)))
    return draw(_more) | {
        "repo": "octo/calc",
        "instance_id": draw(st.from_regex(r"[a-z]{1,6}__[a-z]{1,6}-[0-9]{1,4}", fullmatch=True)),
        "base_commit": "1" * 40,
        "patch": draw(_text),
        "test_patch": draw(_text),
        "problem_statement": draw(_text),
        "hints_text": draw(_text),
        "created_at": "2024-01-01T00:00:00Z",
        "version": "1.0",
        "FAIL_TO_PASS": tests[:cut],
        "PASS_TO_PASS": tests[cut:],
        "environment_setup_commit": draw(st.sampled_from(["1" * 40, "2" * 40])),
    }


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=rows())
def test_foreign_rows_come_back_with_every_column(row: dict[str, Any], tmp_path: Path) -> None:
    for name in ("swebench", "swe-rebench"):
        for old in tmp_path.iterdir():
            old.unlink()
        (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
        (parcel,) = TASKS[name].read(tmp_path / "in.jsonl")
        assert parcel.task is None
        TASKS[name].write([parcel], tmp_path / "out.jsonl")
        back = json.loads((tmp_path / "out.jsonl").read_text())
        if name == "swebench":
            back |= {key: json.loads(back[key]) for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
        assert {key: back.get(key) for key in row} == row
        (again,) = TASKS[name].read(tmp_path / "out.jsonl")
        assert again == parcel


def test_foreign_smith_rows_come_back(tmp_path: Path) -> None:
    parcel = bare()
    row = {
        "instance_id": "octo__calc.1111abcd.func_pm_op_change__0a1b2c3d",
        "patch": swesmith.reverse(parcel.gold).decode(),
        "FAIL_TO_PASS": list(parcel.fail_to_pass),
        "PASS_TO_PASS": list(parcel.pass_to_pass),
        "image_name": "swebench/swesmith.x86_64.octo_1776_calc.1111abcd",
        "repo": "swesmith/octo__calc.1111abcd",
        "problem_statement": "",
        "strategy": "procedural",
    }
    (tmp_path / "in.json").write_text(json.dumps([row]))
    (read,) = TASKS["swe-smith"].read(tmp_path / "in.json")
    assert read.gold == parcel.gold
    assert read.repo == "octo/calc"
    assert TASKS["swe-smith"].write([read], tmp_path / "out.json") == 1
    assert json.loads((tmp_path / "out.json").read_text()) == [row]
    with pytest.raises(FormatError, match="--repo"):
        TASKS["swebench"].write([read], tmp_path / "x.jsonl")


def test_a_row_without_files_goes_into_no_folder(tmp_path: Path) -> None:
    parcel = dataclasses.replace(bare(), workspace=None)
    for name in ("harbor", "terminal-bench", "openenv"):
        with pytest.raises(FormatError, match="--repo"):
            TASKS[name].write([parcel], tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_ids_that_printed_lines_do_not_keep_are_reported() -> None:
    odd = bare(fail_to_pass=("t.py::a[x - y]", "t.py::b"), pass_to_pass=("t.py::c[two  blanks]",))
    (sentence,) = swebench.misread(odd)
    assert sentence.startswith("calc-1: 2 test ids that printed lines do not keep, in the lists")
    assert not swebench.misread(bare())


def test_ids_that_printed_lines_do_not_keep_are_left_out_of_the_lists_of_ours(
    place: Any, tmp_path: Path
) -> None:
    """A harness that collapses blanks would never count gold as resolved (seen with swebench 5.0.2)."""
    parcel = place[3][0]
    odd = "tests/test_calc.py::test_more[a  b]"
    for name in ("swebench", "swe-smith", "swe-rebench", "swebench-v5"):
        TASKS[name].write([parcel], tmp_path / f"{name}.jsonl")
        row = json.loads((tmp_path / f"{name}.jsonl").read_text())
        assert odd not in row["FAIL_TO_PASS"]
        assert "left out of the lists" in TASKS[name].misread(parcel)[0]
        (back,) = TASKS[name].read(tmp_path / f"{name}.jsonl")
        assert odd in back.fail_to_pass
        # Somebody edits the list: then it is what he says.
        row["PASS_TO_PASS"] = []
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
        (edited,) = TASKS[name].read(tmp_path / f"{name}.jsonl")
        assert edited.edited
        assert odd not in edited.fail_to_pass


def test_workspaces_keep_modes_links_and_bytes(tmp_path: Path) -> None:
    from envfactory.formats.archives import pack_tree, unpack_tree

    assert unpack_tree(pack_tree(BUGGY), "x") == BUGGY
    assert unpack_tree(recipes.workspace_archive(BUGGY), "x") == BUGGY
