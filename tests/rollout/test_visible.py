"""What counts as passing the visible tests, and what is remembered."""

import pytest

from catalog.models import TestStatus
from rollout.visible import GraderVisibleTests
from tests.rollout.fakes import make_task
from verifiers.runner import RunnerFailed, TestRun

TASK = make_task()
(WANTED,) = TASK.problem.visible_tests


class Runs:
    """Gives one prepared run, and counts."""

    def __init__(self, status=TestStatus.PASSED, **fields):
        tests = {} if status is None else {WANTED: status}
        self.result = TestRun(
            **{"tests": tests, "messages": {}, "outcome": "finished", "duration_s": 0.1} | fields
        )
        self.asked = []

    async def run(self, task, files, arguments):
        self.asked.append((task.id, dict(files), tuple(arguments)))
        return self.result


@pytest.mark.parametrize(
    ("fields", "passed", "message"),
    [
        ({}, True, ""),
        ({"status": TestStatus.FAILED, "messages": {WANTED: "E   no"}}, False, "E   no"),
        ({"status": TestStatus.XPASSED}, False, "it did not pass"),
        ({"status": None, "outcome": "timeout"}, False, "the test run ended by timeout"),
        ({"status": None, "outcome": "crashed", "messages": {"tests": "E  import"}}, False, "E  import"),
        ({"tampered": ("a report was forged",)}, False, "it did not pass"),
    ],
)
async def test_only_an_honest_pass_of_every_wanted_test_passes(fields, passed, message):
    result = await GraderVisibleTests(Runs(**fields), cache=True).run(TASK, {"a.py": b"x"})
    assert (result.passed, result.message) == (passed, message)


async def test_a_run_that_could_not_happen_is_no_failed_test_and_is_not_remembered():
    runs = Runs(status=None, outcome="infrastructure", notes=("no jail",))
    visible = GraderVisibleTests(runs, cache=True)
    for _ in range(2):
        with pytest.raises(RunnerFailed, match="no jail"):
            await visible.run(TASK, {})
    assert len(runs.asked) == 2


async def test_the_cache_knows_content_and_evaluation_has_none():
    runs = Runs()
    visible = GraderVisibleTests(runs, cache=True)
    results = [await visible.run(TASK, {"a.py": content}) for content in (b"1", b"2", b"1", None)]
    assert [result.cached for result in results] == [False, False, True, False]
    assert (visible.hits, visible.misses, len(runs.asked)) == (1, 3, 3)
    other = TASK.model_copy(update={"problem": TASK.problem.model_copy(update={"visible_tests": ("t::b",)})})
    assert not (await visible.run(other, {"a.py": b"1"})).cached
    fresh = GraderVisibleTests(runs, cache=False)
    assert not any([(await fresh.run(TASK, {"a.py": b"1"})).cached for _ in range(2)])
    assert fresh.misses == 2
