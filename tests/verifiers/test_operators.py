"""Edits of real and of made-up functions: they parse, differ, repeat, and find their way back."""

from __future__ import annotations

import ast
import heapq
import inspect
import shlex
import textwrap
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.operators import OPERATORS, Edit, edits, functions, inverse, operator_prior

EVERY_KIND = '''\
import math


class Box:
    """A docstring that says x < y and True."""

    kind = 1 < 2

    @property
    def size(self):
        return self.high - self.low

    def clip(self, value: int = 3, strict: bool = False) -> "int":
        """Docstring with 1 + 1."""
        total = 0
        for i, item in enumerate(self.items):
            if item is None or i in self.skip:
                continue
            elif not strict and i == 4:
                break
            if value < self.low:
                total += self.low * 2 | 1
                value = min(value, self.high)
            elif value >= self.high:
                total -= self.high // 3
            else:
                total = len(item[1:]) + item[0] % 7
                value = self.items[i - 1]
        total *= 2
        if total > 10 and not value:
            raise ValueError("too high")
        return max(total, value) if strict else list(range(total - 1))


def pick(options, key="a"):
    first, last = options["a"], options.get("b")
    options.update({"a": first, "b": last})
    if first:
        return True
    print(key)
    if last and key:
        first = last
    if last and key:
        return last[:-1], math.floor(first)
    first = first & 3
    first += last
    print(first)

    def inner(text):
        return text.lstrip() == "é" and text[2:4]

    return inner(key)
'''
REAL = {"kinds": EVERY_KIND, "heapq": inspect.getsource(heapq), "shlex": inspect.getsource(shlex)}


