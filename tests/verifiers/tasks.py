"""A small task that grading tests share."""

from __future__ import annotations

import hashlib

from catalog.models import Environment, Origin, Problem, Substrate, Task, TestStatus, VerifierSpec
from sandbox.trees import pack_files
from verifiers import patches

BUGGY = b'''"""Numbers."""


def clamp(x, low, high):
    return min(max(x, low), low)


def sign(x):
    return (x > 0) - (x < 0)
'''
FIXED = BUGGY.replace(b"low), low)", b"low), high)")
REWRITTEN = BUGGY.replace(
    b"    return min(max(x, low), low)",
    b"    if x < low:\n        return low\n    return high if x > high else x",
)
FIRST = b"""from pkg.numbers import clamp, sign


def test_below():
    assert clamp(-5, 0, 3) == 0


def test_above():
    assert clamp(7, 0, 3) == 3


def test_sign():
    assert [sign(-2), sign(0), sign(9)] == [-1, 0, 1]
"""
SECOND = b"""import unittest

import pytest

from pkg import numbers


class TestClamp(unittest.TestCase):
    def test_inside(self):
        self.assertEqual(numbers.clamp(2, 0, 3), 2)


@pytest.mark.parametrize("text", ["a b", "[x]/y", "\\u00e9'\\""])
def test_text(text):
    assert numbers.clamp(len(text), 1, 2) == min(len(text), 2)


def test_late():
    with pytest.raises(TypeError):
        numbers.clamp("a", 1, 2)
    assert numbers.clamp(2, 1, 3) == 2
"""
WORKSPACE = {
    "pkg/__init__.py": b"",
    "pkg/numbers.py": BUGGY,
    "tests/test_first.py": FIRST,
    "README.md": b"numbers\n",
}
PROTECTED = {"tests/test_first.py": FIRST, "tests/test_second.py": SECOND, "tests/conftest.py": b"# ours\n"}
EXPECTED = (
    "tests/test_first.py::test_below",
    "tests/test_first.py::test_above",
    "tests/test_first.py::test_sign",
    "tests/test_second.py::TestClamp::test_inside",
    "tests/test_second.py::test_text[a b]",
    "tests/test_second.py::test_text[[x]/y]",
    "tests/test_second.py::test_text[\\xe9'\"]",
    "tests/test_second.py::test_late",
)
PASSING_ALREADY = ("tests/test_first.py::test_below", "tests/test_first.py::test_sign")


class Blobs:
    """A store in memory."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        ref = "sha256:" + hashlib.sha256(data).hexdigest()
        self.data[ref] = data
        return ref

    def get(self, ref: str) -> bytes:
        return self.data[ref]


def make_task(image: str, blobs: Blobs, substrate: Substrate | None = None) -> Task:
    """`clamp` ignores its upper bound; every path may be changed."""
    verifier = VerifierSpec(
        fail_to_pass=tuple(name for name in EXPECTED if name not in PASSING_ALREADY),
        pass_to_pass=PASSING_ALREADY,
        expected=dict.fromkeys(EXPECTED, TestStatus.PASSED),
        arguments=("tests/test_first.py", "tests/test_second.py"),
        protected=blobs.put(pack_files(PROTECTED)),
        allowed=(".",),
        timeout_s=30,
    )
    return Task(
        id="numbers",
        origin=Origin(kind="procedural", source="x", revision="1", path="pkg/numbers.py", function="clamp"),
        problem=Problem(statement="clamp ignores its upper bound"),
        environment=Environment(image=image, tree="none", substrate=substrate),
        verifier=verifier,
        solution=blobs.put(patches.make_diff({"pkg/numbers.py": BUGGY}, {"pkg/numbers.py": FIXED})),
    )
