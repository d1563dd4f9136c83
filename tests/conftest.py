"""In CI a skipped test is a failure, unless this kind of machine cannot have what it needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

IMPOSSIBLE = (
    "no filter for this architecture",
    "no Python of this environment is readable by an ordinary user",
    "inside a chroot no second one can be set up",
    "this host forbids user namespaces to ordinary users",
    "this kernel mounts no files as EROFS, or not for this user",
    "no Python 3.12 or newer is on this machine",
)
"""Reasons that no installation on the machine can remove. Each is printed."""


def unexcused(reasons: Iterator[str]) -> list[str]:
    """Skip reasons that count as failures."""
    return [reason for reason in reasons if not any(known in reason for known in IMPOSSIBLE)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session for skips that hide a missing part."""
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("CI") or reporter is None or hasattr(session.config, "workerinput"):
        return
    reasons = (str(report.longrepr) for report in reporter.stats.get("skipped", []))
    if hidden := unexcused(reasons):
        reporter.write_line(f"skipped in CI, which hides a missing part: {hidden[0]}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
