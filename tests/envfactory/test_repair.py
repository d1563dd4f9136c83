"""The repair solver and the candidate sets, on a tiny package whose tests run in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from catalog.blobs import Blobs, blob_ref
from catalog.models import TestStatus
from envfactory.bugs import Bug, BugConfig, propose
from envfactory.candidates import CandidateConfig, choose, demonstration, draw, fit_weights
from envfactory.repair import (
    BuggyWorkspace,
    RepairConfig,
    Search,
    localise,
    ochiai,
    record,
    repair,
    restore,
    traceback_lines,
)
from tests.envfactory.tiny import FILES, TinyRunner

BROKEN = FILES["tiny/numbers.py"].replace("len(items) - size + 1", "len(items) - size")


def problem(files: Mapping[str, str], visible: tuple[str, ...]) -> BuggyWorkspace:
    return BuggyWorkspace(files, visible, others=("t.py",), test_source=visible[0])


async def bugs() -> list[tuple[Bug, dict[str, str], tuple[str, ...]]]:
    """Bugs that some test notices, with the buggy files and the failing tests."""
    executed = (await TinyRunner().run({}, ["t.py"], trace=True)).functions
    found = []
    for bug in propose(FILES, executed, BugConfig(per_function=5)):
        files = FILES | {bug.path: bug.edit.source}
        run = await TinyRunner(files).run({}, ["t.py"])
        failing = tuple(t for t, s in run.tests.items() if s is not TestStatus.PASSED)
        if failing and run.outcome == "finished":
            found.append((bug, files, failing))
    return found


async def test_a_bug_is_found_and_the_search_is_written_down() -> None:
    files = FILES | {"tiny/numbers.py": BROKEN}
    task = problem(files, ("t.py::windows",))
    search = await repair(task, TinyRunner(files))
    assert search.found is not None
    assert search.pool[search.found].edit.function == "windows"
    steps = search.trajectory()
    assert [s["action"] for s in steps] == ["try"] * len(search.tries) + ["submit"]
    assert steps[-1]["index"] == search.found
    assert search == await repair(task, TinyRunner(files))
    written = json.loads(json.dumps(record(search)))
    assert restore(written, task) == search
    other = await repair(task, TinyRunner(files), RepairConfig(seed=5))
    assert [c.key for c in other.pool] != [c.key for c in search.pool]
    serial = await repair(task, TinyRunner(files), RepairConfig(parallel=1))
    assert serial.found == search.found


async def test_every_operator_with_a_way_back_is_repaired() -> None:
    tried = 0
    for bug, files, failing in await bugs():
        search = await repair(problem(files, failing), TinyRunner(files), RepairConfig(budget=1000))
        assert search.found is not None, bug
        # the clean text is in the pool whenever the bug's function is suspicious: closure under inverse
        clean = [c for c in search.pool if c.edit.source == FILES[c.path]]
        assert clean, bug
        tried += 1
    assert tried >= 20


async def test_no_success_has_a_reason() -> None:
    clean = await repair(problem(FILES, ("t.py::total",)), TinyRunner())
    assert clean.found is None
    assert clean.reason == "no visible test fails"
    wrong = FILES["tiny/numbers.py"].replace("result += value", "result += value * value + 17")
    files = FILES | {"tiny/numbers.py": wrong}
    hard = await repair(problem(files, ("t.py::total",)), TinyRunner(files), RepairConfig(budget=10))
    assert hard.found is None
    assert hard.reason.startswith("no success in 10 of ")


def test_ochiai_by_hand() -> None:
    scores = ochiai([["f", "g"]], [["g"], ["g", "h"]])
    assert scores == {"f": 1.0, "g": pytest.approx(1 / 3**0.5)}


def test_traceback_and_mention_raise_suspicion() -> None:
    message = 'tiny/numbers.py:14: TypeError\n  File "/w/tiny/words.py", line 3, in initials'
    assert traceback_lines(message, FILES) == {"tiny/numbers.py": {14}, "tiny/words.py": {3}}
    executed = {"x": ["tiny/numbers.py::total", "tiny/numbers.py::mean", "tiny/numbers.py::clamp"]}
    task = BuggyWorkspace(FILES, ("x",), test_source="assert mean([1]) == 1")
    scores = localise(task, executed, {}, message, RepairConfig())
    assert scores["tiny/numbers.py::total"] == scores["tiny/numbers.py::mean"] == 3.0
    assert scores["tiny/numbers.py::clamp"] == 1.0


async def sets(blobs: Blobs) -> list[tuple[Search, object, Bug, int]]:
    found = []
    searched = []
    for bug, files, failing in await bugs():
        task = problem(files, failing[:1])
        searched.append((bug, files, failing, task, await repair(task, TinyRunner(files))))
    weights = fit_weights({f"task-{i}": s for i, (*_, s) in enumerate(searched)})
    for number, (bug, files, _, task, search) in enumerate(searched):

        async def judge(changed: Mapping[str, bytes | None], files: dict[str, str] = files) -> bool:
            run = await TinyRunner(files).run(changed, ["t.py"])
            return all(s is TestStatus.PASSED for s in run.tests.values())

        runner = TinyRunner(files)
        chosen = await choose(f"task-{number}", task, search, runner, judge, blobs, weights)
        found.append((search, chosen, bug, runner.runs))
    return found


async def test_candidate_sets() -> None:
    blobs = Blobs("memory://candidates")
    results = await sets(blobs)
    kept = [chosen for _, chosen, _, _ in results if chosen.candidates]
    assert len(kept) >= 10
    for search, chosen, _, _ in results:
        if chosen.candidates is None:
            assert chosen.reason.split(":")[0] in ("none passes", "ambiguous", "search", "pool")
            continue
        one = chosen.candidates
        assert len(one.candidates) == 8
        assert 1 <= sum(one.passes) <= 2
        assert all(seen for seen, passed in zip(one.passes_visible, one.passes, strict=True) if passed)
        assert len({c.content for c in one.candidates}) == 8
        assert sorted(chosen.order) == list(range(8))
        for candidate in one.candidates:
            text = blobs.get(candidate.content).decode()
            assert blob_ref(text.encode()) == candidate.content
            assert text != search.pool[0].edit.original
        steps = demonstration(one, chosen.order, tries=8)
        if steps:
            assert steps[-1]["action"] == "submit"
            assert one.passes[steps[-1]["candidate"]]
            assert [s["passed"] for s in steps[:-1]] == [False] * (len(steps) - 2) + [True]


async def test_the_place_of_the_right_one_depends_on_the_task_alone() -> None:
    files = FILES | {"tiny/numbers.py": BROKEN}
    search = await repair(problem(files, ("t.py::windows",)), TinyRunner(files))
    places = []
    for number in range(400):
        shown = draw(search, f"t{number}", {}, CandidateConfig())
        assert shown == draw(search, f"t{number}", {}, CandidateConfig())
        places.append(shown.index(search.found))
    counts = [places.count(i) for i in range(8)]
    assert max(counts) < 80, counts
    assert min(counts) > 25, counts


async def test_left_out_with_a_reason() -> None:
    files = FILES | {"tiny/numbers.py": BROKEN}
    task = problem(files, ("t.py::windows",))
    search = await repair(task, TinyRunner(files))

    async def verdict(value: bool | None) -> str:
        async def judge(changed: Mapping[str, bytes | None]) -> bool | None:
            return value

        blobs = Blobs("memory://refused")
        return (await choose("t", task, search, TinyRunner(files), judge, blobs, {})).reason

    assert (await verdict(None)).startswith("infrastructure")
    assert (await verdict(False)).startswith("none passes")
