"""Procedural bugs: which edits of which functions to break a repository with.

    files, functions of each test -> splits by file -> (function, operator, edit) in a seeded order

Nothing is run here: the pipeline takes proposals in order, runs the tests on each and keeps those that
fail for the right reason until it has enough. A split is a property of the file, so train, dev and test
share no file; the operators reserved for held-out files occur only in the test split. Left out: several
bugs at once, and edits without a way back (`statement_drop` and its like), which no single edit repairs.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from verifiers.operators import OPERATORS, Edit, edits, functions

Split = Literal["train", "dev", "test"]


class BugConfig(BaseModel):
    """Settings of the sampling."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 0
    """The same seed, files and tests give the same proposals in the same order."""
    per_function: PositiveInt = 6
    """Most proposals of one function."""
    operator_share: PositiveFloat = 0.15
    """Most proposals of one operator, as a share of all proposals of its split (and at least 5)."""
    taste: dict[str, float] = {"name_swap": 0.2, "statement_swap": 0.4, "return_drop": 0.4, "return_add": 0.4}
    """Factors on operators that would crowd out the rest; the others have 1."""
    imbalance: PositiveFloat = 8.0
    """Bound on the factor that balances an operator against its inverse (`balance`)."""
    shares: dict[Split, float] = {"train": 0.35, "dev": 0.1, "test": 0.55}
    """Share of the covered functions that each split aims at; whole files are dealt out."""
    held_out_operators: tuple[str, ...] = (
        "tuple_swap",
        "branch_swap",
        "exception_swap",
        "augmented_swap",
        "return_drop",
    )
    """Operators that occur in the test split only."""
    min_lines: NonNegativeInt = 3
    """Shorter functions are left alone."""

    @model_validator(mode="after")
    def _sound(self) -> BugConfig:
        unknown = set(self.held_out_operators) - OPERATORS.keys()
        if unknown:
            raise ValueError(f"held_out_operators: {sorted(unknown)} are not operators")
        if self.taste.keys() - OPERATORS.keys() or min(self.taste.values(), default=1) < 0:
            raise ValueError("taste: needs names of operators and factors that are not negative")
        if set(self.shares) != {"train", "dev", "test"} or min(self.shares.values()) < 0:
            raise ValueError("shares needs train, dev and test, none of them negative")
        if not sum(self.shares.values()):
            raise ValueError("shares: at least one split must be larger than 0")
        return self


@dataclass(frozen=True)
class Bug:
    """One proposal: a file with one edit, and the tests that execute the edited function."""

    path: str
    edit: Edit
    split: Split
    tests: tuple[str, ...]
    """Tests that executed the function, the most specific ones first (fewest other functions)."""

    @property
    def function(self) -> str:
        return self.edit.function

    @property
    def operator(self) -> str:
        return self.edit.operator

    @property
    def files(self) -> dict[str, bytes]:
        """What to lay over the clean workspace."""
        return {self.path: self.edit.source.encode()}

    @property
    def slug(self) -> str:
        """A readable part for the task's id; it does not name the operator."""
        name = re.sub(r"[^a-z0-9]+", "-", f"{self.path.rsplit('/', 1)[-1]}-{self.function}".lower())
        return name.strip("-")


def named_function(traced: str) -> str:
    """`path::qualname` of the outermost function around a traced one: tests see inner ones through it."""
    return traced.partition(".<locals>")[0]


def coverage(executed: Mapping[str, Collection[str]]) -> dict[str, tuple[str, ...]]:
    """From test -> functions to function -> tests, the tests with the fewest functions first."""
    size = {test: len(traced) for test, traced in executed.items()}
    tests: dict[str, set[str]] = {}
    for test, traced in executed.items():
        for name in traced:
            tests.setdefault(named_function(name), set()).add(test)
    return {name: tuple(sorted(found, key=lambda t: (size[t], t))) for name, found in sorted(tests.items())}


def split_files(weights: Mapping[str, int], config: BugConfig) -> dict[str, Split]:
    """Deal whole files out: heaviest first (equal ones in seeded order), each to the split that lacks most.

    `weights`: covered functions of each file.
    """
    rng = random.Random(f"splits {config.seed}")
    paths = sorted(weights)
    rng.shuffle(paths)
    paths.sort(key=lambda path: -weights[path])
    scale = sum(weights.values()) / sum(config.shares.values())
    missing: dict[Split, float] = {
        split: share * scale for split, share in config.shares.items() if share > 0
    }
    dealt: dict[str, Split] = {}
    for path in paths:
        split = max(missing, key=lambda s: (missing[s], s))
        dealt[path] = split
        missing[split] -= weights[path]
    return dict(sorted(dealt.items()))


