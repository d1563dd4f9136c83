"""Sampling of procedural bugs."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from envfactory.bugs import BugConfig, by_split, coverage, propose, split_files
from tests.envfactory.tiny import FILES, TESTS, TinyRunner
from verifiers.operators import OPERATORS


async def executed() -> dict[str, tuple[str, ...]]:
    return (await TinyRunner().run({}, list(TESTS), trace=True)).functions


async def test_proposals_are_reproducible_and_capped() -> None:
    config = BugConfig(per_function=4, operator_share=0.1, held_out_operators=())
    bugs = propose(FILES, await executed(), config)
    assert bugs == propose(FILES, await executed(), config)
    assert bugs != propose(FILES, await executed(), config.model_copy(update={"seed": 1}))
    assert max(Counter((b.path, b.function) for b in bugs).values()) <= 4
    for _, some in by_split(bugs):
        assert max(Counter(b.operator for b in some).values(), default=0) <= 5
    assert len({(b.path, b.edit.source) for b in bugs}) == len(bugs)
    assert all(OPERATORS[b.operator].invertible and b.tests for b in bugs)
    assert all(ast.parse(b.files[b.path]) and b.files[b.path].decode() != FILES[b.path] for b in bugs)
    # the first round offers one bug of every function of the split before any function gets its second
    test = [b.function for b in bugs if b.split == "test"]
    assert len(set(test[: len(set(test))])) == len(set(test))


async def test_splits_share_no_file_and_held_out_operators_stay_out_of_training() -> None:
    files = {
        f"p/m{i}.py": f"def f{i}(a, b):\n    x = a, b\n    b += 1\n    print(b)\n    return x[0] - b\n"
        for i in range(20)
    }
    tests = {f"t{i}": [f"p/m{i}.py::f{i}"] for i in range(20)}
    bugs = propose(files, tests, BugConfig(operator_share=1.0, per_function=20))
    split_of = {}
    for bug in bugs:
        assert split_of.setdefault(bug.path, bug.split) == bug.split
    assert Counter(split_of.values()) == {"train": 7, "dev": 2, "test": 11}
    held = set(BugConfig().held_out_operators) | {"return_add"}
    assert {b.operator for b in bugs if b.split != "test"}.isdisjoint(held)
    assert {"tuple_swap", "augmented_swap", "return_drop"} <= {b.operator for b in bugs if b.split == "test"}


def test_coverage_folds_inner_code_and_puts_specific_tests_first() -> None:
    traced = {"wide": ["a.py::f", "a.py::g", "a.py::h"], "narrow": ["a.py::f.<locals>.<listcomp>"]}
    assert coverage(traced)["a.py::f"] == ("narrow", "wide")


def test_files_are_dealt_out_by_weight() -> None:
    dealt = split_files({"big.py": 60, "b.py": 20, "c.py": 10, "d.py": 10}, BugConfig())
    assert dealt["big.py"] == "test"
    assert set(dealt.values()) == {"train", "dev", "test"}


def test_config_says_what_to_change() -> None:
    with pytest.raises(ValueError, match="nope"):
        BugConfig(held_out_operators=("nope",))
    with pytest.raises(ValueError, match="shares needs"):
        BugConfig(shares={"train": 1.0})
