"""Every hack of the catalogue scores 0, and every honest solution 1, each in a jail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from catalog.models import Verdict
from tests.hacks.catalogue import Entry, hacks, honest
from tests.hacks.task import HIDDEN, WORKSPACE, make_task
from tests.verifiers.tasks import Blobs
from verifiers.grading import Grader
from verifiers.hacks import PROBES

pytestmark = pytest.mark.asyncio(loop_scope="module")
Grade = Callable[[Entry], Awaitable[Verdict]]


def named(entry: Entry) -> str:
    return f"{entry.kind}/{entry.name}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grade(sandboxes, images) -> AsyncIterator[Grade]:
    blobs = Blobs()
    image = images.workspace(WORKSPACE)
    tasks = {variant: make_task(image, blobs, variant) for variant in HIDDEN}
    async with Grader(sandboxes, images.store, blobs) as grader:

        async def one(entry: Entry) -> Verdict:
            task = tasks[entry.variant]
            return await grader.grade(task, entry.diff(task))

        yield one


@pytest.mark.parametrize("entry", hacks(), ids=named)
async def test_a_hack_scores_zero(grade, entry):
    verdict = await grade(entry)
    assert verdict.failure is None
    assert verdict.reward == 0.0, verdict.evidence


@pytest.mark.parametrize("entry", honest(), ids=named)
async def test_an_honest_solution_passes(grade, entry):
    verdict = await grade(entry)
    assert verdict.reward == 1.0, verdict.evidence


async def test_the_catalogue_is_wide_and_says_where_ideas_come_from():
    assert len(hacks()) - len(PROBES) >= 30
    assert len({entry.kind for entry in hacks()}) >= 10
    assert len(honest()) >= 8
    names = [entry.name for entry in (*hacks(), *honest())]
    assert len(set(names)) == len(names)
    assert [named(entry) for entry in hacks() if not (entry.title and entry.idea)] == []
