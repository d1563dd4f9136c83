"""SWE-bench rows, classic: one row a task in .jsonl, .json or .parquet.

Columns as in swebench 4.1 (`SWEbenchInstance`); the test lists are JSON text, as that version wants them,
and the reader takes lists as well. A row names a repository and a commit. Ours are of no public repository,
so the workspace travels in the extension column.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from catalog.models import digest_json
from envfactory.formats.base import FIELD, Foreign, Parcel, extend, extended, no_twins
from envfactory.formats.fields import Fields, FormatError, checked_id, text_of
from envfactory.formats.rows import read_rows, write_rows

name = "swebench"
summary = "SWE-bench rows as swebench 4.1 has them: a .jsonl, .json or .parquet file"
missing = (
    "which paths may change",
    "limits of memory, time and processes",
    "statuses other than passed that the gold run had",
)
COLUMNS = (
    *("repo", "instance_id", "base_commit", "patch", "test_patch", "problem_statement", "hints_text"),
    *("created_at", "version", "FAIL_TO_PASS", "PASS_TO_PASS", "environment_setup_commit"),
)


def read(path: Path) -> Iterator[Parcel]:
    """The tasks of a file of rows. Raises FormatError."""
    return no_twins((from_row(row, name) for row in read_rows(path)), str(path))


def write(parcels: Iterable[Parcel], path: Path) -> int:
    """Write a new file of rows. Raises FormatError."""
    return write_rows((classic_row(parcel) for parcel in no_twins(parcels, "the export")), path)


def classic_row(parcel: Parcel) -> dict[str, Any]:
    """A row of swebench 4.1: as `to_row`, the test lists as JSON text."""
    row = to_row(parcel, name)
    for column in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        row[column] = json.dumps(row[column], ensure_ascii=False)
    return row


def to_row(
    parcel: Parcel, format: str, derived: Mapping[str, Any] | None = None, *, workspace: bool = True
) -> dict[str, Any]:
    """The columns that every SWE-bench descendant shares, what such a row said before, and our extension.

    A row that was read comes back with its own id and its own further columns. `derived` are columns that
    follow from the rest: the extension lists them, so that a reader takes them for no more than that.
    """
    if parcel.start and parcel.workspace is None:
        raise FormatError(
            f"{parcel.id} starts from a commit with a further diff, which {format} cannot say: "
            "import it with --repo first"
        )
    before = parcel.fields(format)
    row: dict[str, Any] = {
        "repo": parcel.repo,
        "instance_id": before.pop("instance_id", parcel.id),
        "base_commit": parcel.commit,
        "patch": text_of(parcel.gold, f"the patch of {parcel.id}", format),
        "test_patch": text_of(parcel.tests, f"the test patch of {parcel.id}", format),
        "problem_statement": parcel.statement,
        "hints_text": before.pop("hints_text", ""),
        "created_at": parcel.created,
        "version": parcel.version,
        **readable(parcel, format),
        "environment_setup_commit": before.pop("environment_setup_commit", parcel.commit),
    }
    others = tuple(one for one in parcel.foreign if one.format != format)
    ours = extend(replace(parcel, foreign=others), natives=("statement", "tests"), workspace=workspace)
    made = {key: value for key, value in (derived or {}).items() if key not in before}
    if made:
        ours["derived"] = {key: digest_json(value) for key, value in made.items()}
    if full := full_lists(parcel, format):
        ours["tests"] = full
    if len(ours) > 1:
        row[FIELD] = json.dumps(ours, ensure_ascii=False)
    return row | made | before


def from_row(row: Fields, format: str) -> Parcel:
    """A parcel from such a row; columns that it does not know stay with the task. Raises FormatError."""
    ours = row.object(FIELD) if row.get(FIELD) is not None else None
    lists = {"FAIL_TO_PASS": row.texts("FAIL_TO_PASS"), "PASS_TO_PASS": row.texts("PASS_TO_PASS", default=())}
    fail_to_pass, pass_to_pass = restored(lists, ours, format)
    if not fail_to_pass:
        raise FormatError(f"{row.place}: FAIL_TO_PASS is empty, so that doing nothing would solve the task")
    if both := set(fail_to_pass) & set(pass_to_pass):
        raise FormatError(f"{row.place}: {min(both)[:80]!r} is both in FAIL_TO_PASS and in PASS_TO_PASS")
    parcel = Parcel(
        id=row.id("instance_id"),
        statement=row.text("problem_statement"),
        gold=row.text("patch").encode(),
        tests=row.text("test_patch", "").encode(),
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        repo=row.text("repo"),
        commit=row.text("base_commit", ""),
        version=row.text("version", ""),
        created=row.text("created_at", ""),
    )
    derived = ours.object("derived").value if ours else {}
    said = {key: value for key, value in row.rest().items() if not _is(value, derived.get(key))}
    kept = {"instance_id": parcel.id}
    for column, default in (("hints_text", ""), ("environment_setup_commit", parcel.commit)):
        if (text := said.pop(column, default)) != default:
            kept[column] = text
    parcel = extended(parcel, ours, row.place)
    if parcel.id != kept["instance_id"] or said or len(kept) > 1 or parcel.task is None:
        foreign = Foreign(format=format, fields=kept | said)
        parcel = replace(parcel, foreign=(*parcel.foreign, foreign))
    return parcel


def _is(value: object, digest: object) -> bool:
    """Whether a column still holds what we derived; parquet may have made JSON text of it."""
    if digest is None:
        return False
    texts = [value]
    if isinstance(value, str) and value[:1] in "[{":
        with contextlib.suppress(ValueError):
            texts.append(json.loads(value))
    return any(digest_json(one) == digest for one in texts)


def misread(parcel: Parcel, format: str = name) -> list[str]:
    """Ids that a harness which reads printed lines takes for others, and what is done about them."""
    odd = [id for id in (*parcel.fail_to_pass, *parcel.pass_to_pass) if is_odd(id, format)]
    if not odd:
        return []
    left = "left out of" if full_lists(parcel, format) else "in"
    return [
        f"{parcel.id}: {len(odd)} test ids that printed lines do not keep, {left} the lists, as {odd[0]!r}"
    ]


def is_odd(id: str, format: str) -> bool:
    """Whether the harness's parser of printed lines loses something of a test id.

    That of swebench 5 collapses blanks and cuts at ` - `; those before it, and their descendants, cut at the
    first blank.
    """
    kept = (
        " ".join(id.split()) == id and " - " not in id
        if format == "swebench-v5"
        else not re.search(r"\s", id)
    )
    return not kept or not id.isprintable()


def full_lists(parcel: Parcel, format: str) -> dict[str, list[str]]:
    """Both lists of a task of ours, if a harness can do without the odd ones; else empty.

    With them its own gold would not count as resolved. A stranger's lists stay as they are.
    """
    lists = {"FAIL_TO_PASS": list(parcel.fail_to_pass), "PASS_TO_PASS": list(parcel.pass_to_pass)}
    odd = {key: [is_odd(id, format) for id in ids] for key, ids in lists.items()}
    if parcel.task is None or not any(map(any, odd.values())) or all(odd["FAIL_TO_PASS"]):
        return {}
    return lists


def readable(parcel: Parcel, format: str) -> dict[str, list[str]]:
    """The lists as a harness is given them."""
    lists = {"FAIL_TO_PASS": list(parcel.fail_to_pass), "PASS_TO_PASS": list(parcel.pass_to_pass)}
    if not full_lists(parcel, format):
        return lists
    return {key: [id for id in ids if not is_odd(id, format)] for key, ids in lists.items()}


def restored(
    lists: dict[str, tuple[str, ...]], ours: Fields | None, format: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Fail-to-pass and pass-to-pass, with what `readable` left out, unless somebody changed them since."""
    full = ours.object("tests") if ours else None
    if full is not None and full.value:
        whole = {key: full.texts(key) for key in lists}
        shown = {key: tuple(id for id in ids if not is_odd(id, format)) for key, ids in whole.items()}
        if shown == lists:
            lists = whole
    return lists["FAIL_TO_PASS"], lists["PASS_TO_PASS"]


def container(id: str) -> str:
    """The image that swebench looks for."""
    checked_id(id, "the instance id")
    return f"swebench/sweb.eval.x86_64.{id}:latest".lower().replace("__", "_1776_")
