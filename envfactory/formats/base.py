"""What travels: a task with the bytes that it refers to, and how a foreign document carries our part of it.

A reader turns a document into parcels and a writer parcels into a document; neither touches a catalog
(`envfactory.formats.parcels` does). What a format has fields for goes there, so that others can use it. The
rest of our record goes into one field named `posttrain` (`extend`), and what a foreign document says beyond
our record stays with the task as `Foreign`. So a document that we wrote comes back whole, and one that we
read can be written again.

Documents come from strangers: every reader checks types, sizes, names and duplicates before it yields, and
says what is wrong in one sentence (`fields.FormatError`).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import ValidationError

from catalog.models import QualityReport, Record, Status, Task, TestStatus, digest_json
from envfactory.formats.archives import pack_tree, unpack_tree
from envfactory.formats.fields import Fields, FormatError, decode_base64
from envfactory.trees import Tree

FIELD = "posttrain"
"""Name of the extension field in every format."""


class Setup(Record):
    """How the environment of a task is made: what a Dockerfile would say."""

    python: str
    """Version as `3.11`."""
    requirements: tuple[str, ...] = ()
    """Pinned distributions, `name==version`, sorted."""
    metadata: dict[str, str] = {}
    """Files of the package's own synthesised metadata, path relative to site-packages -> text."""
    env: dict[str, str] = {}
    """Environment variables of every command."""
    workdir: str = "/workspace"


class Foreign(Record):
    """What a document said that our records have no place for."""

    format: str
    fields: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """A task with the bytes that it refers to, in no format's words."""

    id: str
    """Our id, or the foreign one of a document that is not ours."""
    statement: str
    gold: bytes
    """git diff from the workspace to the solved one."""
    tests: bytes
    """git diff that brings the verifier's files into the workspace."""
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    start: bytes = b""
    """git diff from `repo` at `commit` to the workspace, where that is not the workspace itself."""
    repo: str = ""
    """`owner/name`."""
    commit: str = ""
    """Commit id of the workspace, or of what `start` leads from."""
    version: str = ""
    created: str = ""
    """ISO 8601, or empty."""
    image: str = ""
    """Container image as a registry names it."""
    workspace: Tree | None = None
    """What the agent finds; None where the document names a repository instead."""
    setup: Setup | None = None
    task: Task | None = None
    """Our own record; None in a document that did not come from us."""
    report: QualityReport | None = None
    edited: bool = False
    """The document was changed after we wrote it."""
    foreign: tuple[Foreign, ...] = ()

    def fields(self, format: str) -> dict[str, Any]:
        """What a document of that format said about this task when it was read."""
        return next((dict(one.fields) for one in self.foreign if one.format == format), {})


class TaskFormat(Protocol):
    """One format of tasks; a module of this package is one."""

    name: str
    summary: str
    """One line: what the file or folder looks like."""
    missing: tuple[str, ...]
    """What other programs that read this format will not see, though it is in the document."""

    def read(self, path: Path) -> Iterator[Parcel]:
        """The tasks of a document. Raises FormatError."""
        ...

    def write(self, parcels: Iterable[Parcel], path: Path) -> int:
        """Write a new document, whole or not at all; the number of tasks. Raises FormatError."""
        ...

    def misread(self, parcel: Parcel) -> list[str]:
        """What the format's own programs will get wrong about this task, one sentence each."""
        ...


def extend(
    parcel: Parcel, *, natives: Iterable[Literal["statement", "tests"]], workspace: bool = True
) -> dict[str, Any]:
    """Our part of a document: the record without what the format's own fields say.

    `natives` names what they do say: the statement, and the lists of tests. Without `workspace` the files are
    left out, for formats that hold them elsewhere.
    """
    value: dict[str, Any] = {"format": 1}
    if parcel.task is not None:
        value["digest"] = digest_json(parcel.task.model_dump(mode="json"))
        value["task"] = _thin(parcel.task, set(natives))
    if parcel.report is not None:
        value["report"] = parcel.report.model_dump(mode="json")
    if parcel.setup is not None:
        value["setup"] = parcel.setup.model_dump(mode="json")
    if workspace and parcel.workspace is not None:
        value["workspace"] = base64.b64encode(pack_tree(parcel.workspace)).decode()
    if parcel.foreign:
        value["foreign"] = [one.model_dump(mode="json") for one in parcel.foreign]
    return value


def _thin(task: Task, natives: set[str]) -> dict[str, Any]:
    value = task.model_dump(mode="json")
    if "statement" in natives:
        del value["problem"]["statement"]
    if "tests" in natives:
        verifier = value["verifier"]
        listed = {*verifier.pop("fail_to_pass"), *verifier.pop("pass_to_pass")}
        expected: dict[str, str] = verifier["expected"]
        verifier["expected"] = {k: v for k, v in expected.items() if k not in listed or v != "passed"}
    return value


def extended(parcel: Parcel, fields: Fields | None, place: str) -> Parcel:
    """A parcel of a format's own fields, with our part of the document added. Own fields win.

    `fields` is the extension field, None where there is none.
    """
    if fields is None:
        return parcel
    if fields.value.get("format") != 1:
        raise FormatError(f"{fields.place} is of a format that this version does not know: export it again")
    more: dict[str, Any] = {}
    try:
        if (setup := fields.value.get("setup")) is not None:
            more["setup"] = Setup.model_validate(setup)
        if (report := fields.value.get("report")) is not None:
            more["report"] = QualityReport.model_validate(report)
        if (foreign := fields.value.get("foreign")) is not None:
            more["foreign"] = (*parcel.foreign, *(Foreign.model_validate(one) for one in foreign))
        if (record := fields.value.get("task")) is not None:
            more["task"] = task = Task.model_validate(_thick(record, parcel))
            more["edited"] = digest_json(task.model_dump(mode="json")) != fields.value.get("digest")
            more["id"] = task.id
            if more["edited"]:
                more["task"] = task.model_copy(update={"status": Status.DRAFT})
    except (ValidationError, AttributeError, KeyError, TypeError) as error:
        raise FormatError(f"{fields.place} is damaged ({_first(error)}): export the task again") from error
    if (packed := fields.value.get("workspace")) is not None:
        more["workspace"] = unpack_tree(decode_base64(packed, fields.place), fields.place)
    return replace(parcel, **more)


def _thick(record: dict[str, Any], parcel: Parcel) -> dict[str, Any]:
    problem, verifier = dict(record["problem"]), dict(record["verifier"])
    problem.setdefault("statement", parcel.statement)
    if "fail_to_pass" not in verifier:
        listed = (*parcel.fail_to_pass, *parcel.pass_to_pass)
        verifier["fail_to_pass"], verifier["pass_to_pass"] = parcel.fail_to_pass, parcel.pass_to_pass
        passed = dict.fromkeys(listed, TestStatus.PASSED.value)
        verifier["expected"] = dict(sorted((passed | verifier["expected"]).items()))
    return record | {"problem": problem, "verifier": verifier}


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        one = error.errors()[0]
        return f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
    return f"{type(error).__name__} {error}"


def nothing_misread(parcel: Parcel) -> list[str]:
    """For formats whose programs read our verifier's own report."""
    return []


def no_twins(parcels: Iterable[Parcel], place: str) -> Iterator[Parcel]:
    """The parcels; FormatError when an id comes twice (upper and lower case are one on some disks)."""
    known: set[str] = set()
    for parcel in parcels:
        if parcel.id.lower() in known:
            raise FormatError(f"{place} holds {parcel.id} twice: give each task an id of its own")
        known.add(parcel.id.lower())
        yield parcel
