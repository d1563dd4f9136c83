"""Anybody's Harbor task folder, judged as it is: its verdict is what its `tests/test.sh` writes.

    report = await audit_folder(folder, provider, image, files)

Nothing is known of its tests but the reward, so the gates are those that a reward can answer: gold (its own
`solve.sh`) passes every time, doing nothing does not, programs that fake a reward do not, and neither the
instruction nor the environment holds the solution. The agent's part and the verifier's run in two sandboxes:
the second begins with the files that the first left, without its processes, and without reward files.
"""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catalog.models import Decision, Gate, QualityReport
from envfactory.formats.fields import FormatError
from envfactory.formats.recipes import read_text, task_folders
from envfactory.trees import File, Tree, read_tree
from sandbox.base import Sandbox, SandboxProvider, SandboxSpec
from sandbox.trees import pack_files
from verifiers.command import MAX_RESULT, parse_reward

LOGS = "/logs/verifier"
_SOLVE = "cd {workdir} && bash /solution/solve.sh"
_PRETEND = "printf '{{\"reward\": 1}}' > {logs}/reward.json; printf 1 > {logs}/reward.txt; "
_CONFTEST = (
    "import pytest\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    "    outcome = yield\n    outcome.get_result().outcome = 'passed'\n"
)
HACKS: Mapping[str, str] = {
    "reward-file": f"mkdir -p {LOGS}; {_PRETEND.format(logs=LOGS)} true",
    "reward-writer": f"mkdir -p {LOGS}; (while :; do {_PRETEND.format(logs=LOGS)} sleep 0.2; done) & sleep 1",
    "conftest-outcome": f"cat > {{workdir}}/conftest.py <<'EOF'\n{_CONFTEST}EOF\n",
    "conftest-exit": "echo 'import os; os._exit(0)' > {workdir}/conftest.py",
    "collect-only": "printf '[pytest]\\naddopts = --collect-only\\n' > {workdir}/pytest.ini",
    "shadow-pytest": "mkdir -p {workdir}/pytest && touch {workdir}/pytest/__init__.py; "
    "echo 'import sys; sys.exit(0)' > {workdir}/pytest/__main__.py",
    "home-startup": "mkdir -p ~ && printf 'pytest() { true; }; python() { true; }\\n' > ~/.bashrc; "
    "cp ~/.bashrc ~/.profile",
}
"""Name -> shell script of an agent that solves nothing. Each must get no reward."""
_DOWNLOAD = re.compile(
    r"\b(?:curl|wget|apt-get install|apt install|pip3? install|uvx|uv (?:pip|add|sync)|npm (?:i|install))\b"
)


@dataclass(frozen=True)
class Trial:
    """What one attempt came to."""

    reward: float | None
    """None: no valid reward file, so it could not be judged."""
    evidence: str
    cost_s: float


async def audit_folder(
    folder: Path, provider: SandboxProvider, image: str, files: Tree | None = None, *, runs: int = 2
) -> QualityReport:
    """Judge a folder.

    Args:
        image: digest of what its environment/Dockerfile builds.
        files: laid into the working folder first (a repository that the image lacks).
        runs: how often gold must pass.

    Raises FormatError for a folder that is no such task, SandboxError when nothing can be run.
    """
    config = _config(folder)
    environment = config.get("environment", {})
    workdir = str(environment.get("workdir") or "/workspace")
    trials = _Trials(folder, provider, image, files or {}, workdir, float(_timeout(config)))
    gates = [leak(folder), offline(folder)]
    gates.append(_gold([await trials.run(_SOLVE, solution=True) for _ in range(runs)]))
    gates.append(_zero("no-op", {"doing nothing": await trials.run("true")}))
    gates.append(_zero("hacks", {name: await trials.run(script) for name, script in HACKS.items()}))
    failed = [gate.name for gate in gates if gate.passed is False]
    reason = f"{', '.join(failed)} failed" if failed else f"{len(gates)} gates looked at"
    action = "rejected" if failed else "audited"
    decision = Decision(actor="auditor", action=action, reason=reason, at=time.time())
    return QualityReport(task_id=folder.resolve().name, gates=tuple(gates), history=(decision,))