def propose(
    files: Mapping[str, str],
    executed: Mapping[str, Collection[str]],
    config: BugConfig | None = None,
) -> list[Bug]:
    """All proposals in the order in which to try them: a round gives every function at most one.

    Args:
        files: source files, workspace-relative path -> text.
        executed: test id -> `path::qualname` of the functions that it executed (`TestRun.functions`).
    """
    config = config or BugConfig()
    tests_of = coverage(executed)
    spans = {
        (path, span.qualname)
        for path, text in files.items()
        for span in functions(text)
        if span.lines >= config.min_lines and f"{path}::{span.qualname}" in tests_of
    }
    weights = Counter(path for path, _ in spans)
    splits = split_files(weights, config)
    bugs: list[Bug] = []
    for split in sorted(config.shares):
        chosen = sorted(place for place in spans if splits[place[0]] == split)
        bugs += _of_split(split, chosen, files, tests_of, config)
    return bugs


def _of_split(
    split: Split,
    places: list[tuple[str, str]],
    files: Mapping[str, str],
    tests_of: Mapping[str, tuple[str, ...]],
    config: BugConfig,
) -> list[Bug]:
    rng = random.Random(f"bugs {config.seed} {split}")
    rng.shuffle(places)
    allowed = [
        op.name
        for op in OPERATORS.values()
        if op.invertible and (split == "test" or op.name not in _reserved(config))
    ]
    queues: dict[tuple[str, str], list[Edit]] = {}
    for path, function in places:
        offered = _distinct(edits(files[path], functions={function}, operators=allowed))
        weights = balance(Counter(edit.operator for edit in offered), config)
        queues[path, function] = _in_weighted_order(offered, weights, rng)
    cap = max(5, int(config.operator_share * config.per_function * len(places)))
    used: Counter[str] = Counter()
    bugs: list[Bug] = []
    for _ in range(config.per_function):
        for place in places:
            edit = next((edit for edit in queues[place] if used[edit.operator] < cap), None)
            if edit is not None:
                queues[place].remove(edit)
                used[edit.operator] += 1
                bugs.append(Bug(place[0], edit, split, tests_of[f"{place[0]}::{place[1]}"]))
    return bugs


def balance(counts: Mapping[str, int], config: BugConfig) -> dict[str, float]:
    """Weight of one edit of each operator in a function that offers so many edits of each.

    A bug made by `negation_add` is repaired by `negation_drop`. Code offers eight times as many places for
    the first as for the second, so with equal weights nearly every `not` that can be dropped would be a
    bug, and dropping it the answer. Weighted by edits of the inverse / edits of the operator, function by
    function, a repair has other edits of its kind around it: one that would stand alone is not proposed.
    """
    weights: dict[str, float] = {}
    for name, count in counts.items():
        back = sum(counts.get(other, 0) for other in OPERATORS[name].inverse)
        weights[name] = config.taste.get(name, 1.0) * min(config.imbalance, back / count)
    return weights


def _reserved(config: BugConfig) -> set[str]:
    """Reserved operators and those that undo them: a pair must not be split between train and test."""
    held = set(config.held_out_operators)
    return held | {name for name in OPERATORS if held & set(OPERATORS[name].inverse)}


def _distinct(offered: list[Edit]) -> list[Edit]:
    """One edit for each text."""
    return list({edit.text: edit for edit in reversed(offered)}.values())[::-1]


def _in_weighted_order(offered: list[Edit], weights: Mapping[str, float], rng: random.Random) -> list[Edit]:
    """A weighted draw without replacement (Efraimidis and Spirakis, 2006); weight 0 is never drawn."""
    keys = [
        (-math.log(rng.uniform(1e-12, 1)) / weights[edit.operator], i)
        for i, edit in enumerate(offered)
        if weights[edit.operator] > 0
    ]
    return [offered[i] for _, i in sorted(keys)]


def by_split(bugs: Collection[Bug]) -> Iterator[tuple[Split, list[Bug]]]:
    """Proposals of each split in their order."""
    for split in ("train", "dev", "test"):
        yield split, [bug for bug in bugs if bug.split == split]
