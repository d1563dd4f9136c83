"""Jobs for test_jobs.py: other processes import them by name."""

from __future__ import annotations

import os

from catalog.errors import UserError
from catalog.jobs import job


@job
def square(n: int) -> dict[str, int]:
    return {"square": n * n, "pid": os.getpid()}


@job
def complain(name: str) -> None:
    raise UserError(f"No package is called {name}.")
