"""Altered tests: what is altered, and that only what must then fail is."""

from __future__ import annotations

import ast
import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.controls import plan, still_passing

PATH = "tests/test_it.py"


def altered(source: str, name: str = "test_it", **helpers: str) -> list[str]:
    """The altered versions of one test's file, or of its helper's, in order."""
    files = {PATH: source.encode()} | {f"tests/{key}.py": text.encode() for key, text in helpers.items()}
    return [text.decode() for c in plan(files, [f"{PATH}::{name}"]) for text in c.files.values()]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("assert f(1) == 2", r"assert f\(1\) == \d+"),
        ("assert 'a' == f(1)", r"assert 'b' == f\(1\)"),
        ("assert f(1) == [(1, 2), 3]", r"assert f\(1\) == \[\(1, \d+\), 3\]"),
        ("assert f(1) is None", r"assert not \(f\(1\) is None\)"),
        ("assert f(1), 'why'", r"assert not \(f\(1\)\), 'why'"),
        ("assert (\n        f(1)\n        == [True]\n    )", r"assert \(\n +f\(1\)\n +== \[False\]\n +\)"),
        ("self.assertEqual(f('é'), 'ü')", r"self.assertEqual\(f\('é'\), 'a'\)"),
        ("assert f(1) == want", r"assert f\(1\) == \(lambda v, n: [^\0]+\)\(want, \d+\)"),
    ],
)
def test_the_expectation_changes(body, expected):
    source = f"def test_it(self):\n    {body}\n"
    (text,) = altered(source)
    assert text != source
    assert re.fullmatch(expected, text.removeprefix("def test_it(self):\n    ").removesuffix("\n"))


def test_what_can_be_seen_is_altered_in_a_run_of_its_own():
    source = b"def test_a():\n    assert f() == 1\n\n\ndef test_b():\n    assert f() == want\n"
    quiet, loud = plan({PATH: source}, [f"{PATH}::test_a", f"{PATH}::test_b"])
    assert (quiet.tests, loud.tests) == ({f"{PATH}::test_a"}, {f"{PATH}::test_b"})
    assert b"lambda" not in quiet.files[PATH]


@pytest.mark.parametrize(
    "source",
    [
        "def test_it():\n    if f():\n        return\n    assert f() == 1\n",
        "@retried\ndef test_it():\n    assert f() == 1\n",
        "async def test_it():\n    assert f() == 1\n",
        "def test_it():\n    yield\n    assert f() == 1\n",
        "def test_it():\n    assert f() == 1\ntest_it = wrap(test_it)\n",
        "def test_it():\n    assert f() == 1\ndef test_it():\n    pass\n",
        "if x:\n    def test_it():\n        assert f() == 1\n",
        "def test_it(): assert_that(f())\n",
        "this is no Python",
        "def test_it():\n    assert f() == 1\r    # old\n",
    ],
)
def test_what_might_pass_all_the_same_is_left_alone(source):
    assert altered(source) == []


def test_a_test_without_a_plain_assertion_ends_in_a_failure():
    source = "def test_it():\n    for x in y:\n        assert x\n"
    assert altered(source) == [source + "    assert False\n"]


def test_an_expected_exception_becomes_another():
    (text,) = altered("def test_it():\n    with pytest.raises(ValueError, match='x'):\n        f()\n")
    assert "pytest.raises(BufferError, match=" in text


def test_helpers_are_followed_where_they_compare():
    source = "from tests.tools import check\n\n\ndef test_it():\n    check(f(), (1, 2))\n"
    helper = "def check(value, wanted):\n    value = list(value)\n    assert value == wanted\n"
    in_test, in_helper = altered(source, tools=helper)
    assert "check(f(), (1, 2))" not in in_test
    assert "lambda" in in_helper
    relative = source.replace("tests.tools", ".tools")
    assert len(altered(relative, tools=helper)) == 2
    shadowed = source.replace("test_it()", "test_it(check)")
    assert altered(shadowed, tools=helper) == [shadowed + "    assert False\n"]
    early = helper.replace("    assert", "    if not value:\n        return\n    assert")
    assert altered(source, tools=early) == [source + "    assert False\n"]


def test_only_the_tests_that_decide_are_altered_and_looked_at():
    source = b"def test_a():\n    assert f() == 1\n\n\ndef test_b():\n    assert f() == 2\n"
    (control,) = plan({PATH: source}, [f"{PATH}::test_b[x::y]", "elsewhere.py::test_c"])
    assert control.tests == {f"{PATH}::test_b"}
    assert b"f() == 1\n" in control.files[PATH]
    passed = [f"{PATH}::test_a", f"{PATH}::test_b[x::y]", f"{PATH}::test_b_more"]
    assert still_passing(control, passed) == [f"{PATH}::test_b[x::y]"]


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(values, st.sampled_from(["{!r}", "(0, {!r})[1]", "same({!r})"]))
def test_an_altered_value_differs_from_every_value_before(value, form):
    """Run as Python: the test passes as written, and fails when altered."""
    written = form.format(value)
    source = f"def same(x):\n    return x\n\n\ndef test_it():\n    assert given == {written}\n"
    for text in (source, *altered(source)):
        ast.parse(text)
        space = {"given": value}
        exec(text, space)
        expectation = contextlib.nullcontext() if text == source else pytest.raises(AssertionError)
        with expectation:
            space["test_it"]()
    assert len(altered(source)) == 1
