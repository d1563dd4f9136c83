"""`kill -9` of a real process in the middle of a job, and starting it again."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.rollout.killable import main

STEPS = 3


def start(folder, mode):
    command = [sys.executable, "-m", "tests.rollout.killable", str(folder), str(STEPS), mode]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE)


def executed(folder):
    path = folder / "executed.txt"
    return path.read_text().split() if path.exists() else []


def kill_when(folder, mode, calls):
    """Start it, and kill it as soon as that many tool calls were executed; True if it was still running."""
    process = start(folder, mode)
    deadline = time.monotonic() + 60
    while len(executed(folder)) < calls and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    running = process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()
    return running


def finish(folder, mode):
    process = start(folder, mode)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors.decode()
    return json.loads((folder / "done.json").read_text())


@pytest.mark.parametrize(("mode", "kills"), [("deterministic", (7, 33)), ("asynchronous", (20,))])
def test_a_killed_job_loses_nothing_and_does_nothing_twice(tmp_path, mode, kills):
    folder = tmp_path / "killed"
    folder.mkdir()
    assert all(kill_when(folder, mode, calls) for calls in kills)
    table = finish(folder, mode)
    assert len(table) == STEPS
    ids = json.loads((folder / "checkpoint.json").read_text())["ids"]
    assert len(set(ids)) == len(ids) == STEPS * 6
    logged = (folder / "rollout" / "trajectories.jsonl").read_text().splitlines()
    assert max(Counter(json.loads(line)["id"] for line in logged).values()) == 1
    # a call between its execution and its line in the journal is the one thing that a kill can repeat
    counts = Counter(executed(folder))
    assert sum(n - 1 for n in counts.values()) <= len(kills) * 8
    assert max(counts.values()) <= 2
    if mode == "deterministic":
        quiet = tmp_path / "quiet"
        quiet.mkdir()
        asyncio.run(main(quiet, STEPS, deterministic=True))  # undisturbed
        assert json.loads((quiet / "done.json").read_text()) == table
