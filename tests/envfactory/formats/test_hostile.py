"""Documents of strangers end in one sentence, whatever is in them, and leave nothing behind."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envfactory.formats import rows as row_files
from envfactory.formats.archives import unpack_tree
from envfactory.formats.fields import FormatError
from envfactory.formats.parcels import environment_image, unpack
from envfactory.formats.recipes import write_files
from envfactory.formats.registry import TASKS, TRAJECTORIES, task_format, trajectory_format
from envfactory.trees import File
from tests.envfactory.formats.made import bare

ROW = {
    "instance_id": "octo__calc-1",
    "repo": "octo/calc",
    "base_commit": "1" * 40,
    "patch": "",
    "test_patch": "",
    "problem_statement": "x",
    "FAIL_TO_PASS": ["t.py::a"],
    "PASS_TO_PASS": [],
}
DEEP = "[" * 100_000


def refused(name: str, path: Path) -> bool:
    """Whether the document is refused in one sentence; anything but FormatError fails the test."""
    try:
        list((TASKS | TRAJECTORIES)[name].read(path))  # pyright: ignore[reportOperatorIssue]
    except FormatError as error:
        return "\n" not in str(error) or pytest.fail(f"more than a sentence: {error}")
    return False


def sentence(error: pytest.ExceptionInfo[FormatError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 700
    return text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"instance_id": "../../etc/passwd"}, "an id consists of"),
        ({"instance_id": "a/b"}, "an id consists of"),
        ({"instance_id": ""}, "an id consists of"),
        ({"instance_id": "x" * 500}, "an id consists of"),
        ({"instance_id": "a\nb"}, "an id consists of"),
        ({"instance_id": None}, "instance_id must be a string"),
        ({"instance_id": 7}, "instance_id must be a string, and it is a number"),
        ({"patch": ["a"]}, "patch must be a string, and it is a list"),
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS is empty"),
        ({"FAIL_TO_PASS": "not json"}, "FAIL_TO_PASS is not JSON"),
        ({"FAIL_TO_PASS": DEEP}, "nested too deeply"),
        ({"FAIL_TO_PASS": {"a": 1}}, "must be a list of strings"),
        ({"FAIL_TO_PASS": ["a", "a"]}, "lists 'a' twice"),
        ({"PASS_TO_PASS": ["t.py::a"]}, "both in FAIL_TO_PASS and in PASS_TO_PASS"),
        ({"posttrain": "[]"}, "not an object of fields"),
        ({"posttrain": {"format": 99}}, "does not know"),
        ({"posttrain": {"format": 1, "task": {"id": 3}}}, "damaged"),
        ({"posttrain": {"format": 1, "task": "x"}}, "damaged"),
        ({"posttrain": {"format": 1, "foreign": [{"a": 1}]}}, "damaged"),
        ({"posttrain": {"format": 1, "setup": {"python": []}}}, "damaged"),
        ({"posttrain": {"format": 1, "workspace": "%%"}}, "not base64"),
        ({"posttrain": {"format": 1, "workspace": "AAAA"}}, "archive is damaged"),
        ({"posttrain": {"format": 1, "derived": 3}}, "not an object of fields"),
    ],
)
def test_rows_with_something_wrong(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | {"instance_id": "b-2"} | changes) + "\n")
    for name in ("swebench", "swe-rebench"):
        with pytest.raises(FormatError) as error:
            list(TASKS[name].read(path))
        assert words in sentence(error)
        assert "line 2" in str(error.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xfe\n", "not UTF-8"),
        (b'{"a": NaN}\n', "NaN"),
        (b'{"a": 1, "a": 2}\n', "the same key twice"),
        (b'{"a": "\\ud800"}\n', "not UTF-8"),
        (b"[1]\n", "not an object"),
        (b"{\n", "not JSON"),
        (DEEP.encode(), "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}\n", "not JSON"),
        ((json.dumps(ROW) + "\n").encode() * 2, "twice"),
        ((json.dumps(ROW) + "\n" + json.dumps(ROW | {"instance_id": "OCTO__calc-1"})).encode(), "twice"),
    ],
)
def test_files_that_are_no_rows(data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(data)
    with pytest.raises(FormatError) as error:
        list(TASKS["swebench"].read(tmp_path / "x.jsonl"))
    assert words in sentence(error)


def test_files_of_the_wrong_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1 but not really PAR1")
    (tmp_path / "x.txt").write_text("")
    (tmp_path / "x.jsonl").write_text(json.dumps(ROW))
    for name, words in (("x.parquet", "not a parquet"), ("x.txt", "none of"), ("empty", "no .parquet")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(FormatError, match=words):
            list(TASKS["swebench"].read(tmp_path / name))
    monkeypatch.setattr(row_files, "MAX_LINE", 10)
    with pytest.raises(FormatError, match="longer than"):
        list(TASKS["swebench"].read(tmp_path / "x.jsonl"))
    monkeypatch.setattr(row_files, "MAX_FILE", 10)
    with pytest.raises(FormatError, match="larger than"):
        list(TASKS["swebench"].read(tmp_path / "x.jsonl"))


def archive(*members: tuple[str, Callable[[tarfile.TarInfo], None]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, change in members:
            info = tarfile.TarInfo(name)
            change(info)
            tar.addfile(info, io.BytesIO(b"\0" * info.size))
    return buffer.getvalue()


def link(target: str, kind: bytes = tarfile.SYMTYPE) -> Callable[[tarfile.TarInfo], None]:
    def change(info: tarfile.TarInfo) -> None:
        info.type, info.linkname = kind, target

    return change


def device(info: tarfile.TarInfo) -> None:
    info.type = tarfile.CHRTYPE


def plain(info: tarfile.TarInfo) -> None:
    info.size = 1


@pytest.mark.parametrize(
    "member",
    [
        ("../evil", plain),
        ("/etc/passwd", plain),
        ("a/../../b", plain),
        ("link", link("/etc/passwd")),
        ("a/link", link("../../b")),
        ("hard", link("/etc/passwd", tarfile.LNKTYPE)),
        ("null", device),
    ],
)
def test_archives_stay_inside(member: tuple[str, Callable[[tarfile.TarInfo], None]]) -> None:
    with pytest.raises(FormatError) as error:
        unpack_tree(archive(("ok", plain), member), "x")
    sentence(error)


def test_archives_do_not_unfold_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    import envfactory.formats.archives as archives

    bomb = archive(("big", lambda info: setattr(info, "size", 3000)))
    monkeypatch.setattr(archives, "MAX_TREE", 1000)
    with pytest.raises(FormatError, match="unpacks to more"):
        unpack_tree(bomb, "x")
    monkeypatch.setattr(archives, "MAX_FILES", 1)
    with pytest.raises(FormatError, match="unpacks to more"):
        unpack_tree(archive(("a", plain), ("b", plain)), "x")


def test_a_repository_in_an_archive_is_left_out() -> None:
    assert set(unpack_tree(archive((".git/hooks/post-checkout", plain), ("a", plain)), "x")) == {"a"}


@pytest.mark.parametrize("name", ["harbor", "terminal-bench", "openenv", "swebench-v5"])
def test_folders_do_not_reach_out_through_links(name: str, tmp_path: Path) -> None:
    TASKS[name].write([bare()], tmp_path / "x")
    secret = tmp_path / "secret"
    secret.write_text("{}")
    files = [one for one in (tmp_path / "x").rglob("*") if one.is_file() and "calc-1" in str(one)]
    replaced = 0
    for file in files:
        kept = file.read_bytes()
        file.unlink()
        file.symlink_to(secret)
        if refused(name, tmp_path / "x"):
            replaced += 1
        else:
            (parcel,) = TASKS[name].read(tmp_path / "x")
            assert b"{}" not in (parcel.gold, parcel.tests, parcel.statement.encode())
        file.unlink()
        file.write_bytes(kept)
    assert replaced >= 3


@pytest.mark.parametrize("name", ["harbor", "terminal-bench", "openenv", "swebench-v5"])
def test_every_damaged_file_of_a_folder_is_a_sentence(name: str, tmp_path: Path) -> None:
    TASKS[name].write([bare()], tmp_path / "x")
    for file in [one for one in (tmp_path / "x").rglob("*") if one.is_file()]:
        kept = file.read_bytes()
        for damage in (b"", b"\xff\xfe\0", b"&a [*a, *a]", b"[x"):
            file.write_bytes(damage)
            refused(name, tmp_path / "x")
        file.write_bytes(kept)


def test_yaml_does_not_unfold_and_makes_no_objects(tmp_path: Path) -> None:
    TASKS["terminal-bench"].write([bare()], tmp_path / "x")
    file = tmp_path / "x/calc-1/task.yaml"
    for text, words in (
        ("a: &a [x]\nb: [*a, *a]\ninstruction: x\n", "aliases"),
        ("instruction: !!python/object/apply:os.system [id]\n", "not YAML"),
        ("[]", "not an object"),
    ):
        file.write_text(text)
        with pytest.raises(FormatError, match=words):
            list(TASKS["terminal-bench"].read(tmp_path / "x"))


def test_what_a_document_wants_installed_is_pinned_and_named(tmp_path: Path) -> None:
    from sandbox.images import ImageStore

    setup = bare().setup
    assert setup is not None
    images = ImageStore(tmp_path / "images")
    for changes in (
        {"requirements": ("--index-url=http://evil",)},
        {"requirements": ("pytest",)},
        {"requirements": ("x @ file:///etc",)},
        {"metadata": {"../../evil.pth": "import os"}},
        {"metadata": {"evil.pth": "import os"}},
        {"python": "2.7"},
    ):
        with pytest.raises(FormatError):
            environment_image(setup.model_copy(update=changes), tmp_path, images, "x")


def test_names_that_no_folder_may_have(tmp_path: Path) -> None:
    for path in ("../x", "/x", "a/../x", ".git/config", "a//b"):
        with pytest.raises(FormatError):
            write_files({path: File(b"")}, tmp_path)
    with pytest.raises(FormatError, match="an id consists of"):
        TASKS["harbor"].write([bare(id="../x")], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_stranger_is_not_unpacked_as_ours(tmp_path: Path) -> None:
    from catalog.blobs import Blobs
    from sandbox.images import ImageStore

    with pytest.raises(FormatError, match="--repo"):
        unpack(bare(), tmp_path, Blobs(tmp_path / "b"), ImageStore(tmp_path / "i"))


def test_unknown_formats_are_named() -> None:
    for call, name, words in (
        (task_format, "harbour", "Did you mean harbor"),
        (task_format, "atif", "runs export"),
        (trajectory_format, "harbor", "tasks export"),
        (trajectory_format, "ati", "Did you mean atif"),
    ):
        with pytest.raises(FormatError, match=words):
            call(name)


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
_keys = st.sampled_from([*ROW, "posttrain", "steps", "schema_version", "agent", "messages", "info", "extra"])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(_keys, _json, max_size=4))
def test_any_values_are_read_or_refused_in_a_sentence(changes: dict[str, Any], tmp_path: Path) -> None:
    atif = {"schema_version": "ATIF-v1.8", "agent": {"name": "a", "version": "1"}, "steps": []}
    mini = {"trajectory_format": "mini-swe-agent-1.1", "messages": [], "info": {}}
    cases = [
        ("swebench", ROW),
        ("swe-smith", ROW),
        ("swebench-v5", ROW),
        ("atif", atif),
        ("mini-swe-agent", mini),
    ]
    for name, document in cases:
        (tmp_path / "x.jsonl").write_text(json.dumps(document | changes))
        refused(name, tmp_path / "x.jsonl")
