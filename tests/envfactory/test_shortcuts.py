"""Rules that do not read must not find the repair."""

from __future__ import annotations

import inspect
import random
import shlex
import textwrap

import pytest

from catalog.models import Candidate, CandidateSet
from envfactory.bugs import BugConfig, propose
from envfactory.candidates import CandidateConfig, draw, fit_weights
from envfactory.repair import BuggyWorkspace, RepairConfig, Search, make_pool
from envfactory.shortcuts import RULES, measure, pick_rate
from verifiers.operators import functions

REF = "sha256:" + "0" * 64


def made_up(number: int, right: int, operators: list[str]) -> CandidateSet:
    candidates = tuple(
        Candidate(
            operator=op, path=f"m{number % 5}.py", line=10 + i, before="a", after="b" * (i + 1), content=REF
        )
        for i, op in enumerate(operators)
    )
    passes = tuple(i == right for i in range(8))
    return CandidateSet(
        task_id=f"t{number}", candidates=candidates, passes_visible=passes, passes=passes, tried=1
    )


def test_a_planted_rule_is_found() -> None:
    rng = random.Random(1)
    sets = []
    for number in range(60):
        right = rng.randrange(8)
        operators = [
            "comparison_boundary" if i == right else rng.choice(["name_swap", "tuple_swap"]) for i in range(8)
        ]
        sets.append(made_up(number, right, operators))
    by_rule = {s.rule: s for s in measure(sets)}
    assert by_rule["operator most often right"].rate == 1.0
    assert by_rule["operator with best odds"].low > 0.8
    assert by_rule["first shown"].low < 0.1
    assert all(s.chance == 1 / 8 and s.n == 60 for s in by_rule.values())


def test_position_rules_by_hand() -> None:
    one = made_up(0, 7, ["name_swap"] * 8)
    assert pick_rate(one, [RULES["last line"](one, i) for i in range(8)]) == 1.0
    assert pick_rate(one, [RULES["first shown"](one, i) for i in range(8)]) == 0.0
    assert pick_rate(one, [0.0] * 8) == 1 / 8
    assert pick_rate(one, [RULES["middle line"](one, i) for i in range(8)]) == 0.0


def test_no_rule_finds_the_repairs_of_sampled_bugs() -> None:
    """Bugs of real functions, every bug taken as noticed, the way back as the repair."""
    files = {"shlex.py": inspect.getsource(shlex), "textwrap.py": inspect.getsource(textwrap)}
    executed = {
        name: [f"{name}::{span.qualname}" for span in functions(text)] for name, text in files.items()
    }
    searches: dict[str, Search] = {}
    for number, bug in enumerate(
        propose(files, executed, BugConfig(per_function=4, shares={"train": 0, "dev": 0, "test": 1}))
    ):
        workspace = BuggyWorkspace({bug.path: bug.edit.source}, ())
        pool = make_pool(workspace, {f"{bug.path}::{bug.function}": 1.0}, "", RepairConfig())
        right = [i for i, c in enumerate(pool) if c.edit.source == files[c.path]]
        assert right, f"no way back from {bug.edit}"
        searches[f"t{number}"] = Search(pool, (), right[0], "", {})
    weights = fit_weights(searches)
    sets = []
    for task_id, search in searches.items():
        shown = draw(search, task_id, weights, CandidateConfig())
        if shown is None:
            continue
        passes = tuple(i == search.found for i in shown)
        candidates = tuple(
            Candidate(
                operator=e.operator,
                path=search.pool[i].path,
                line=e.line,
                before=e.before,
                after=e.after,
                content=REF,
            )
            for i in shown
            for e in [search.pool[i].edit]
        )
        sets.append(
            CandidateSet(
                task_id=task_id, candidates=candidates, passes_visible=passes, passes=passes, tried=0
            )
        )
    assert len(sets) >= 50
    for shortcut in measure(sets):
        # two files only, so the bound is loose; with boltons every rule stays within 0.05 (docs/operators.md)
        assert shortcut.rate < shortcut.chance + 0.15, shortcut


def test_nothing_to_measure() -> None:
    assert measure([]) == []
    with pytest.raises(ValueError, match="max"):
        pick_rate(made_up(0, 0, ["name_swap"] * 8), [])
