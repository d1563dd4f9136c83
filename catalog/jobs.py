"""Jobs that may run somewhere else: a small queue Protocol, and the one that needs no service.

A job is a function marked `@job`, named by its import path, with JSON in and JSON out (ids and blob
references, not bytes), so that the same call goes to a thread, to another process or to a broker:

    ticket = queue.submit(build_environment, source="pypi:boltons")
    ticket.result()

Jobs must be idempotent: a broker may deliver one twice. Left out: retries, priorities and schedules,
which belong to the broker's worker in `console`.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Literal, Protocol, Self, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


class JobFailed(RuntimeError):
    """The job raised; the message is its type and text. `exit_code` is set when the user can fix it."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message, exit_code)
        self.message = message
        self.exit_code = exit_code

    def __str__(self) -> str:
        return self.message


class Ticket(Protocol):
    """A job on its way."""

    id: str

    def done(self) -> bool: ...

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the job's JSON. Raises JobFailed, or TimeoutError after `timeout` seconds."""
        ...


class Queue(Protocol):
    """Where jobs go."""

    def submit(self, function: Callable[..., Any], **arguments: Any) -> Ticket: ...

    def close(self) -> None:
        """Wait for what is running and take no more."""
        ...


def job(function: Function) -> Function:
    """Mark a module-level function as one that a queue may run. Workers run nothing else."""
    function.__dict__["posttrain_job"] = True
    return function


def job_name(function: Callable[..., Any]) -> str:
    """`package.module:function`, the name that travels. Raises ValueError for what cannot be named."""
    name = f"{function.__module__}:{function.__qualname__}"
    if resolve(name) is not function:
        raise ValueError(f"{name} is not a module-level function: a queue cannot name it")
    return name


def resolve(name: str) -> Callable[..., Any]:
    """The job of that name. Raises ValueError unless it is marked `@job`."""
    module, _, attribute = name.partition(":")
    found = getattr(importlib.import_module(module), attribute, None)
    if not getattr(found, "posttrain_job", False):
        raise ValueError(f"{name} is not a job: mark the function with @catalog.jobs.job")
    return cast(Callable[..., Any], found)


def execute(name: str, arguments: str) -> str:
    """Run a job by name, JSON text in and out. What a worker of any kind calls."""
    try:
        return json.dumps(resolve(name)(**json.loads(arguments)))
    except Exception as error:  # the boundary: whatever a job raises goes back to whoever waits for it
        raise JobFailed(f"{type(error).__name__}: {error}", getattr(error, "exit_code", None)) from error


class LocalQueue:
    """Jobs in this process (`workers=0`: at once, when submitted), or in its own threads or processes.

    Processes are spawned, not forked: database connections and locks do not survive a fork.
    """

    def __init__(self, workers: int = 0, kind: Literal["thread", "process"] = "process") -> None:
        self._pool: Executor | None = None
        self._count = 0
        if workers and kind == "thread":
            self._pool = ThreadPoolExecutor(workers, thread_name_prefix="job")
        elif workers:
            self._pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))

    def submit(self, function: Callable[..., Any], **arguments: Any) -> LocalTicket:
        """Start a job. Raises TypeError at once if the arguments are not JSON."""
        name, text = job_name(function), json.dumps(arguments)
        self._count += 1
        id = f"{name}#{self._count}"
        if self._pool is not None:
            return LocalTicket(id, self._pool.submit(execute, name, text))
        future: Future[str] = Future()
        try:
            future.set_result(execute(name, text))
        except JobFailed as error:
            future.set_exception(error)
        return LocalTicket(id, future)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class LocalTicket:
    """A job of a LocalQueue."""

    def __init__(self, id: str, future: Future[str]) -> None:
        self.id = id
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the job's JSON. Raises JobFailed, or TimeoutError after `timeout` seconds."""
        try:
            return json.loads(self._future.result(timeout))
        except FutureTimeout:
            raise TimeoutError(f"{self.id} is not done after {timeout} s") from None
