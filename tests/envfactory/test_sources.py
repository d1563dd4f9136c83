import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from envfactory import git
from envfactory.errors import NoSpace, SourceError
from envfactory.index import PackageIndex, pip_settings
from envfactory.sdist import unpack
from envfactory.sources import Limits, open_source
from envfactory.sources.base import new_folder
from envfactory.sources.pypi import PypiSource
from tests.envfactory.packages import repository, sdist, simple_index, tiny


def index(tmp_path: Path, releases: dict[str, str] | None = None, attributes: str = "") -> PackageIndex:
    """An index of tinysum with these versions (version to file name)."""
    versions = releases or {v: f"tinysum-{v}.tar.gz" for v in ("1.0", "1.10", "1.9", "2.0rc1")}
    files = [(name, sdist("tinysum", version, tiny(version))) for version, name in versions.items()]
    return PackageIndex({"index-url": simple_index(tmp_path, {"tinysum": files}, attributes)})


def test_releases_become_commits_in_order_of_version(tmp_path: Path) -> None:
    history = PypiSource("tinysum", Limits(), index(tmp_path)).fetch(tmp_path / "home")
    assert [revision.name for revision in history.revisions] == ["1.0", "1.9", "1.10"]
    assert (history.name, history.kind, history.pinned) == ("tinysum", "release", "pypi:tinysum==1.10")
    tree = history.tree(history.newest)
    assert tree["tinysum/__init__.py"].data == b'__version__ = "1.10"\n'
    assert [c.date for c in git.log(history.repository, limit=9)] == [1_000_000_000] * 3


def test_the_same_releases_make_the_same_commits_and_a_second_fetch_reads_nothing(tmp_path: Path) -> None:
    one = PypiSource("tinysum", Limits(), index(tmp_path)).fetch(tmp_path / "one")
    two = PypiSource("Tiny-Sum".replace("-", ""), Limits(), index(tmp_path)).fetch(tmp_path / "two")
    assert one.revisions == two.revisions
    told: list[str] = []
    again = PypiSource("tinysum", Limits(), index(tmp_path)).fetch(tmp_path / "one", told.append)
    assert (again, told) == (one, [])


def test_a_version_is_the_newest_one_and_the_cap_holds(tmp_path: Path) -> None:
    source = PypiSource("tinysum==1.9", Limits(releases=1), index(tmp_path))
    assert [revision.name for revision in source.fetch(tmp_path / "home").revisions] == ["1.9"]


@pytest.mark.parametrize(
    ("requirement", "words"),
    [
        ("no-such-thing", "package no-such-thing does not exist on a local folder: check the spelling"),
        ("tinysum==7", "no source distribution of 7"),
        ("tinysum==x y", "is no version"),
        ("../up", "is no package name"),
        ("", "is no package name"),
    ],
)
def test_a_wrong_name_is_one_sentence(tmp_path: Path, requirement: str, words: str) -> None:
    with pytest.raises(SourceError, match=words) as caught:
        PypiSource(requirement, Limits(), index(tmp_path)).fetch(tmp_path / "home")
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "home").exists()


def test_releases_for_another_python_or_withdrawn_ones_are_no_choice(tmp_path: Path) -> None:
    later = index(tmp_path, {"1.0": "tinysum-1.0.tar.gz"}, ' data-requires-python="&gt;=9"')
    with pytest.raises(SourceError, match="for Python"):
        PypiSource("tinysum", Limits(), later).fetch(tmp_path / "home")
    yanked = index(tmp_path, {"1.0": "tinysum-1.0.tar.gz"}, ' data-yanked="bad"')
    with pytest.raises(SourceError, match="no source distribution at all"):
        PypiSource("tinysum", Limits(), yanked).fetch(tmp_path / "home")


def test_a_package_without_tests_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    files = {path: text for path, text in tiny("1.0").items() if not path.startswith("tests/")}
    address = simple_index(tmp_path, {"tinysum": [("tinysum-1.0.tar.gz", sdist("tinysum", "1.0", files))]})
    with pytest.raises(SourceError, match="ships no tests: give the package's git repository"):
        PypiSource("tinysum", Limits(), PackageIndex({"index-url": address})).fetch(tmp_path / "home")
    assert not (tmp_path / "home/sources").exists()


def test_a_file_with_another_hash_is_refused(tmp_path: Path) -> None:
    found = index(tmp_path)
    (tmp_path / "simple/tinysum/tinysum-1.10.tar.gz").write_bytes(b"other")
    with pytest.raises(SourceError, match="does not have the hash"):
        PypiSource("tinysum", Limits(), found).fetch(tmp_path / "home")


def test_a_full_disk_is_told_before_anything_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(NoSpace, match="MiB free"):
        PypiSource("tinysum", Limits(free_mb=1 << 40), index(tmp_path)).fetch(tmp_path / "home")
    assert list((tmp_path / "home").iterdir()) == []


def tar_with(name: str, *, link: str | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for path in ("p-1/a.py", name):
            info = tarfile.TarInfo(path)
            if link and path == name:
                info.type, info.linkname = tarfile.SYMTYPE, link
            tar.addfile(info, io.BytesIO(b""))
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["p-1/../../etc/x", "/etc/x", "p-1/.git/config"])
def test_an_archive_that_leaves_its_folder_is_refused(name: str) -> None:
    with pytest.raises(SourceError, match="leaves it"):
        unpack("p-1.tar.gz", tar_with(name))


