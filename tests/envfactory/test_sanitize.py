import subprocess
from pathlib import Path

import pytest

from envfactory import git
from envfactory.packs import PackWriter
from envfactory.sanitize import clean, problems
from envfactory.trees import File, write_tree

TREE = {"pkg/__init__.py": File(b""), "pkg/core.py": File(b"x = 1\n"), "tests/test_core.py": File(b"")}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    files = PackWriter().repository(TREE)
    write_tree(TREE | {f".git/{path}": file for path, file in files.items()}, tmp_path / "w")
    return tmp_path / "w"


def test_caches_and_build_products_go_sources_stay() -> None:
    leftovers = (
        "pkg/__pycache__/core.cpython-311.pyc",
        "build/lib/pkg/core.py",
        "dist/pkg-1.0.tar.gz",
        "pkg.egg-info/SOURCES.txt",
        "src/pkg.egg-info/PKG-INFO",
        "PKG-INFO",
        ".tox/py/lib/x.py",
        "vendor/.git/HEAD",
        "vendor/.git",
        "core.py.orig",
    )
    stay = {"pkg/build/lib.py": File(b""), "docs/dist.md": File(b""), "tests/data/a.whl.txt": File(b"")}
    assert clean({path: File(b"") for path in leftovers} | stay) == stay


def test_a_sound_workspace_has_no_problem(workspace: Path) -> None:
    assert problems(workspace) == []


def hash_object(workspace: Path, data: bytes) -> str:
    return git.run(["hash-object", "-w", "--stdin"], workspace, stdin=data).decode().strip()


def loose_object(workspace: Path) -> None:
    hash_object(workspace, b"the fix\n")


def kept_pack(workspace: Path) -> None:
    oid = hash_object(workspace, b"the fix\n")
    pack = workspace / ".git/objects/pack/pack"
    name = git.run(["pack-objects", str(pack)], workspace, stdin=oid.encode()).decode().strip()
    Path(f"{pack}-{name}.keep").touch()
    subprocess.run(["git", "prune-packed"], cwd=workspace, check=True)


def alternate(workspace: Path) -> None:
    other = workspace.parent / "other"
    git.import_history(other, [({"fix.py": File(b"the fix\n")}, 1, "fix\n")])
    (workspace / ".git/objects/info").mkdir()
    (workspace / ".git/objects/info/alternates").write_text(f"{other}/objects\n")


def stray_head(workspace: Path) -> None:
    (workspace / ".git/ORIG_HEAD").write_text("0" * 40 + "\n")


def tag(workspace: Path) -> None:
    git.run(["tag", "v1"], workspace)


def second_commit(workspace: Path) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    git.run(
        [*identity, "-c", "core.logAllRefUpdates=false", "commit", "-q", "--allow-empty", "-m", "fix"],
        workspace,
    )


def reflog(workspace: Path) -> None:
    (workspace / ".git/logs").mkdir()
    (workspace / ".git/logs/HEAD").write_text("")


def changed_file(workspace: Path) -> None:
    (workspace / "pkg/core.py").write_text("x = 2\n")


def stale_bytecode(workspace: Path) -> None:
    (workspace / "pkg/__pycache__").mkdir()
    (workspace / "pkg/__pycache__/core.cpython-311.pyc").write_bytes(b"old")


LEAKS = [
    (loose_object, "1 objects are not reachable"),
    (kept_pack, ".keep must not be there"),
    (alternate, "alternates can lead"),
    (stray_head, "ORIG_HEAD can lead"),
    (tag, "refs/tags/v1 is a ref"),
    (second_commit, "HEAD is not the only commit"),
    (reflog, "logs/HEAD must not"),
    (changed_file, "the files differ"),
    (stale_bytecode, "leftover pkg/__pycache__"),
]


@pytest.mark.parametrize(("leak", "words"), LEAKS, ids=[leak.__name__ for leak, _ in LEAKS])
def test_every_way_to_keep_the_fix_is_found(workspace: Path, leak, words: str) -> None:
    leak(workspace)
    assert any(words in line for line in problems(workspace))


def test_objects_in_a_kept_pack_and_an_alternate_are_counted_as_unreachable(workspace: Path) -> None:
    kept_pack(workspace)
    alternate(workspace)
    beyond, commits = git.unreachable_objects(workspace / ".git")
    assert (len(beyond), commits) == (3, 2)  # blob, tree and commit; the kept blob is the same one
