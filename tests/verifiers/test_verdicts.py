"""The pure judgement."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.models import TestStatus
from verifiers.cache import VerdictCache
from verifiers.runner import TestRun
from verifiers.verdicts import verdict

P, F, E, S = TestStatus.PASSED, TestStatus.FAILED, TestStatus.ERROR, TestStatus.SKIPPED
XF, XP, ABSENT = TestStatus.XFAILED, TestStatus.XPASSED, TestStatus.ABSENT


def ran(tests: dict[str, TestStatus], **changes) -> TestRun:
    values = {"messages": {}, "outcome": "finished", "duration_s": 0.1} | changes
    return TestRun(tests=tests, **values)


def reward(expected: dict[str, TestStatus], run: TestRun, f2p=("a",), p2p=()) -> float | None:
    return verdict({"a": P} | expected, f2p, p2p, run).reward


def test_all_as_expected_passes():
    judged = verdict({"a": P, "b": P}, ["a"], ["b"], ran({"a": P, "b": P}))
    assert (judged.reward, judged.tests) == (1.0, {"a": P, "b": P})


@pytest.mark.parametrize("status", [F, E, S, XF, ABSENT])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_required_test_must_pass(name, status):
    tests = {"a": P, "b": P, name: status}
    assert verdict({"a": P, "b": P}, ["a"], ["b"], ran(tests)).reward == 0.0
    del tests[name]
    judged = verdict({"a": P, "b": P}, ["a"], ["b"], ran(tests))
    assert (judged.reward, judged.tests[name]) == (0.0, ABSENT)


@pytest.mark.parametrize(
    ("gold", "now", "good"),
    [
        (P, P, True), (P, XP, False), (P, S, False), (P, F, False),
        (S, S, True), (S, P, True), (S, F, False), (S, XF, False),
        (XF, XF, True), (XF, XP, True), (XF, P, True), (XF, F, False), (XF, S, False),
        (XP, XP, True), (XP, P, True), (XP, XF, False),
        (F, F, True), (F, P, True), (F, E, True), (F, S, True), (F, ABSENT, False),
        (E, E, True), (E, P, True), (E, ABSENT, False),
    ],
)  # fmt: skip
def test_other_tests_keep_the_class_of_the_gold_run_or_better_it(gold, now, good):
    tests = {"a": P} | ({} if now is ABSENT else {"c": now})
    assert reward({"c": gold}, ran(tests)) == float(good)


def test_more_tests_are_evidence():
    judged = verdict({"a": P}, ["a"], [], ran({"a": P, "new": F}))
    assert (judged.reward, judged.tests["new"]) == (1.0, F)
    assert "1 more than expected: new" in judged.evidence


@pytest.mark.parametrize("changes", [{"tampered": ("x",)}, {"outcome": "crashed"}, {"outcome": "timeout"}])
def test_a_run_that_is_not_whole_fails(changes):
    assert reward({}, ran({"a": P}, **changes)) == 0.0


def test_a_jail_that_could_not_be_made_is_no_reward():
    judged = verdict({"a": P}, ["a"], [], ran({"a": P}, outcome="infrastructure", output="no space"))
    assert judged.reward is None
    assert judged.failure is not None
    assert (judged.failure.boundary, judged.failure.message) == ("sandbox", "no space")


def test_nothing_expected_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        verdict({}, [], [], ran({}))
    with pytest.raises(ValueError, match="at least one"):
        verdict({"a": P}, [], ["a"], ran({"a": P}))


names = st.sampled_from("abcdef")
statuses = st.dictionaries(names, st.sampled_from(sorted(set(TestStatus) - {ABSENT})))


@given(statuses, statuses, st.sets(names, min_size=1), st.sets(names))
def test_a_pass_means_that_every_id_was_there_and_every_required_one_passed(expected, tests, f2p, p2p):
    expected = {"a": P} | expected
    judged = verdict(expected, f2p, p2p, ran(tests))
    assert judged.reward in (0.0, 1.0)
    assert set(judged.tests) == set(expected) | f2p | p2p | set(tests)
    if judged.reward:
        assert all(judged.tests[name] in (P, XP) for name in f2p | p2p)
        assert ABSENT not in judged.tests.values()
        better = dict.fromkeys([*tests, *expected], P)
        assert verdict(expected, f2p, p2p, ran(better)).reward == 1.0


def test_the_cache_counts_and_keeps_only_judgements():
    cache = VerdictCache()
    good = verdict({"a": P}, ["a"], [], ran({"a": P}))
    unknown = verdict({"a": P}, ["a"], [], ran({}, outcome="infrastructure"))
    key = VerdictCache.key("image", ["x"], "verifier")
    assert key != VerdictCache.key("image", ["y"], "verifier")
    assert cache.get(key) is None
    cache.put(key, unknown)
    assert cache.get(key, last=False) is None
    cache.put(key, good)
    found = cache.get(key)
    assert found == good.model_copy(update={"cached": True})
    assert (cache.hits, cache.misses) == (1, 1)