@pytest.mark.parametrize(("link", "kept"), [("a.py", True), ("../../x", False), ("/etc/passwd", False)])
def test_links_stay_only_inside(link: str, kept: bool) -> None:
    tree, _ = unpack("p-1.tar.gz", tar_with("p-1/d/l", link=link))
    assert ("d/l" in tree) is kept


def test_zips_are_read_and_damaged_archives_are_told() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("p-1/a.py", "x = 1\n")
    assert unpack("p-1.zip", buffer.getvalue())[0]["a.py"].data == b"x = 1\n"
    for name in ("p-1.tar.gz", "p-1.zip"):
        with pytest.raises(SourceError, match="is damaged"):
            unpack(name, b"no archive at all")


def test_json_pages_are_read(tmp_path: Path) -> None:
    from envfactory.index import _json_page

    row = {
        "filename": "a-1.tar.gz",
        "url": "../f/a-1.tar.gz",
        "hashes": {"sha256": "0" * 64},
        "yanked": "why",
    }
    page = json.dumps({"files": [row | {"requires-python": ">=3", "upload-time": "2026-01-02T03:04:05Z"}]})
    (file,) = _json_page(page.encode(), "https://host/simple/a/")
    assert (file.url, file.yanked, file.requires_python) == ("https://host/simple/f/a-1.tar.gz", True, ">=3")


def test_settings_come_from_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = https://user:secret@mirror.example/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "file:///a file:///b")
    found = PackageIndex(pip_settings() | {"cert": ""})
    assert found.urls == ["https://user:secret@mirror.example/simple", "file:///a", "file:///b"]


def test_an_unreachable_index_is_one_sentence_without_the_password(tmp_path: Path) -> None:
    closed = PackageIndex({"index-url": "http://user:secret@127.0.0.1:9/simple"}, timeout=2)
    with pytest.raises(SourceError, match=r"cannot reach 127\.0\.0\.1") as caught:
        PypiSource("tinysum", Limits(), closed).fetch(tmp_path / "home")
    assert "secret" not in str(caught.value)


def test_a_repository_keeps_its_newest_commits(tmp_path: Path) -> None:
    states = [(tiny(f"1.{i}"), f"Commit {i}\n\nBody") for i in range(6)]
    folder = repository(tmp_path / "Tiny_Sum", states)
    history = open_source(str(folder), Limits(commits=3)).fetch(tmp_path / "home")
    assert [revision.message.splitlines()[0] for revision in history.revisions] == [
        f"Commit {i}" for i in (2, 3, 4, 5)
    ]
    assert (history.kind, history.name) == ("commit", "tiny-sum")
    assert history.tree(history.newest)["tinysum/__init__.py"].data == b'__version__ = "1.5"\n'
    assert open_source(str(folder), Limits(commits=3)).fetch(tmp_path / "home") == history
    pinned = open_source(f"{folder}@{history.revisions[-2].commit}", Limits(commits=3)).fetch(
        tmp_path / "home"
    )
    assert pinned.newest.commit == history.revisions[-2].commit


def test_hooks_of_a_cloned_repository_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = tmp_path / "template/hooks"
    template.mkdir(parents=True)
    for name in ("post-checkout", "reference-transaction"):
        (template / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        (template / name).chmod(0o755)
    monkeypatch.setenv("GIT_TEMPLATE_DIR", str(tmp_path / "template"))
    folder = repository(tmp_path / "repo", [(tiny(), "one")])
    (tmp_path / "ran").unlink(missing_ok=True)
    open_source(str(folder)).fetch(tmp_path / "home")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ext::sh -c id", "is no folder"),
        ("ext://x/y", "ext:// addresses are not accepted"),
        ("--upload-pack=touch x", "is no folder"),
        ("no/such/folder", "is no folder: give a git repository's path, its URL, or pypi:NAME"),
    ],
)
def test_other_addresses_are_refused(tmp_path: Path, address: str, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        open_source(address).fetch(tmp_path / "home")


def test_folders_that_are_no_use_are_told_why(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    with pytest.raises(SourceError, match="cannot read"):
        open_source(str(tmp_path / "plain")).fetch(tmp_path / "home")
    empty = repository(tmp_path / "empty", [])
    with pytest.raises(SourceError, match="no commit yet"):
        open_source(str(empty)).fetch(tmp_path / "home")
    modules = repository(tmp_path / "modules", [(tiny() | {".gitmodules": "[submodule]\n"}, "one")])
    with pytest.raises(SourceError, match="has git submodules"):
        open_source(str(modules)).fetch(tmp_path / "home")
    assert list((tmp_path / "home/sources").iterdir()) == []


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def interrupted() -> None:
        with new_folder(tmp_path / "d/final") as folder:
            (folder / "half").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list((tmp_path / "d").iterdir()) == []
    for text in ("first", "second"):
        with new_folder(tmp_path / "d/final") as folder:
            (folder / "whole").write_text(text)
    assert [(p.name, (p / "whole").read_text()) for p in (tmp_path / "d").iterdir()] == [("final", "first")]
