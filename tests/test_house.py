"""Rules of the house: what the folders are, what the pages promise, what an import may cost."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from catalog.migrations import HEAD
from console.cli import main

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("catalog", "console", "envfactory", "model", "opd", "rl", "rollout", "sandbox", "sft", "verifiers")
LIGHT = ("catalog", "console", "envfactory", "sandbox", "verifiers", "rollout.agents", "rollout.service")

JOBS = ("console.demo.run", "console.demo.stages")
"""Modules of light rooms that need torch at once: the command that runs them imports them when it runs."""


def tracked() -> list[str]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [name for name in listing.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def test_every_folder_is_a_room_or_has_a_reason() -> None:
    page = (ROOT / "docs" / "README.md").read_text()
    folders = {name.split("/")[0] for name in tracked() if "/" in name}
    unexplained = {name for name in folders if f"`{name}/`" not in page}
    assert not unexplained, "write in docs/README.md why they are there"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert sorted(project["importlinter"]["root_packages"]) == list(ROOMS)
    assert sorted(project["setuptools"]["packages"]["find"]["include"]) == [f"{room}*" for room in ROOMS]


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_is_ours_typed_and_introduced(room: str) -> None:
    module = importlib.import_module(room)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().parent == ROOT / room, "another package of that name is in the way"
    assert (ROOT / room / "py.typed").exists()
    assert module.__doc__


def test_the_light_rooms_import_without_torch() -> None:
    modules = sorted(
        str(file.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__")
        for room in LIGHT
        for file in [
            *(ROOT / room.replace(".", "/")).rglob("*.py"),
            (ROOT / room.replace(".", "/")).with_suffix(".py"),
        ]
        if file.exists() and file.stem not in ("__main__", "env") and file.stem.isidentifier()
    )
    modules = [module for module in modules if module not in JOBS]
    assert len(modules) > 40
    code = (
        "import importlib, sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'transformers', 'docker', 'kubernetes', 'aiohttp'):\n"
        "            raise ImportError(f'{name} was imported')\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "print(len(sys.modules))\n"
    )
    shown = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *modules],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr[-2000:]


def test_no_file_names_the_place_where_it_was_written() -> None:
    places = {f"{folder}/" for folder in (ROOT, Path(sys.prefix), Path.home()) if len(folder.parts) > 2}
    pattern = re.compile("|".join(map(re.escape, places)).encode())
    found = [name for name in tracked() if pattern.search((ROOT / name).read_bytes())]
    assert not found


def test_the_make_targets_are_few_and_explained() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z][a-z-]*):", makefile, re.M)
    explained = re.findall(r"^([a-z][a-z-]*):.*## \S", makefile, re.M)
    assert targets == explained
    assert len(targets) <= 8


PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_pages_show_exist(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / page
    text = path.read_text()
    blocks = "\n".join(re.findall(r"^(?: {4}|\t)(.*)$", text, re.M) + re.findall(r"`([^`\n]+)`", text))
    shown = re.findall(r"^(?:\$ )?(posttrain [a-z].*)$", blocks, re.M)
    for line in shown:
        words = [word for word in shlex.split(line, comments=True)[1:] if re.fullmatch(r"[a-z][a-z-]*", word)]
        assert main([*words[:2], "--help"]) == 0, f"{page}: {line}: {capsys.readouterr().err}"
        options = set(re.findall(r"(--[a-z][a-z-]*)", line)) - {"--help"}
        helped = capsys.readouterr().out
        assert not {option for option in options if option not in helped}, f"{page}: {line}"
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M)
    for target in re.findall(r"(?:^|&& )make ([a-z-]+)", blocks, re.M):
        assert target in targets, f"{page}: make {target}"
    assert page != "README.md" or len(shown) >= 5


def test_links_between_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not broken
    index = (ROOT / "docs" / "README.md").read_text()
    unlisted = [page for page in PAGES[1:] if f"({Path(page).name})" not in index and "README" not in page]
    assert not unlisted, "link them from docs/README.md"


def test_migrations_are_packaged() -> None:
    assert list((ROOT / "catalog" / "migrations" / "versions").glob(f"{HEAD}_*.py"))
    assert (ROOT / "catalog" / "migrations" / "versions" / "__init__.py").exists()
