"""Masks by age, and the dispatch rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.trajectory import Trajectory
from rollout.config import ServiceConfig
from rollout.dispatch import Dispatcher
from rollout.staleness import bound_ratio, histogram, loss_mask, off_policy_ratio


def trajectory(versions, id="t"):
    n = len(versions)
    return Trajectory(
        id=id,
        task_id="t",
        run_id="r",
        agent="a",
        policy="p",
        token_ids=(0,) * n,
        sampled=tuple(v is not None for v in versions),
        logprobs=tuple(None if v is None else -1.0 for v in versions),
        versions=tuple(versions),
    )


def test_only_sampled_tokens_within_the_bound_bear_loss():
    sample = trajectory([None, 1, 2, None, 3, 5])
    assert loss_mask(sample, 5, 2) == (False, False, False, False, True, True)
    assert loss_mask(sample, 5, 0) == (False, False, False, False, False, True)
    counts = histogram([sample], [loss_mask(sample, 5, 3)], 5)
    assert counts == {0: 1, 2: 1, 3: 1}
    assert off_policy_ratio(counts) == pytest.approx(2 / 3)
    assert off_policy_ratio({}) == 0.0


VERSIONS = st.lists(st.none() | st.integers(0, 4), min_size=1, max_size=12)


@given(st.lists(VERSIONS, min_size=1, max_size=4), st.floats(0, 1), st.integers(0, 4))
def test_the_ratio_bound_holds_and_masks_no_more_than_it_must(rows, bound, staleness):
    samples = [trajectory(row) for row in rows]
    masks = [loss_mask(sample, 4, staleness) for sample in samples]
    before = histogram(samples, masks, 4)
    bounded, cost = bound_ratio(samples, masks, 4, bound)
    after = histogram(samples, bounded, 4)
    assert off_policy_ratio(after) <= bound + 1e-9
    assert after.get(0, 0) == before.get(0, 0)  # a fresh token is never masked
    assert sum(before.values()) - sum(after.values()) == cost
    if cost:  # one stale token more would be too many
        stale = sum(n for age, n in after.items() if age) + 1
        assert stale / (stale + after.get(0, 0)) > bound - 1e-9
        masked_ages = [age for age in before if before[age] > after.get(age, 0)]
        assert min(masked_ages) >= max((age for age in after if age), default=0)


def test_a_prompt_starts_when_as_many_samples_have_finished():
    rule = Dispatcher(ServiceConfig(in_flight=10, samples=4, batch_prompts=4, max_staleness=4))
    assert rule.take(4, 0)
    assert rule.take(4, 4)
    assert not rule.take(4, 8)
    rule.finished()
    assert not rule.take(4, 7)
    rule.finished()
    assert rule.take(4, 6)
    assert rule.waited == 0


@pytest.mark.parametrize(
    ("ratio", "staleness", "limit"), [(0.0, 3, 8), (0.5, 3, 12), (1.0, 0, 8), (1.0, 1, 16), (1.0, 2, 24)]
)
def test_samples_beyond_the_batch_are_bounded(ratio, staleness, limit):
    config = ServiceConfig(
        in_flight=64, samples=4, batch_prompts=2, max_staleness=staleness, off_policy_ratio=ratio
    )
    rule = Dispatcher(config)
    outstanding = 0
    while rule.take(4, outstanding):
        outstanding += 4
    assert outstanding == rule.limit() == limit
    assert rule.waited == 1
