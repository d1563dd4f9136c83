"""`posttrain images`: from a folder to an archive and back, and what collection spares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from catalog.store import Catalog
from console.cli import main
from console.errors import USER
from sandbox.images import ImageStore
from tests.catalog.test_store import make_task
from tests.sandbox.test_archives import make


def run(home: Path, capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert main(["--home", str(home), "--json", "images", *words]) == code
    said = capsys.readouterr()
    return said.err if code else json.loads(said.out)


def test_export_import_and_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = ImageStore(tmp_path / "home/images")
    image = make(store)
    run(tmp_path / "home", capsys, "tag", image, "tool:1")
    run(tmp_path / "home", capsys, "export", "tool:1", str(tmp_path / "image.tar"))
    there = run(tmp_path / "other", capsys, "import", str(tmp_path / "image.tar"), "--name", "mine")
    assert there == [{"name": "mine", "digest": image}]
    (row,) = run(tmp_path / "other", capsys, "list")
    assert (row["name"], row["digest"], row["layers"]) == ("mine", image, 2)
    assert main(["--home", str(tmp_path / "home"), "images", "list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith(f"tool:1\t{image}\tlayers\t2")
    run(tmp_path / "home", capsys, "untag", "tool:1")
    assert run(tmp_path / "home", capsys, "list") == []
    assert len(run(tmp_path / "home", capsys, "list", "--all")) == 2


def test_collection_spares_what_the_catalog_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "home"
    store = ImageStore(home / "images")
    image = make(store)
    task = make_task("one")
    environment = task.environment.model_copy(update={"image": image})
    with Catalog.open(home) as catalog:
        catalog.put_task(task.model_copy(update={"environment": environment}))
    assert run(home, capsys, "gc")["images"] == 0
    assert run(home, capsys, "gc", "--grace-hours=-1", "--dry-run")["images"] == 1
    assert run(home, capsys, "gc", "--grace-hours=-1")["images"] == 1
    assert [row["digest"] for row in run(home, capsys, "list", "--all")] == [image]


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "home"
    out = str(tmp_path / "out.tar")
    assert "no image nothing" in run(home, capsys, "export", "nothing", out, code=USER)
    host = ImageStore(home / "images").host_base()
    assert "stands on this host's /usr" in run(home, capsys, "export", host, out, code=USER)
    assert "does not name an image" in run(home, capsys, "pull", "debian", code=USER)
    (tmp_path / "bad.tar").write_bytes(b"bad" * 999)
    assert "not a tar" in run(home, capsys, "import", str(tmp_path / "bad.tar"), code=USER)


def test_run_in_a_sandbox_ends_with_the_command_s_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws/name").write_text("work")
    home = ["--home", str(tmp_path / "home"), "sandbox", "run", "host", "--workspace", str(tmp_path / "ws")]
    assert main([*home, "--", "sh", "-c", "cat name; exit 7"]) == 7
    assert capsys.readouterr().out == "work"
    fetch = "import urllib.request as u; u.urlopen('http://other.example/')"
    assert main([*home, "--json", "--allow", "a.example:80", "--", "python3", "-c", fetch]) == 1
    seen = json.loads(capsys.readouterr().out)
    assert seen["refused"] == ["other.example:80: this sandbox may not reach other.example:80"]
    assert main([*home, "--index-before", "soon", "--", "true"]) == USER
    assert "takes a day as 2024-05-01" in capsys.readouterr().err
    assert main([*home, "--allow", "*", "--", "true"]) == USER
    assert main(home) == USER
