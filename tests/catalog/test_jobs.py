"""The queue that needs no service, inline, in threads and in processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from catalog.errors import UserError
from catalog.jobs import JobFailed, LocalQueue, job
from tests.catalog import sample_jobs


@pytest.fixture(params=["inline", "thread", "process"])
def queue(request: pytest.FixtureRequest) -> Iterator[LocalQueue]:
    kind = request.param
    with LocalQueue(0) if kind == "inline" else LocalQueue(2, kind) as made:
        yield made


def test_jobs_give_json_or_say_why_not(queue: LocalQueue) -> None:
    tickets = [queue.submit(sample_jobs.square, n=n) for n in range(4)]
    assert [t.result(60)["square"] for t in tickets] == [0, 1, 4, 9]
    assert all(t.done() for t in tickets)
    assert len({t.id for t in tickets}) == 4
    with pytest.raises(JobFailed, match=r"UserError: No package is called x\.") as caught:
        queue.submit(sample_jobs.complain, name="x").result(60)
    assert caught.value.exit_code == UserError.exit_code
    with pytest.raises(TypeError, match="not JSON serializable"):
        queue.submit(sample_jobs.square, n={1, 2})


def test_processes_are_other_processes() -> None:
    with LocalQueue(1, "process") as queue:
        assert queue.submit(sample_jobs.square, n=1).result(60)["pid"] != os.getpid()


def test_only_marked_functions_of_modules_run() -> None:
    with LocalQueue() as queue:
        with pytest.raises(ValueError, match="mark the function"):
            queue.submit(os.getcwd)

        @job
        def inner() -> None: ...

        with pytest.raises(ValueError, match="is not a job"):
            queue.submit(inner)