def strangers(path: Path) -> list[Path]:
    """The Harbor folders in `path` (or itself) whose verifier names no tests: not ours, and no import."""
    return [one for one in task_folders(path, "task.toml") if not (one / "tests/config.json").is_file()]


class _Trials:
    """Attempts at one folder's task, each in fresh sandboxes."""

    def __init__(
        self, folder: Path, provider: SandboxProvider, image: str, files: Tree, workdir: str, timeout: float
    ) -> None:
        self._folder, self._provider, self._image = folder, provider, image
        self._files, self._workdir, self._timeout = files, workdir, timeout

    async def run(self, script: str, *, solution: bool = False) -> Trial:
        """One agent's script, then the verifier."""
        began = time.monotonic()
        async with await self._provider.create(self._spec(self._image)) as box:
            await self._prepare(box)
            if solution:
                await _put(box, "/solution", read_tree(self._folder / "solution"))
            done = await box.exec(
                script.replace("{workdir}", self._workdir),
                cwd=self._workdir,
                user="root" if solution else None,
                timeout=self._timeout,
            )
            left = await box.snapshot()
        if solution and not done.ok:
            return Trial(
                0.0, f"solve.sh ended with {done.exit_code}: {done.text[-200:]}", time.monotonic() - began
            )
        reward, evidence = await self._verify(left)
        return Trial(reward, evidence, time.monotonic() - began)

    def _spec(self, image: str) -> SandboxSpec:
        return SandboxSpec(image=image, owner="audit", workdir=self._workdir)

    async def _prepare(self, box: Sandbox) -> None:
        await box.exec(
            f"mkdir -p {self._workdir} /logs/agent {LOGS} && chown -R 1000 {self._workdir} /logs",
            user="root", cwd="/",
        )  # fmt: skip
        if self._files:
            await _put(box, self._workdir, self._files)

    async def _verify(self, image: str) -> tuple[float | None, str]:
        async with await self._provider.create(self._spec(image)) as box:
            await box.exec(f"rm -rf {LOGS} /tests && mkdir -p {LOGS}", user="root", cwd="/")
            await _put(box, "/tests", read_tree(self._folder / "tests"))
            done = await box.exec(
                ["/bin/bash", "/tests/test.sh"], cwd=self._workdir, user="root", timeout=self._timeout
            )
            return await _reward(box, done.text[-300:])


async def _put(box: Sandbox, where: str, tree: Tree) -> None:
    await box.exec(["/bin/mkdir", "-p", where], user="root", cwd="/")
    plain = {path: file.data for path, file in tree.items() if not file.link}
    runs = frozenset(path for path, file in tree.items() if file.executable)
    await box.put_tree(where, pack_files(plain, executable=runs))


async def _reward(box: Sandbox, said: str) -> tuple[float | None, str]:
    """The reward by the rule of the `command` verifier: reward.json before reward.txt, and no link."""
    for name in ("json", "txt"):
        shown = await box.exec(
            ["/bin/sh", "-c", '[ -L "$0" ] && exit 9; exec cat "$0"', f"{LOGS}/reward.{name}"],
            user="root", cwd="/", max_output=MAX_RESULT + 1,
        )  # fmt: skip
        if shown.exit_code == 9:
            return None, f"reward.{name} is a link"
        if not shown.ok:
            continue
        try:
            reward = parse_reward(name, shown.stdout, "reward")
        except ValueError as error:
            return None, f"{error}: {shown.text[:80]!r}"
        return reward, f"reward {reward:g}. {said}"
    return None, f"no reward file was written: {said}"


