"""Stages on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest

from console import progress
from console.progress import Stages


def test_plain_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.0)
    out = io.StringIO()
    with Stages(file=out) as stages:
        stages.skip("Install", "done")
        with stages.stage("Mining", total=2) as stage:
            stage.advance()
            stage.update(2, text="half \x1b[2Jway")
            stage.result("12 bugs [bold] in 2 functions")
    lines = out.getvalue().splitlines()
    assert lines[0].split() == ["=", "Install", "done", "before"]
    assert lines[1].split()[:2] == ["Mining", "1/2"]
    assert "\x1b" not in out.getvalue()
    assert lines[-1].startswith("✓ Mining         12 bugs [bold] in 2 functions")
    assert lines[-1].endswith(" s")


def test_a_failed_stage_says_so_and_the_error_goes_on() -> None:
    out = io.StringIO()
    with pytest.raises(ZeroDivisionError), Stages(file=out).stage("Gates"):
        _ = 1 / 0
    assert out.getvalue().startswith("✗ Gates          failed")


def test_bars_on_a_terminal_end_as_the_same_line() -> None:
    out = io.StringIO()
    stages = Stages(file=out, terminal=True)
    with stages.stage("Gates", total=3) as stage:
        stage.advance(3)
        stage.result("3 tasks")
    assert "✓ " in out.getvalue()
    assert "3 tasks" in out.getvalue()
