"""SWE-smith rows: the diff is the one that *makes* the bug, the repository is a mirror before it.

Columns as `swesmith.harness.gather` writes them, and `problem_statement`. A row of ours also has
`base_commit` and `test_patch` (which that file's own description names), relative to the state with the bug.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from catalog.models import digest_json
from envfactory.formats.base import FIELD, Foreign, Parcel, extend, extended, no_twins
from envfactory.formats.fields import Fields, FormatError, text_of
from envfactory.formats.reverse import reverse
from envfactory.formats.rows import read_rows, write_rows
from envfactory.formats.swebench import full_lists, misread, missing, readable, restored

__all__ = ["misread", "missing", "name", "read", "summary", "write"]

name = "swe-smith"
summary = "SWE-smith rows: a .jsonl, .json or .parquet file"
_REPO = re.compile(r"(?:[\w.-]+/)?(?P<owner>[\w.-]+?)__(?P<name>[\w.-]+)\.(?P<commit>[0-9a-f]{8})")


def read(path: Path) -> Iterator[Parcel]:
    """The tasks of a file of rows. Raises FormatError."""
    return no_twins(map(_parcel, read_rows(path)), str(path))


def write(parcels: Iterable[Parcel], path: Path) -> int:
    """Write a new file of rows. Raises FormatError."""
    return write_rows(map(_row, no_twins(parcels, "the export")), path)


def instance_id(parcel: Parcel) -> str:
    """`owner__repo.commit8.strategy__hash8`, as the tools of SWE-smith take it apart."""
    mirror = f"{parcel.repo.replace('/', '__')}.{parcel.commit[:8]}"
    origin = parcel.task.origin if parcel.task else None
    strategy = f"func_pm_{origin.operator}" if origin and origin.operator else "pr"
    ending = re.search(r"-([0-9a-f]{8})[0-9a-f]{4}$", parcel.id)
    return f"{mirror}.{strategy}__{ending[1] if ending else digest_json(parcel.id)[7:15]}"


def image_name(parcel: Parcel) -> str:
    """The image that SWE-smith looks for."""
    return f"swebench/swesmith.x86_64.{parcel.repo.replace('/', '_1776_')}.{parcel.commit[:8]}".lower()


def _row(parcel: Parcel) -> dict[str, Any]:
    before = parcel.fields(name)
    if not re.fullmatch(r"[0-9a-f]{8,}", parcel.commit) and not before:
        raise FormatError(f"{parcel.id} is at no commit, and {name} names tasks by it: import it with --repo")
    bug = parcel.start or reverse(parcel.gold)
    row: dict[str, Any] = {
        "instance_id": before.pop("instance_id", instance_id(parcel)),
        "patch": text_of(bug, f"the patch of {parcel.id}", name),
        **readable(parcel, name),
        "image_name": before.pop("image_name", image_name(parcel)),
        "repo": before.pop("repo", f"swesmith/{parcel.repo.replace('/', '__')}.{parcel.commit[:8]}"),
        "problem_statement": parcel.statement,
    }
    if parcel.task is not None:
        row |= {
            "base_commit": parcel.commit,
            "version": parcel.version,
            "test_patch": text_of(parcel.tests, f"the test patch of {parcel.id}", name),
        }
    others = tuple(one for one in parcel.foreign if one.format != name)
    ours = extend(replace(parcel, foreign=others), natives=("statement", "tests"))
    if full := full_lists(parcel, name):
        ours["tests"] = full
    if len(ours) > 1:
        ours["derived"] = {key: digest_json(row[key]) for key in ("instance_id", "image_name", "repo")}
        ours["repo"] = parcel.repo
        row[FIELD] = json.dumps(ours, ensure_ascii=False)
    return row | before


def _parcel(row: Fields) -> Parcel:
    ours = row.object(FIELD) if row.get(FIELD) is not None else None
    lists = {"FAIL_TO_PASS": row.texts("FAIL_TO_PASS"), "PASS_TO_PASS": row.texts("PASS_TO_PASS", default=())}
    fail_to_pass, pass_to_pass = restored(lists, ours, name)
    if not fail_to_pass:
        raise FormatError(f"{row.place}: FAIL_TO_PASS is empty, so that doing nothing would solve the task")
    id, mirror = row.id("instance_id"), row.text("repo")
    bug = row.text("patch").encode()
    parts = _REPO.fullmatch(mirror)
    parcel = Parcel(
        id=id,
        statement=row.text("problem_statement", ""),
        start=b"" if ours else bug,
        gold=reverse(bug),
        tests=row.text("test_patch", "").encode(),
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        repo=ours.text("repo") if ours else f"{parts['owner']}/{parts['name']}" if parts else mirror,
        commit=row.text("base_commit", ""),
        version=row.text("version", ""),
    )
    image = row.text("image_name", "")
    named = {"instance_id": id, "repo": mirror, "image_name": image}
    if ours is None:
        parcel = replace(parcel, image=image)
        return replace(parcel, foreign=(Foreign(format=name, fields=named | row.rest()),))
    derived = ours.object("derived").value
    kept = {key: value for key, value in named.items() if digest_json(value) != derived.get(key)} | row.rest()
    parcel = extended(parcel, ours, row.place)
    if kept:
        foreign = Foreign(format=name, fields={"instance_id": id} | kept)
        parcel = replace(parcel, foreign=(*parcel.foreign, foreign))
    return parcel
