"""The prompt of the repair-choice game: what it shows, that it fits, that actions read back."""

from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.tokenizer import Tokenizer
from rollout.agents import choice_prompt
from rollout.agents.choice_prompt import Action, parse_action, render_choice, render_try, test_excerpt
from verifiers.operators import edits

TOKENIZER = Tokenizer()


class Shown(NamedTuple):
    path: str = "pkg/core.py"
    line: int = 7
    before: str = "    if a < b:"
    after: str = "    if a <= b:"


def count(text):
    return len(TOKENIZER.encode(text))


def render(
    effort=50, test="def test_a():\n    assert f(1) == 2\n", failure="E       AssertionError", n=8, **kw
):
    return render_choice(
        effort=effort,
        test_source=test,
        failure=failure,
        candidates=kw.pop("candidates", [Shown(line=n) for n in range(n)]),
        count=count,
        **kw,
    )


def test_the_whole_prompt():
    (system, effort), (user, body) = render(
        candidates=[Shown(), Shown(line=9, before="x = 1\nreturn a", after="x = 1\nreturn b")]
    )
    assert (system, user) == ("system", "user")
    assert effort == "Reasoning Effort: 50 (range 1-100; higher values request more thorough reasoning)"
    assert body == (
        "test\ndef test_a():\n assert f(1) == 2\nerror\nAssertionError\n"
        "1 core.py:7\n- if a < b:\n+ if a <= b:\n2 core.py:9\n- return a\n+ return b"
    )
    assert [role for role, _ in render(effort=None)] == ["user"]


def test_long_parts_are_cut_around_what_differs():
    before = "    return some_function(argument_one, argument_two, argument_three, argument_four) + offset"
    after = before.replace("+ offset", "- offset")
    (_, body) = render(candidates=[Shown(before=before, after=after)])[1]
    shown = [line for line in body.splitlines() if line[:2] in ("- ", "+ ")]
    assert shown[0].endswith("+ offset")
    assert shown[1].endswith("- offset")
    assert all(len(line) < 62 for line in shown)
    assert shown[0].startswith("- ~")


def test_docstrings_comments_and_addresses_are_left_out():
    test = 'def test_a():\n    """Long\n    story."""\n    # why\n\n    assert f() == 1\n'
    (_, body) = render(test=test, failure="E   assert <C object at 0x7f00aabbccdd> == 1")[1]
    assert "story" not in body
    assert "why" not in body
    assert "assert <C object at 0x> == 1" in body


LONG = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=200)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(LONG, LONG), min_size=8, max_size=8), LONG, st.lists(LONG, max_size=40))
def test_any_input_renders_and_numbers_all_candidates(lines, failure, test):
    candidates = [Shown(before=before, after=after) for before, after in lines]
    messages = render(candidates=candidates, failure=failure, test="\n".join(test))
    body = messages[1][1]
    assert [f"{n} core.py:7" in body.splitlines() for n in range(1, 9)] == [True] * 8
    assert messages == render(candidates=candidates, failure=failure, test="\n".join(test))


def test_real_edits_of_a_long_function_fit_the_budget():
    source = Path(choice_prompt.__file__).read_text()
    pool = edits(source, functions={"render_choice", "_cut_around", "_test_lines"})
    assert len(pool) >= 16
    long_test = test_excerpt(Path(__file__).read_text(), "x::test_the_whole_prompt")
    for start in range(0, len(pool) - 8, 8):
        candidates = [Shown("rollout/core.py", e.line, e.before, e.after) for e in pool[start : start + 8]]
        messages = render(candidates=candidates, test=long_test * 3, failure="E  " + "x == y and " * 40)
        assert sum(count(text) for _, text in messages) + 4 <= 420


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("try 1", Action("try", 1)),
        (" submit 8\n", Action("submit", 8)),
        ("submit 9", None),
        ("try 0", None),
        ("try 01", None),
        ("try  1", None),
        ("Try 1", None),
        ("submit 1 2", None),
        ("submit \u0661", None),
        ("", None),
    ],
)
def test_actions(text, action):
    assert parse_action(text, 8) == action
    if action:
        assert parse_action(str(action), 8) == action


def test_results_of_tries():
    assert render_try(3, True, "", 2) == "3 passes"
    long = render_try(3, False, "E   KeyError: " + "x" * 99, 1)
    assert long.startswith("3 fails: KeyError: xxx")
    assert len(long) < 75
    assert render_try(3, True, "", 0).endswith("no tries left")


def test_excerpts_by_id():
    source = (
        "import x\n\n@mark(1)\ndef test_a(n):\n    assert n\n\n\n"
        "class TestB:\n    def test_c(self):\n        assert 2\n"
    )
    assert test_excerpt(source, "t.py::test_a[1 - a::b]") == "@mark(1)\ndef test_a(n):\n    assert n"
    assert test_excerpt(source, "t.py::TestB::test_c") == "def test_c(self):\n    assert 2"
    assert test_excerpt(source, "t.py::test_missing") == source
    assert test_excerpt("def (", "t.py::test_a") == "def ("
