"""Where things are in a Python repository: packages, import root, tests, what a verifier must protect.

Pure functions over trees. setup.py is read as syntax, never run.
"""

from __future__ import annotations

import configparser
import fnmatch
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from envfactory.errors import BuildError
from envfactory.trees import Tree

INI_FILES = (
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
)
"""Files, at the workspace's root, that pytest takes its settings from."""
_TEST_FOLDERS = {"tests", "test", "testing", "unit_tests", "unittests"}
_NO_SOURCE = {
    "docs",
    "doc",
    "examples",
    "example",
    "benchmarks",
    "benchmark",
    "scripts",
    "tools",
    "build",
    "dist",
}
_NO_SOURCE |= {"misc", "ci", "etc", "contrib", "vendor", "node_modules", "tasks", "bench", "perf", "utils"}
_NO_MODULE = {
    "setup.py",
    "conftest.py",
    "noxfile.py",
    "tasks.py",
    "fabfile.py",
    "ez_setup.py",
    "versioneer.py",
}
_NO_MODULE |= {"bootstrap.py", "dodo.py", "manage.py", "toxfile.py", "hatch_build.py", "build.py", "bench.py"}


@dataclass(frozen=True, slots=True)
class Layout:
    """What detection found. Paths are relative to the workspace."""

    import_root: str
    """Folder that belongs on the module path: "" for a flat layout, else `src` or `lib`."""
    packages: tuple[str, ...]
    """Package folders and single modules: `src/humanize`, `parse.py`."""
    tests: tuple[str, ...]
    """Test files."""

    @property
    def pythonpath(self) -> str:
        """PYTHONPATH in a sandbox whose workspace is /workspace."""
        return "/workspace/" + self.import_root if self.import_root else "/workspace"

    @property
    def allowed(self) -> tuple[str, ...]:
        """Path prefixes that a solution may touch."""
        return tuple(item if item.endswith(".py") else item + "/" for item in self.packages)


def is_test_path(
    path: str, patterns: tuple[str, ...] = ("test_*.py", "*_test.py", "test.py", "tests.py")
) -> bool:
    """Whether pytest would look for tests in this file."""
    folders, name = PurePosixPath(path).parts[:-1], PurePosixPath(path).name
    if any(folder in _NO_SOURCE or folder.startswith(".") for folder in folders):
        return False
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def in_test_folder(path: str) -> bool:
    """Whether a file lies beneath a folder of tests (data files and helpers included)."""
    return any(part in _TEST_FOLDERS for part in PurePosixPath(path).parts[:-1])


def has_tests(tree: Tree) -> bool:
    """Whether a tree holds at least one test file with something to run in it."""
    patterns = _patterns(tree)
    return any(
        is_test_path(path, patterns) and (b"def test" in file.data or b"unittest" in file.data)
        for path, file in tree.items()
    )


def is_protected(path: str, tests: frozenset[str] | set[str] = frozenset()) -> bool:
    """Whether grading restores this file: tests and their data, conftest, pytest's settings."""
    if path in tests or in_test_folder(path) or is_test_path(path):
        return True
    return path.rpartition("/")[2] == "conftest.py" or path in INI_FILES


def detect(tree: Tree, name: str = "") -> Layout:
    """Layout of a repository; `name` (of the distribution) breaks ties. Raises BuildError."""
    patterns = _patterns(tree)
    tests = sorted(
        path
        for path, file in tree.items()
        if is_test_path(path, patterns) and (b"test" in file.data) and not file.link
    )
    for root in ("src", "lib", ""):
        packages = _packages(tree, root)
        if packages:
            break
    else:
        raise BuildError(
            f"{name or 'the repository'} has no importable package (a folder with __init__.py, or a module)"
        )
    if not tests:
        raise BuildError(
            f"{name or 'the repository'} has no test file (test_*.py): choose one that has tests"
        )
    return Layout(root, _preferred(packages, root, name), tuple(tests))


