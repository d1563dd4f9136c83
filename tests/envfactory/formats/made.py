"""Tasks made by hand for the formats: a small package, its bug, its tests, in a real image store."""

from __future__ import annotations

from pathlib import Path

from catalog.blobs import Blobs
from catalog.models import (
    Environment,
    Gate,
    Origin,
    Problem,
    QualityReport,
    Status,
    Task,
    TestStatus,
    VerifierSpec,
)
from envfactory.formats.base import Parcel, Setup
from envfactory.packaging import add_workspace, diff
from envfactory.packs import PackWriter
from envfactory.trees import File, Tree, changed, tar_of, write_tree
from sandbox.images import ImageStore

BUGGY: dict[str, File] = {
    "calc/__init__.py": File("def double(n):\n    return n + n + 1  # größer\n".encode()),
    "calc/data.bin": File(bytes(range(256))),
    "run.sh": File(b"#!/bin/sh\necho hi\r\n", executable=True),
    "README": File(b"README.md", link=True),
    "README.md": File("Größe\r\n".encode()),
    "setup.cfg": File(b"[tool:pytest]\naddopts = -q\n"),
    "tests/test_calc.py": File(b"from calc import double\n\n\ndef test_two():\n    assert double(2) == 4\n"),
}
SOLVED = {"calc/__init__.py": "def double(n):\n    return n + n  # größer\n".encode()}
TESTS = {
    "tests/test_calc.py": File(
        b"import pytest\nfrom calc import double\n\n\ndef test_two():\n    assert double(2) == 4\n\n\n"
        b"@pytest.mark.parametrize('n', [0, 3], ids=['a  b', 'x[1]'])\ndef test_more(n):\n"
        b"    assert double(n) == 2 * n\n\n\ndef test_type():\n    assert isinstance(double(1), int)\n\n\n"
        b"@pytest.mark.skip\ndef test_later():\n    pass\n"
    ),
    "tests/data/empty.txt": File(b""),
}
EXPECTED = {
    "tests/test_calc.py::test_two": TestStatus.PASSED,
    "tests/test_calc.py::test_more[a  b]": TestStatus.PASSED,
    "tests/test_calc.py::test_more[x[1]]": TestStatus.PASSED,
    "tests/test_calc.py::test_type": TestStatus.PASSED,
    "tests/test_calc.py::test_later": TestStatus.SKIPPED,
}


def make_task(images: ImageStore, blobs: Blobs, scratch: Path, number: int = 1) -> Task:
    """A task in the store, with an environment layer that says which requirements it has."""
    site = scratch / f"env{number}/lib/python3.11/site-packages"
    for name, files in {
        "pytest-9.2.0.dist-info": {"INSTALLER": b"pip\n", "METADATA": b"Name: pytest\n"},
        "calc-1.0.dist-info": {"INSTALLER": b"posttrain\n", "METADATA": b"Name: calc\nVersion: 1.0\n"},
    }.items():
        write_tree({f"{name}/{path}": File(data) for path, data in files.items()}, site)
    env = {"PYTHONPATH": "/workspace", "TZ": "UTC", "PATH": "/opt/env/bin:/usr/bin"}
    parent = images.add_layer(
        images.host_base(), scratch / f"env{number}", at="/opt/env", env=env, note="environment"
    )
    workspace = BUGGY | {"calc/number.py": File(f"NUMBER = {number}\n".encode())}
    image, tree = add_workspace(images, parent, workspace, packs=PackWriter(), env=env, note=f"calc-{number}")
    after = changed(workspace, {}) | TESTS
    guarded = {path: file for path, file in after.items() if path.startswith("tests/") or path == "setup.cfg"}
    expected = dict(sorted(EXPECTED.items()))
    return Task(
        id=Task.make_id("calc-init-double", number),
        origin=Origin(
            kind="procedural",
            source="pypi:calc==1.0",
            revision="1.0",
            path="calc/__init__.py",
            function="double",
            operator="constant_increment",
            licence="MIT",
        ),
        problem=Problem(
            statement="`double(2)` is 5.\n\nMend it — “bitte”.\n",
            visible_tests=("tests/test_calc.py::test_two",),
            interface="def double(n)",
        ),
        environment=Environment(image=image, tree=tree),
        verifier=VerifierSpec(
            fail_to_pass=tuple(sorted(t for t in expected if "two" in t or "more" in t)),
            pass_to_pass=("tests/test_calc.py::test_type",),
            expected=expected,
            arguments=("tests/test_calc.py",),
            protected=blobs.put(tar_of(guarded)),
            allowed=("calc/",),
            timeout_s=20.0,
        ),
        solution=blobs.put(diff(workspace, changed(workspace, SOLVED))),
        status=Status.ACCEPTED,
        split="train" if number % 2 else "test",
    )


def make_report(task: Task) -> QualityReport:
    gates = (Gate(name="gold", passed=True, evidence="2 of 2 runs pass", cost_s=0.5, data={"runs": 2}),)
    return QualityReport(task_id=task.id, gates=gates)


def bare(**changes: object) -> Parcel:
    """A parcel of nobody's task, for properties of what formats hold."""
    workspace: Tree = BUGGY
    fields: dict[str, object] = {
        "id": "calc-1",
        "statement": "Mend it.",
        "gold": diff(workspace, changed(workspace, SOLVED)),
        "tests": diff(workspace, dict(workspace) | TESTS),
        "fail_to_pass": ("tests/test_calc.py::test_two",),
        "pass_to_pass": ("tests/test_calc.py::test_type",),
        "repo": "octo/calc",
        "commit": "1" * 40,
        "version": "1.0",
        "workspace": workspace,
        "setup": Setup(python="3.11", requirements=("pytest==9.2.0",), env={"TZ": "UTC"}),
    }
    return Parcel(**(fields | changes))  # pyright: ignore[reportArgumentType]
