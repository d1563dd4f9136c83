"""What installing a package would have written: its version, entry points and generated version file.

All of it comes from declarations (pyproject.toml, setup.cfg, setup.py as syntax); no build backend runs.
"""

from __future__ import annotations

import re
from typing import Any

from envfactory.layout import ini, toml
from envfactory.requirements import setup_keywords, text_of
from envfactory.trees import Tree

_VERSION_FILE = "__version__ = version = {version!r}\n__version_tuple__ = version_tuple = {parts!r}\n"


def version_of(tree: Tree, fallback: str) -> str:
    """Version of the package: declared, or a release's name, or `0`."""
    static = toml(text_of(tree, "pyproject.toml")).get("project", {}).get("version")
    declared = static or ini(text_of(tree, "setup.cfg")).get("metadata", {}).get("version", "")
    declared = declared or setup_keywords(text_of(tree, "setup.py")).get("version")
    for candidate in (declared, fallback):
        if isinstance(candidate, str) and re.fullmatch(r"\d[\w.+!-]*", candidate):
            return candidate
    return "0"


def entry_points(tree: Tree) -> str:
    """The content of entry_points.txt."""
    project = toml(text_of(tree, "pyproject.toml")).get("project", {})
    groups: dict[str, dict[str, str]] = {}
    for section, group in (("scripts", "console_scripts"), ("gui-scripts", "gui_scripts")):
        _add(groups, group, project.get(section))
    for group, values in (project.get("entry-points") or {}).items():
        _add(groups, group, values)
    for group, values in ini(text_of(tree, "setup.cfg")).get("options.entry_points", {}).items():
        _add(groups, group, values)
    declared = setup_keywords(text_of(tree, "setup.py")).get("entry_points")
    for group, values in declared.items() if isinstance(declared, dict) else []:
        _add(groups, str(group), values)
    return "".join(
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in sorted(values.items())) + "\n"
        for group, values in sorted(groups.items())
    )


def _add(groups: dict[str, dict[str, str]], group: str, values: Any) -> None:
    if isinstance(values, dict):
        rows = [f"{name} = {target}" for name, target in values.items()]
    else:
        rows = values.splitlines() if isinstance(values, str) else list(values or [])
    for row in rows:
        name, equals, target = str(row).partition("=")
        if equals and re.fullmatch(r"[\w.\[\] -]+", name.strip()):
            groups.setdefault(group, {})[name.strip()] = target.strip()


def generated_files(tree: Tree, version: str) -> dict[str, bytes]:
    """Version files that setuptools-scm or hatch-vcs would write and a git checkout lacks."""
    tool = toml(text_of(tree, "pyproject.toml")).get("tool", {})
    scm = tool.get("setuptools_scm", {})
    places = [
        scm.get("version_file"),
        scm.get("write_to"),
        tool.get("pdm", {}).get("version", {}).get("write_to"),
    ]
    places.append(tool.get("hatch", {}).get("build", {}).get("hooks", {}).get("vcs", {}).get("version-file"))
    parts = tuple(int(part) if part.isdigit() else part for part in re.split(r"[.+-]", version))
    text = _VERSION_FILE.format(version=version, parts=parts)
    return {
        place: text.encode()
        for place in places
        if isinstance(place, str) and place.endswith(".py") and place not in tree and ".." not in place
    }