def dump(text: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile(text, "<test>", "exec")
        return ast.dump(ast.parse(text))


def stripped(text: str) -> str:
    """The tree without docstrings and annotations."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if (
            isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:]
    return ast.dump(tree)


def way_back(edit: Edit) -> bool:
    back = edits(edit.source, functions={edit.function}, operators=inverse(edit.operator))
    return any(b.source == edit.original for b in back)


def test_every_kind_is_offered_somewhere() -> None:
    seen = {edit.operator for edit in edits(EVERY_KIND)}
    assert seen == OPERATORS.keys()
    assert len(OPERATORS) >= 16
    assert all(op.name == name and op.doc for name, op in OPERATORS.items())
    assert all(set(op.inverse) <= OPERATORS.keys() for op in OPERATORS.values())


@pytest.mark.parametrize("module", REAL)
def test_edits_parse_differ_and_stay_inside_their_function(module: str) -> None:
    source = REAL[module]
    before, plain = dump(source), stripped(source)
    spans = functions(source)
    for edit in edits(source)[:: 1 if module == "kinds" else 29]:
        assert dump(edit.source) != before, edit
        assert stripped(edit.source) != plain, f"only a docstring or an annotation changed: {edit}"
        old, new = source.split("\n"), edit.source.split("\n")
        first = next(i for i, (a, b) in enumerate(zip(old, new, strict=False), 1) if a != b)
        assert any(s.qualname == edit.function and s.start_line <= first <= s.end_line for s in spans), edit
        assert edit.line <= first < edit.line + max(1, len(edit.before.split("\n")))


@pytest.mark.parametrize("module", REAL)
def test_every_invertible_edit_has_a_way_back(module: str) -> None:
    offered: dict[str, list[Edit]] = {}
    for edit in edits(REAL[module]):
        if OPERATORS[edit.operator].invertible:
            offered.setdefault(edit.operator, []).append(edit)
    # a few of each operator, spread over the file: all of them were tried once (docs/operators.md)
    some = [edit for many in offered.values() for edit in many[:: max(1, len(many) // 3)]]
    lost = [edit for edit in some if not way_back(edit)]
    assert not lost


def test_before_and_after_are_the_changed_lines() -> None:
    (edit,) = edits(EVERY_KIND, functions={"Box.clip"}, operators={"elif_split"})[:1]
    assert (edit.before, edit.after) == ("elif value >= self.high:", "if value >= self.high:")
    assert EVERY_KIND.split("\n")[edit.line - 1].strip() == edit.before
    swapped = edits(EVERY_KIND, functions={"pick"}, operators={"statement_swap"})[0]
    assert swapped.before.split("\n")[::-1] == swapped.after.split("\n")


def test_functions_and_operators_narrow_the_same_list() -> None:
    everything = edits(EVERY_KIND)
    inner = edits(EVERY_KIND, functions={"pick.<locals>.inner"})
    assert inner
    assert inner == [e for e in everything if e.function == "pick.<locals>.inner"]
    assert set(inner) < set(edits(EVERY_KIND, functions={"pick"}))
    chosen = {"tuple_swap", "name_swap"}
    assert edits(EVERY_KIND, operators=chosen) == [e for e in everything if e.operator in chosen]
    assert edits(EVERY_KIND) == everything
    assert edits(EVERY_KIND, functions=()) == []


def test_text_outside_the_edit_stays_byte_for_byte() -> None:
    source = 'def f(a):\r\n    # ünïcode <\r\n    return ("é", a  <  1)   # why\r\n'
    (edit,) = edits(source, operators={"comparison_boundary"})
    assert edit.source == source.replace("a  <  1", "a  <=  1")


def test_bad_input() -> None:
    assert edits("def f(:") == []
    with pytest.raises(ValueError, match="unknown operators \\['nope'\\]"):
        edits("x = 1", operators={"nope"})
    with pytest.raises(ValueError, match="unknown operators"):
        operator_prior({"nope": 1})


def test_nested_and_repeated_names() -> None:
    source = textwrap.dedent(
        """
        class A:
            @property
            def x(self):
                return 1

            @x.setter
            def x(self, value):
                def check():
                    return value < 1
                self.y = check()
        """
    )
    assert [s.qualname for s in functions(source)] == ["A.x", "A.x", "A.x.<locals>.check"]
    assert {e.line for e in edits(source, functions={"A.x"}, operators={"constant_increment"})} == {5, 10}
    (nested,) = edits(source, functions={"A.x.<locals>.check"}, operators={"comparison_boundary"})
    assert (nested.line, nested.function) == (10, "A.x.<locals>.check")


def test_prior_is_a_distribution_that_follows_the_table() -> None:
    prior = operator_prior({"comparison_boundary": 8, "name_swap": 2})
    assert sum(prior.values()) == pytest.approx(1)
    assert prior["comparison_boundary"] > prior["name_swap"] > prior["tuple_swap"] > 0
    assert len(set(operator_prior().values())) == 1


atoms = st.sampled_from(
    ["a", "b", "n", "xs", "self.p", "self.q", "0", "1", "-1", "True", "'k'", "len(xs)", "f(a, b)"]
)


def _expressions(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = st.sampled_from(
        ["+", "-", "*", "//", "%", "&", "|", "<<", "**", "<", ">=", "==", "is", "not in", "and", "or"]
    )
    pair = st.tuples(children, binary, children)
    return st.one_of(
        pair.map(" ".join),
        pair.map(lambda p: f"({' '.join(p)})"),
        children.map(lambda e: f"(not {e})"),
        children.map(lambda e: f"-({e})"),
        st.tuples(children, children).map(lambda p: f"xs[{p[0]}:{p[1]}]"),
        children.map(lambda e: f"xs[{e}]"),
        st.tuples(children, children, children).map(lambda p: f"({p[0]} if {p[1]} else {p[2]})"),
        st.tuples(children, children).map(lambda p: f"({p[0]}, {p[1]})"),
        children.map(lambda e: f"[x for x in range({e}) if {e}]"),
        children.map(lambda e: f"f'{{{e}}}'" if "'" not in e else e),
    )


def _statements(children: st.SearchStrategy[list[str]]) -> st.SearchStrategy[list[str]]:
    def indent(lines: list[str]) -> list[str]:
        return ["    " + line for line in lines]

    test = expressions
    return st.one_of(
        st.tuples(children, children).map(lambda p: p[0] + p[1]),
        st.tuples(test, children).map(lambda p: [f"if {p[0]}:", *indent(p[1])]),
        st.tuples(test, children, children).map(
            lambda p: [f"if {p[0]}:", *indent(p[1]), "else:", *indent(p[2])]
        ),
        st.tuples(test, children, test, children).map(
            lambda p: [f"if {p[0]}:", *indent(p[1]), f"elif {p[2]}:", *indent(p[3])]
        ),
        st.tuples(test, children).map(lambda p: [f"for a in {p[0]}:", *indent(p[1])]),
        st.tuples(test, children).map(lambda p: [f"while {p[0]}:", *indent(p[1]), "    break"]),
    )


nested = st.recursive(atoms, _expressions, max_leaves=6)
expressions = st.one_of(nested, nested.map(lambda e: f"not {e}"))
simple = st.one_of(
    expressions.map(lambda e: [f"a = {e}"]),
    expressions.map(lambda e: [f"b += {e}"]),
    expressions.map(lambda e: [f"return {e}"]),
    expressions.map(lambda e: [f"f({e})"]),
    st.tuples(expressions, expressions).map(lambda p: [f"a, b = {p[0]}, {p[1]}"]),
    expressions.map(lambda e: [f"raise ValueError({e})"]),
)
bodies = st.recursive(simple, _statements, max_leaves=4)


@settings(max_examples=20, deadline=None)
@given(body=bodies, method=st.booleans(), data=st.data())
def test_made_up_functions(body: list[str], method: bool, data: st.DataObject) -> None:
    lines = ["def f(self, a, b, n=1, *xs):", *("    " + line for line in body)]
    if method:
        lines = ["class C:", *("    " + line for line in lines)]
    source = "\n".join(lines) + "\n"
    before = dump(source)
    offered = edits(source)
    for edit in offered:
        assert dump(edit.source) != before, edit
    undoable = [edit for edit in offered if OPERATORS[edit.operator].invertible]
    if undoable:
        edit = data.draw(st.sampled_from(undoable))
        assert way_back(edit), edit
