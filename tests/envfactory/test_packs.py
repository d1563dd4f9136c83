import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfactory import git
from envfactory.packs import PackWriter
from envfactory.sanitize import problems
from envfactory.trees import File, changed, read_tree, write_tree

TREE = {
    "a.py": File(b"x = 1\n"),
    "a/b.py": File(b"y = 2\n"),
    "a/b c/ü.txt": File("é\n".encode()),
    "a-b": File(b""),
    "a.d/run.sh": File(b"#!/bin/sh\n", executable=True),
    "link": File(b"a/b.py", link=True),
    "long" * 30 + "/x": File(b"long name\n"),
}


def put(folder: Path, tree: dict[str, File], writer: PackWriter | None = None) -> Path:
    files = (writer or PackWriter()).repository(tree)
    write_tree(tree | {f".git/{path}": file for path, file in files.items()}, folder)
    return folder


def test_real_git_reads_the_repository_and_finds_it_whole(tmp_path: Path) -> None:
    tree = {path: file for path, file in TREE.items() if path != "a.py"} | {"top.py": File(b"x = 1\n")}
    folder = put(tmp_path / "w", tree)
    subprocess.run(["git", "fsck", "--full", "--strict"], cwd=folder, check=True, capture_output=True)
    assert problems(folder) == []
    assert git.read_commit(folder, "HEAD") == tree
    commits = git.log(folder, limit=9)
    assert [(c.parents, c.date) for c in commits] == [((), 946684800)]


def test_the_tree_id_is_the_one_that_git_computes(tmp_path: Path) -> None:
    folder = put(tmp_path / "w", TREE)
    ours = git.run(["rev-parse", "HEAD^{tree}"], folder)
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    assert git.run(["write-tree"], folder) == ours


def test_same_tree_same_bytes_and_nothing_of_an_earlier_tree_stays(tmp_path: Path) -> None:
    writer = PackWriter()
    first = writer.repository(TREE)
    other = changed(TREE, {"a/b.py": b"the fix = 3\n"})
    folder = put(tmp_path / "w", other, writer)
    assert git.unreachable_objects(folder / ".git") == (set(), 1)
    assert writer.repository(TREE) == first == PackWriter().repository(TREE)


@given(
    st.dictionaries(
        st.lists(st.text("ab.-é", min_size=1, max_size=3), min_size=1, max_size=3).map("/".join),
        st.binary(max_size=40),
        max_size=6,
    )
)
@settings(max_examples=25, deadline=None)
def test_any_tree_comes_back(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
    folders = {path.rsplit("/", i)[0] for path in files for i in range(1, path.count("/") + 1)}
    tree = {
        path: File(data)
        for path, data in files.items()
        if path not in folders and not {".", ".."} & set(path.split("/"))
    }
    folder = put(tmp_path_factory.mktemp("t") / "w", tree)
    assert read_tree(folder) == tree
    if tree:
        assert git.read_commit(folder, "HEAD") == tree
        assert problems(folder) == []
