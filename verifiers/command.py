"""The verifier that is a script: Harbor's `tests/test.sh`, which writes a number to /logs/verifier.

Settings: `CommandSettings`. The script runs as root in a fresh sandbox, on the image with the agent's
changes; what the agent's processes left elsewhere is not there. /logs/verifier is made anew and its owner is
root, so code that the script starts as another user (`setpriv`, `su`) cannot reach the result. The number is
read within the call that ran the script, at the moment it ends, and leaves through a pipe of ours: what a
background process writes later is not seen. A script's exit status and printed text do not take part.

What it cannot do: a script that runs the agent's code with its own rights, as most public ones do, believes
that code. Only the runners that own the tested process (`verifiers.grading`) are better than that.
"""

from __future__ import annotations

import json
import math
import secrets
from typing import Any

from pydantic import Field

from catalog.models import BlobRef, Record, Task, Verdict
from sandbox.base import ExecResult, Outcome
from verifiers.grading import protected_files
from verifiers.judging import Bench, Change, Unjudgeable, lay, settings_of

MAX_RESULT = 64 << 10
"""Bytes of the largest reward file."""

_BY_SOLUTION = frozenset({Outcome.OOM, Outcome.PIDS, Outcome.DISK, Outcome.TIMEOUT, Outcome.SIGNALED})
_SCRIPT = """\
IFS= read -r mark || exit 97
rm -rf /logs/verifier && mkdir -p /logs/verifier /logs/agent /logs/artifacts || exit 97
chown 0:0 /logs /logs/verifier && chmod 755 /logs && chmod 700 /logs/verifier || exit 97
shell=$(command -v bash || command -v sh)
"$shell" /tests/test.sh </dev/null >/logs/.output 2>&1
tail -c 4000 /logs/.output >&2
for name in json txt; do
    file=/logs/verifier/reward.$name
    if [ -L "$file" ]; then echo "$mark link"; exit 0; fi
    if [ -f "$file" ]; then echo "$mark $name"; head -c %d "$file"; exit 0; fi
done
echo "$mark none"
"""


class CommandSettings(Record):
    """Settings of a `command` verifier."""

    tests: BlobRef
    """Tar of the folder that becomes /tests; it must hold `test.sh`."""
    key: str = "reward"
    """The entry of reward.json that counts."""
    threshold: float | None = Field(default=1.0, allow_inf_nan=False)
    """Passed from this value on; None: the value itself is the reward, and it must lie in 0..1."""
    env: dict[str, str] = {}


async def judge(bench: Bench, task: Task, change: Change) -> Verdict:
    """Run the script on the changed workspace.

    Reward 0.0 also where it was killed or ran out of time or memory, which the solution can cause; None where
    the number is missing or malformed. Raises Unjudgeable, SandboxError, LookupError.
    """
    spec, settings = task.verifier, settings_of(task, CommandSettings)
    workdir = task.environment.workdir
    if any(_overlap(workdir, taken) for taken in ("/tests", "/logs")):
        raise Unjudgeable(
            "settings", f"the workspace {workdir} is where the verifier's own files go: move it"
        )
    tests = bench.blobs.get(settings.tests)
    if "test.sh" not in _files(tests):
        raise Unjudgeable("settings", "the tests blob has no test.sh")
    mark = secrets.token_hex(16)
    async with bench.clean(task) as box:
        await lay(box, workdir, change, _files(bench.blobs.get(spec.protected)))
        await _must(await box.exec("rm -rf /tests && mkdir /tests", user="root", cwd="/"))
        await box.put_tree("/tests", tests)
        await _must(await box.exec("chown -R 0:0 /tests && chmod -R go-w /tests", user="root", cwd="/"))
        result = await box.exec(
            ["sh", "-c", _SCRIPT % (MAX_RESULT + 1)],
            stdin=f"{mark}\n".encode(),
            cwd=workdir,
            env=settings.env,
            user="root",
            timeout=spec.timeout_s,
            max_output=4 * MAX_RESULT,
        )
    return _verdict(settings, result, mark)


def parse_reward(name: str, data: bytes, key: str) -> float:
    """The number in a reward file, as Harbor reads it.

    Args:
        name: `json` for a flat object of finite numbers, `txt` for one number.
        key: the entry of the object; where it has a single entry, that one counts whatever its name.

    Raises ValueError with a one-sentence reason.
    """
    if len(data) > MAX_RESULT:
        raise ValueError(f"the reward file has more than {MAX_RESULT:,} bytes")
    try:
        text = data.decode().strip()
    except UnicodeDecodeError:
        raise ValueError("the reward file is not UTF-8") from None
    if not text:
        raise ValueError("the reward file is empty")
    if name == "txt":
        return _finite(_number(text))
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("reward.json is not JSON") from None
    if not isinstance(value, dict) or not value:
        raise ValueError("reward.json is not an object of numbers")
    rewards: dict[str, float] = {}
    for entry, number in value.items():  # pyright: ignore[reportUnknownVariableType]
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"reward.json: {entry!r} is not a number")
        rewards[str(entry)] = _finite(number)  # pyright: ignore[reportUnknownArgumentType]
    if key in rewards:
        return rewards[key]
    if len(rewards) == 1:
        return next(iter(rewards.values()))
    raise ValueError(f"reward.json has no entry {key!r}")


def _verdict(settings: CommandSettings, result: ExecResult, mark: str) -> Verdict:
    if result.outcome in _BY_SOLUTION:
        evidence = f"The script ended by {result.outcome}: {_tail(result)}"
        return Verdict(reward=0.0, evidence=evidence, duration_s=result.duration_s)
    if result.repercussion is not None:
        evidence = f"What the script ran destroyed its sandbox ({result.repercussion})."
        return Verdict(reward=0.0, evidence=evidence, duration_s=result.duration_s)
    head, _, data = result.stdout.partition(b"\n")
    said, _, name = head.decode(errors="replace").partition(" ")
    if not result.ok or said != mark:
        raise Unjudgeable("script", f"the script did not come to its end: {_tail(result)}")
    if name == "none":
        raise Unjudgeable("reward-missing", f"the script wrote no reward file: {_tail(result)}")
    if name == "link":
        raise Unjudgeable("reward-malformed", "the reward file is a link")
    try:
        value = parse_reward(name, data, settings.key)
        if settings.threshold is None and not 0 <= value <= 1:
            raise ValueError(f"the reward {value:g} is not in 0..1")
    except ValueError as error:
        raise Unjudgeable("reward-malformed", f"{error}") from error
    reward = value if settings.threshold is None else float(value >= settings.threshold)
    evidence = f"The script wrote {value:g} to reward.{name}. {_tail(result)}"
    return Verdict(reward=reward, evidence=evidence.strip(), duration_s=result.duration_s)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"reward.txt is not a number: {text[:40]!r}") from None


def _finite(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("the reward is not a finite number")
    return number


def _files(tar: bytes) -> dict[str, bytes]:
    try:
        return dict(protected_files(tar))
    except ValueError as error:
        raise Unjudgeable("settings", f"{error}") from error


async def _must(result: ExecResult) -> None:
    if not result.ok:
        raise Unjudgeable("setup", f"the sandbox could not be prepared: {_tail(result)}")


def _tail(result: ExecResult) -> str:
    return result.stderr[-1000:].decode(errors="replace").strip()


def _overlap(one: str, other: str) -> bool:
    one, other = one.rstrip("/") + "/", other.rstrip("/") + "/"
    return one.startswith(other) or other.startswith(one)
