"""From a monitor's report to an outcome, in plain words that client and monitor share."""

from __future__ import annotations

import time
from typing import Any

from sandbox.node import journal


def classify(report: dict[str, Any]) -> tuple[str, int | None, int | None]:
    """(outcome, exit code, signal) from how the direct child ended and the limits that were hit meanwhile."""
    if "error" in report:
        return "pids", None, None
    code, number = report["exit"], report["signal"]
    if report["reason"] == "timeout":
        return "timeout", None, number
    if report["reason"] == "killed":
        return "cancelled", None, number
    if code == 0:
        return "exited", 0, None
    if "oom" in report["hit"]:
        return "oom", code, number
    if "pids" in report["hit"]:
        return "pids", code, number
    if report["disk_full"]:
        return "disk", code, number
    return ("signaled" if number is not None else "exited"), code, number


def result(report: dict[str, Any], began: float, output: dict[str, tuple[bytes, int]]) -> dict[str, Any]:
    """The fields of an ExecResult as the log keeps them; `output` is stream -> (kept bytes, total)."""
    outcome, code, number = classify(report)
    out, out_total = output.get("stdout", (b"", 0))
    err, err_total = output.get("stderr", (b"", 0))
    return {
        "outcome": outcome, "exit_code": code, "signal": number,
        "stdout": journal.pack(out), "stderr": journal.pack(err),
        "stdout_total": out_total, "stderr_total": err_total,
        "duration_s": time.monotonic() - began, "peak_memory": report["maxrss"],
        "repercussion": report["repercussion"],
    }  # fmt: skip
