"""A workspace that gives nothing away: no caches, no leftovers, one commit, no object beyond it.

`clean` works on trees before anything is written; `problems` looks at a finished workspace and asks the
real git. Histories that merely look clean have been found to keep the fix in packs marked `.keep`, in
alternates, in reflogs and in stray heads, so all of these are looked for.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from envfactory import git
from envfactory.trees import File, Tree

_FOLDERS = {
    "__pycache__",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    ".hypothesis",
    ".tox",
    ".nox",
    ".venv",
    "venv",
    ".eggs",
    "node_modules",
    "htmlcov",
    ".idea",
    ".vscode",
    ".git",
    ".hg",
    ".svn",
    "__MACOSX",
}
_FILES = re.compile(
    r"(?:.*\.(?:pyc|pyo|orig|rej|swp|egg|whl)|\.coverage(?:\..*)?|coverage\.xml|\.DS_Store|PKG-INFO)"
)
_BUILT = re.compile(
    r"(?:build/(?:lib|bdist|temp)[^/]*/.*|dist/.*|[^/]*\.egg-info/.*|(?:src|lib)/[^/]*\.egg-info/.*)"
)


def clean(tree: Tree) -> dict[str, File]:
    """The tree without caches, build products, editor files and repositories inside."""
    return {path: file for path, file in tree.items() if not is_leftover(path)}


def is_leftover(path: str) -> bool:
    """Whether a path is no part of the source: a cache, a product of building, a nested repository."""
    *folders, name = path.split("/")
    if any(folder in _FOLDERS for folder in folders) or name in _FOLDERS:
        return True
    return bool(_FILES.fullmatch(name) or _BUILT.fullmatch(path))


def problems(workspace: Path) -> list[str]:
    """What a workspace on disk could leak, one line each; empty when it is sound.

    Checks that HEAD is a root commit, that the object store holds nothing that HEAD does not reach, that
    no other ref, reflog, alternate, kept pack, hook, module or `*_HEAD` exists, that the working tree
    equals the commit, and that no cache lies about.
    """
    found = [f"leftover {path}" for path in _walk(workspace) if is_leftover(path)]
    folder = workspace / ".git"
    if not folder.is_dir() or folder.is_symlink():
        return [*found, "the workspace has no .git folder of its own"]
    inside = [place.relative_to(folder).as_posix() for place in folder.rglob("*") if not place.is_dir()]
    for path in inside:
        name = path.rpartition("/")[2]
        if name.endswith("_HEAD") or name in (
            "alternates",
            "http-alternates",
            "packed-refs",
            "shallow",
            "grafts",
        ):
            found.append(f".git/{path} can lead to other objects")
        elif path.startswith(("logs/", "modules/", "lfs/", "worktrees/", "hooks/")) or name.endswith(
            (".keep", ".bundle")
        ):
            found.append(f".git/{path} must not be there")
        elif path.startswith("refs/") and path != "refs/heads/main":
            found.append(f".git/{path} is a ref besides the branch")
    try:
        beyond, commits = git.unreachable_objects(folder)
        if commits != 1:
            found.append("HEAD is not the only commit")
        if beyond:
            found.append(f"{len(beyond)} objects are not reachable from HEAD, {sorted(beyond)[0]} among them")
        place = [f"--git-dir={folder}", f"--work-tree={workspace}"]
        if changed := git.run([*place, "status", "--porcelain", "--ignored", "-z"], workspace):
            found.append(
                f"the files differ from the commit: {changed.split(bytes(1))[0].decode(errors='replace')}"
            )
    except git.GitFailed as error:
        found.append(f"git cannot read the repository: {error}")
    return found


def _walk(workspace: Path) -> list[str]:
    paths: list[str] = []
    for root, folders, names in os.walk(workspace):
        if root == str(workspace) and ".git" in folders:
            folders.remove(".git")
        paths += [Path(root, name).relative_to(workspace).as_posix() for name in names]
        paths += [Path(root, name).relative_to(workspace).as_posix() for name in folders if name == ".git"]
    return sorted(paths)