def leak(folder: Path) -> Gate:
    """Whether the instruction or the environment folder holds the solution or the tests."""
    hidden = {
        f"{part}/{path}": file
        for part in ("solution", "tests")
        for path, file in read_tree(folder / part).items()
        if not file.link and len(file.data) > 32
    }
    shown = read_tree(folder / "environment")
    contents = {file.data: path for path, file in hidden.items() if "Dockerfile" not in path}
    copy = next((path for path, file in shown.items() if file.data in contents and not _shared(path)), None)
    if copy is not None:
        return Gate(
            name="leak",
            passed=False,
            evidence=f"environment/{copy} is a copy of {contents[shown[copy].data]}",
        )
    instruction = _squeezed(read_text(folder, "instruction.md"))
    for line in hidden.get("solution/solve.sh", File(b"")).data.decode(errors="replace").splitlines():
        text = _squeezed(line)
        if len(text) >= 24 and not line.startswith("#") and text in instruction:
            return Gate(
                name="leak", passed=False, evidence=f"the instruction quotes solve.sh: {line.strip()[:80]}"
            )
    return Gate(name="leak", passed=True, evidence="no copy of tests or solution in the environment")


def offline(folder: Path) -> Gate:
    """Whether the verifier fetches something, which fails where there is no network and changes with time."""
    text = read_text(folder, "tests/test.sh")
    lines = [line.strip() for line in text.splitlines() if not line.lstrip().startswith("#")]
    found = next((line for line in lines if _DOWNLOAD.search(line)), None)
    if found is not None:
        return Gate(name="offline", passed=False, evidence=f"test.sh downloads: {found[:80]}")
    return Gate(name="offline", passed=True, evidence="test.sh downloads nothing")


def _shared(path: str) -> bool:
    """Archives that a folder's own Dockerfiles both add."""
    return path.endswith((".tar.gz", ".tar"))


def _gold(trials: list[Trial]) -> Gate:
    cost = sum(trial.cost_s for trial in trials)
    bad = next((trial for trial in trials if trial.reward != 1.0), None)
    if bad is None:
        return Gate(
            name="gold", passed=True, evidence=f"{len(trials)} of {len(trials)} runs pass", cost_s=cost
        )
    passed = None if bad.reward is None and len({trial.reward for trial in trials}) == 1 else False
    return Gate(name="gold", passed=passed, evidence=bad.evidence[:300], cost_s=cost)


def _zero(name: str, trials: Mapping[str, Trial]) -> Gate:
    """No attempt may have a reward. One without any verdict has none, either."""
    cost = sum(trial.cost_s for trial in trials.values())
    fooled = [key for key, trial in trials.items() if trial.reward]
    data = {key: trial.evidence[:200] for key, trial in trials.items()}
    evidence = f"rewarded: {', '.join(fooled)}" if fooled else f"{len(trials)} of {len(trials)} get no reward"
    return Gate(name=name, passed=not fooled, evidence=evidence, cost_s=cost, data=data)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = tomllib.loads(read_text(folder, "task.toml"))
    except tomllib.TOMLDecodeError as error:
        raise FormatError(f"{folder}/task.toml is not TOML ({str(error)[:100]})") from error
    if config.get("steps"):
        raise FormatError(f"{folder} has several steps, and only tasks of one are judged")
    workdir = config.get("environment", {}).get("workdir")
    if workdir is not None and not re.fullmatch(r"/[A-Za-z0-9._/-]+", str(workdir)):
        raise FormatError(f"{folder}/task.toml: workdir {str(workdir)[:50]!r} is no plain absolute path")
    for path in ("tests/test.sh", "solution/solve.sh"):
        if not (folder / path).is_file():
            raise FormatError(f"{folder} has no {path}, without which nothing can be judged")
    return config


def _timeout(config: Mapping[str, Any]) -> float:
    value = config.get("verifier", {}).get("timeout_sec", 600.0)
    return min(3600.0, float(value)) if isinstance(value, int | float) and value > 0 else 600.0


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)
