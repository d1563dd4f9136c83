"""OpenEnv: python openenv.py SERVER TASK GOLD. Its server runs ours on loopback, its client plays an episode.

Run in a sandbox: the task's tests run here. Prints what each episode gave.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path

server, task, gold = sys.argv[1:]
sys.path.insert(0, server)
from client import TasksEnv  # noqa: E402
from models import TaskAction  # noqa: E402

PORT = "8765"
command = [sys.executable, "-m", "uvicorn", "server.app:app", "--host", "127.0.0.1", "--port", PORT]
process = subprocess.Popen(command, cwd=server, env={**os.environ, "ENABLE_WEB_INTERFACE": "false"})
try:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5).read()
            break
        except OSError:
            time.sleep(0.1)
            assert process.poll() is None, "the server ended"
    rewards, seen = {}, []
    for name in ("noop", "gold"):
        with TasksEnv(base_url=f"http://127.0.0.1:{PORT}").sync() as client:
            first = client.reset(task_id=task)
            assert first.observation.task_id == task
            assert first.observation.statement
            if name == "gold":
                patch = Path(gold).read_text()
                applied = client.step(TaskAction(command=f"git apply - <<'EOF'\n{patch}EOF\n"))
                seen.append(applied.observation.exit_code)
            seen.append(client.step(TaskAction(command="git status --short")).observation.output)
            end = client.step(TaskAction(submit=True))
            rewards[name] = [end.reward, end.done]
finally:
    process.terminate()
    process.wait()
print(json.dumps({"version": version("openenv-core"), "rewards": rewards, "seen": seen}))
