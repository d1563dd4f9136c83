"""Jailed runs of pytest, for real."""

from __future__ import annotations

from catalog.models import TestStatus

PACKAGE = {
    "pkg/__init__.py": "",
    "pkg/core.py": "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n",
    "test_core.py": (
        "from pkg import core\n\n\ndef test_double():\n    assert core.double(2) == 4\n\n\n"
        "def test_half():\n    assert core.half(4) == 2\n"
    ),
}


async def test_a_run_reports_every_test(runner_of):
    runner = await runner_of(PACKAGE)
    run = await runner.run({}, ["test_core.py"])
    assert run.tests == {
        "test_core.py::test_double": TestStatus.PASSED,
        "test_core.py::test_half": TestStatus.PASSED,
    }
    assert (run.outcome, run.tampered, run.messages) == ("finished", (), {})