def _packages(tree: Tree, root: str) -> list[str]:
    prefix = root + "/" if root else ""
    found: set[str] = set()
    for path in tree:
        if not path.startswith(prefix) or not path.endswith(".py"):
            continue
        rest = path[len(prefix) :]
        top, slash, inner = rest.partition("/")
        if slash and inner == "__init__.py":
            if root or (top not in _TEST_FOLDERS and top not in _NO_SOURCE and not top.startswith(".")):
                found.add(prefix + top)
        elif not slash and top not in _NO_MODULE and not is_test_path(top):
            found.add(path)
    return sorted(found)


def _preferred(packages: list[str], root: str, name: str) -> tuple[str, ...]:
    """All packages beneath src/; in a flat repository the one of the distribution's name if there is one."""
    wanted = name.lower().replace("-", "_").replace(".", "_")
    plain = {item: PurePosixPath(item).stem.lower() for item in packages}
    named = [item for item, stem in plain.items() if wanted and stem in (wanted, wanted.replace("_", ""))]
    if root or not named:
        folders = [item for item in packages if not item.endswith(".py")]
        return tuple(folders or packages)
    return tuple(named)


def ini_settings(tree: Tree) -> dict[str, Any]:
    """pytest's settings from the first file that has some."""
    for path in INI_FILES:
        if path not in tree:
            continue
        text = tree[path].data.decode("utf-8", "replace")
        if path.endswith(".toml"):
            tool = toml(text).get("tool", {}).get("pytest", {})
            found = tool.get("ini_options") or {k: v for k, v in tool.items() if k != "ini_options"}
        else:
            found = ini(text).get("tool:pytest" if path == "setup.cfg" else "pytest", {})
        if found:
            return dict(found)
    return {}


def toml(text: str) -> dict[str, Any]:
    """A TOML file's content, empty when it is damaged (the package's own fault, not ours to report)."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}


def ini(text: str) -> dict[str, dict[str, str]]:
    """An ini file's sections, empty when it is damaged."""
    parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
    try:
        parser.read_string(text)
    except configparser.Error:
        return {}
    return {
        section: {key: value or "" for key, value in parser.items(section)} for section in parser.sections()
    }


def _patterns(tree: Tree) -> tuple[str, ...]:
    """pytest's default file patterns and those of the repository's own settings."""
    own = ini_settings(tree).get("python_files", "")
    words = own.split() if isinstance(own, str) else [str(word) for word in own]
    return tuple(dict.fromkeys(["test_*.py", "*_test.py", "test.py", "tests.py", *words]))


def licence(tree: Tree) -> str | None:
    """SPDX-like name of the licence, from metadata or the licence file's first lines."""
    if "pyproject.toml" in tree:
        declared = (
            toml(tree["pyproject.toml"].data.decode("utf-8", "replace")).get("project", {}).get("license")
        )
        if isinstance(declared, dict):
            declared = declared.get("text")
        if isinstance(declared, str) and len(declared) < 60:
            return declared
    words = {
        "MIT": ("Permission is hereby granted, free of charge",),
        "Apache-2.0": ("Apache License",),
        "BSD-3-Clause": ("Neither the name",),
        "BSD-2-Clause": ("Redistribution and use in source and binary forms",),
        "MPL-2.0": ("Mozilla Public License",),
        "GPL": ("GNU GENERAL PUBLIC LICENSE",),
    }
    files = [path for path in tree if path.upper().startswith(("LICENSE", "LICENCE", "COPYING"))]
    text = " ".join(tree[path].data.decode("utf-8", "replace") for path in sorted(files))
    text = " ".join(text.split())
    return next((name for name, needles in words.items() if any(needle in text for needle in needles)), None)


def module_name(path: str, layout: Layout) -> str:
    """Dotted module name of a source file: `src/humanize/time.py` is `humanize.time`."""
    rest = path.removeprefix(layout.import_root + "/") if layout.import_root else path
    return rest.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def main_package(layout: Layout) -> str:
    """Import name of the package with the most source beneath it; ties by name."""
    counts = Counter({PurePosixPath(item).stem: -i for i, item in enumerate(layout.packages)})
    return counts.most_common(1)[0][0]
