import sys

from envfactory import interface, statement
from envfactory.interface import symbols
from envfactory.layout import Layout
from envfactory.trees import File

CORE = '''\
class Box:
    """A box.

    It holds things.
    """

    def put(self, thing, *, gently: bool = False) -> int:
        """Put a thing in; the number of things."""
        return 1 + thing

    def _hidden(self): ...


async def fetch(url): ...
'''
TEST = "def test_put():\n    box = core.Box()\n    assert box.put(3) == 4\n"
ID = "tests/test_core.py::test_put"


def text_for(seed: str = "a", message: str = "E   assert 5 == 4\n") -> str:
    about = interface.subject(TEST, {"core": symbols(CORE, "pkg.core")}, "test_put")
    return statement.procedural(
        "pkg", [ID], {ID: message, "tests/t.py::test_hidden": "SECRET"}, about=about, seed=seed
    )


def test_a_bug_is_told_by_its_test_and_the_documentation() -> None:
    text = text_for()
    for part in (
        f"python -m pytest {ID}",
        "E   assert 5 == 4",
        "`pkg.core.Box.put`",
        "> Put a thing in",
        "one test",
    ):
        assert part in text
    assert "SECRET" not in text
    assert "1 + thing" not in text


def test_texts_depend_on_nothing_but_their_inputs() -> None:
    line = f"at <Box object at ADDRESS> in /tmp/pytest-of-USER/x {sys.base_prefix}/lib/y.py:3 in 0.SECONDSs\n"
    one = (
        line.replace("ADDRESS", "0x7f001122aabb").replace("USER", "a").replace("SECONDS", "12") + "     ^^^\n"
    )
    two = line.replace("ADDRESS", "0x7f9988776655").replace("USER", "b").replace("SECONDS", "3")
    assert text_for(message=one) == text_for(message=two)
    assert sys.base_prefix not in text_for(message=one)
    assert len({text_for(seed=str(i)) for i in range(40)}) > 6


def test_long_messages_keep_their_end_and_cannot_close_the_block() -> None:
    message = "".join(f"line {i}\n" for i in range(999)) + "```\nE   the end"
    shown = statement.stable_message(message)
    assert shown.endswith("'''\nE   the end")
    assert len(shown) <= 1300


def test_strange_ids_are_quoted_for_the_shell() -> None:
    test = "tests/test_a.py::test_b[x y;$z]"
    assert f"pytest '{test}'" in statement.failing_behaviour([test], {})


def test_change_logs_lose_references_and_quotations() -> None:
    lines = [
        "## 2.1.0 (2026-01-02)",
        "2.1.0",
        "=====",
        "- Fixed `put` for [empty boxes](https://x.example/1), closes #12 ([#34](https://x.example/34))",
        "  when nothing is in it",
        "* Uses `return 1 + thing` inside",
        "Co-authored-by: A <a@b>",
        "- other: see deadbeefcafe",
        "[box]: https://x.example/2",
    ]
    notes = statement.clean_notes(lines, gold="        return 1 + thing\n")
    assert notes == ["Fixed `put` for empty boxes, when nothing is in it", "other: see"]
    assert statement.clean_notes(lines, gold="", mentions=["put"]) == notes[:1]


def test_interfaces_show_only_public_names_that_tests_use() -> None:
    layout = Layout("src", ("src/pkg",), ())
    before = {"src/pkg/core.py": File(CORE.replace(", *, gently: bool = False", "").encode())}
    after = {"src/pkg/core.py": File(CORE.encode())}
    found = interface.changed_interface(
        before, after, ["src/pkg/core.py"], layout, {"put", "fetch", "_hidden"}
    )
    assert interface.render(found) == "pkg.core.Box:\n    def put(self, thing, *, gently: bool=False) -> int"
    assert interface.changed_interface({}, after, ["src/pkg/core.py"], layout, {"fetch"})[0].signature == (
        "async def fetch(url)"
    )
    assert symbols("def (", "x") == {}


def test_the_subject_is_the_symbol_that_the_test_is_named_after() -> None:
    sources = {"core": symbols(CORE + '\n\ndef put_all():\n    """All."""\n', "pkg.core")}
    found = interface.subject("core.put_all(core.Box())", sources, "test_put_all_of_it")
    assert found is not None
    assert found.name == "put_all"
    assert interface.subject("nothing(1)", sources, "test_put") is None
