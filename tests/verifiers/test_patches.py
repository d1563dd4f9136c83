"""Diffs applied and made, with git as it is installed here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers import patches
from verifiers.patches import Applied, PatchRefused, SourceFile, make_diff

FILES = {
    "p/one.py": b"x = 1\ny = 2\n",
    "p/crlf.txt": b"a\r\nb\r\n",
    "p/data.bin": bytes(range(256)),
    "q.txt": b"q\n",
}


def apply(diff: bytes, allowed=None, files=FILES, executable=()) -> Applied:
    def read(name: str) -> SourceFile | None:
        return SourceFile(files[name], name in executable) if name in files else None

    return patches.apply(diff, read, allowed)


def test_a_diff_brings_what_it_was_made_from():
    after = {
        "p/one.py": b"x = 1\ny = 3",
        "p/crlf.txt": b"a\r\nc\r\n",
        "p/data.bin": bytes(reversed(range(256))),
        "p/new é 'x'.py": b"",
    }
    diff = make_diff(FILES, after)
    assert diff == make_diff(FILES, after)
    assert apply(diff) == Applied({**after, "q.txt": None}, frozenset())


part = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=6).filter(
    lambda text: text not in (".", "..") and text.lower() not in (".git", ".gitmodules", ".gitattributes")
    and not text.lower().startswith(("git~", ".git")) and len(text.encode()) < 100
)  # fmt: skip
trees = st.dictionaries(
    st.builds("d/{}".format, part), st.binary(max_size=60) | st.text(max_size=60).map(str.encode)
)


@given(trees, trees)
@settings(max_examples=15, deadline=None)
def test_any_two_trees_make_a_diff_that_applies(before, after):
    expected = {name: data for name, data in after.items() if before.get(name) != data}
    expected |= dict.fromkeys(set(before) - set(after))
    assert apply(make_diff(before, after), ["d"], before).files == expected


@given(st.binary(max_size=200) | st.text(alphabet="diff-git+@ab/\n 0123,", max_size=120).map(str.encode))
@settings(max_examples=40, deadline=None)
def test_junk_is_refused_with_a_sentence(junk):
    try:
        applied = apply(junk, ["p"])
    except PatchRefused as refused:
        reason = str(refused)
        assert reason
        assert "\n" not in reason
    else:
        assert set(applied.files) <= {name for name in applied.files if name.startswith("p")}


def git_diff(tmp_path: Path, *commands: str) -> bytes:
    """`git diff` of FILES after some shell commands, as an agent would hand it in."""
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    script = " && ".join(
        [
            "git init -q . && git add -A && git -c user.name=x -c user.email=x commit -qm x",
            *commands,
            "git add -A && git diff --cached --binary -M",
        ]
    )
    return subprocess.run(["sh", "-c", script], cwd=tmp_path, check=True, capture_output=True).stdout


def test_renames_and_modes(tmp_path):
    diff = git_diff(tmp_path, "git mv p/one.py p/two.py", "chmod +x q.txt")
    assert b"rename from" in diff
    assert b"new mode 100755" in diff
    assert apply(diff) == Applied(
        {"p/one.py": None, "p/two.py": FILES["p/one.py"], "q.txt": b"q\n"}, frozenset({"q.txt"})
    )
    with pytest.raises(PatchRefused, match=r"'p/one.py', outside of p/two.py, q.txt"):
        apply(diff, ["p/two.py", "q.txt"])
    with pytest.raises(PatchRefused, match=r"touches 'q.txt', outside of p"):
        apply(diff, ["p"])


def test_links_submodules_and_pointers_are_refused(tmp_path):
    with pytest.raises(PatchRefused, match="symbolic link"):
        apply(git_diff(tmp_path, "ln -s /etc/passwd p/link"))
    module = b"diff --git a/m b/m\nnew file mode 160000\nindex 0000000..1111111\n--- /dev/null\n+++ b/m\n"
    with pytest.raises(PatchRefused, match="submodule"):
        apply(module + b"@@ -0,0 +1 @@\n+Subproject commit 1111111111111111111111111111111111111111\n")
    with pytest.raises(PatchRefused, match="LFS"):
        apply(make_diff({}, {"p/big": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"}))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("../x", "not a path inside"),
        ("p/../../x", "not a path inside"),
        ("p/.git/config", "how git itself"),
        (".gitattributes", "how git itself"),
        ("pp/x", "outside of p"),
    ],
)
def test_paths_that_leave_are_refused(path, reason):
    diff = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    diff += "@@ -0,0 +1 @@\n+x\n"
    with pytest.raises(PatchRefused, match=reason):
        apply(diff.encode(), ["p"])


def test_a_diff_that_does_not_fit_changes_nothing():
    diff = make_diff({"p/one.py": b"other\n"}, {"p/one.py": b"new\n"})
    with pytest.raises(PatchRefused, match="git cannot apply"):
        apply(diff)
    with pytest.raises(PatchRefused, match="more than"):
        apply(b"x" * (9 << 20))
    assert apply(b"") == apply(b"\n") == Applied({}, frozenset())


def test_prefixes_are_folders_not_letters():
    assert patches.is_allowed("pkg/a.py", ["pkg"])
    assert patches.is_allowed("pkg/a.py", ["pkg/"])
    assert patches.is_allowed("six.py", ["six.py"])
    assert patches.is_allowed("anything", ["."])
    assert not patches.is_allowed("pkg2/a.py", ["pkg"])
    assert not patches.is_allowed("pkg/a.py", [])
