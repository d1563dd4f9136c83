"""The `bash` agent: one tool, many turns, a real sandbox of the task's image.

Each turn the policy writes one fenced `bash` block, which runs in the sandbox, or the word `submit`. At
the end the diff of the workspace against the commit that it began with, within the paths that may change,
goes to the grader.

A command that fails, times out or runs out of memory is data for the policy. An agent that destroys its
own sandbox (kills its init, deletes git's objects or /usr) gets reward 0 and `repercussion`; a sandbox
that cannot be made at all is our failure.

After a crash of this process the commands logged so far run once more in a fresh sandbox, before the next
new one, to rebuild the workspace; the policy keeps the results that it saw first. If a command then ends
otherwise than it did, the sample fails as `sandbox`.
"""

from __future__ import annotations

import re
import shlex
from datetime import date
from typing import Protocol

from pydantic import PositiveFloat, PositiveInt

from catalog.models import Task, Verdict
from rollout.agents.base import Outcome
from rollout.agents.effort import effort_line
from rollout.config import Settings
from rollout.session import Session, ToolReply
from sandbox.base import (
    ExecResult,
    NetworkPolicy,
    Repercussion,
    Sandbox,
    SandboxLost,
    SandboxProvider,
    SandboxSpec,
)
from sandbox.base import Outcome as Ended

_BLOCK = re.compile(r"```(?:bash|sh)?[ \t]*\n(.*?)\n?```", re.DOTALL)

INSTRUCTIONS = """\
You repair a program in {workdir}. Write one command block a turn:
```bash
ls
```
Its output comes back to you. Only changes beneath {allowed} count. When you are done, write: submit"""


class BashConfig(Settings):
    """Limits of the `bash` agent."""

    max_turns: PositiveInt = 12
    """Turns of the policy; after the last one the workspace is graded as it stands."""
    max_tokens: PositiveInt = 512
    """Tokens of one turn."""
    max_output: PositiveInt = 4000
    """Characters of a command's output shown to the policy; the middle is cut out, with a note."""
    command_timeout_s: PositiveFloat = 30.0
    allow: tuple[str, ...] = ()
    """What commands may reach through the proxy, as NAME:PORT or *.NAME:PORT; nothing otherwise."""
    index_before: date | None = None
    """Offer a package index as it was before this day, without the package that the task is about."""

    def network(self, task: Task) -> NetworkPolicy:
        """The policy of the task's sandbox."""
        if not self.allow and self.index_before is None:
            return NetworkPolicy()
        kind, _, name = task.origin.source.partition(":")
        hidden = (name,) if kind == "pypi" and self.index_before is not None else ()
        return NetworkPolicy("allow", self.allow, self.index_before, hidden)


class DiffGrader(Protocol):
    """What the agent needs of `verifiers.grading.Grader`."""

    async def grade(self, task: Task, diff: bytes, *, fresh: bool = False) -> Verdict: ...


class BashAgent:
    """See the module. `fresh` makes every verdict anew (evaluation)."""

    name = "bash"

    def __init__(
        self,
        provider: SandboxProvider,
        grader: DiffGrader,
        config: BashConfig | None = None,
        *,
        fresh: bool = False,
        owner: str = "rollout",
    ) -> None:
        self._provider, self._grader = provider, grader
        self._config = config or BashConfig()
        self.fresh, self._owner = fresh, owner

    async def run(self, task: Task, session: Session) -> Outcome:
        workspace = Workspace(self._provider, task, self._config, self._owner)
        try:
            await session.say(*_opening(task, session.effort))
            for turn in range(self._config.max_turns):
                act = await session.act(self._config.max_tokens)
                command = parse_command(act.text)
                if command is None and _submits(act.text):
                    break
                if session.truncated or turn == self._config.max_turns - 1:
                    session.truncated = True
                    break
                reply = await self._step(session, workspace, command)
                await session.say(("tool", reply))
            diff = await workspace.diff()
        except AgentDestroyedSandbox as error:
            return Outcome(Verdict(reward=0.0, evidence=str(error)), repercussion=True)
        finally:
            await workspace.close()
        return Outcome(await self._grader.grade(task, diff, fresh=self.fresh), diff=diff)

    async def _step(self, session: Session, workspace: Workspace, command: str | None) -> str:
        if command is None:
            return "No command was run: write exactly one ```bash block, or the word submit."

        async def execute(_key: str) -> ToolReply:
            result = await workspace.execute(command)
            return ToolReply(
                show(result, self._config.max_output),
                outcome=result.outcome.value,
                exit_code=result.exit_code,
                duration_s=result.duration_s,
            )

        reply = await session.call("bash", {"command": command}, execute)
        workspace.remember(command, reply)
        return reply.result


class AgentDestroyedSandbox(Exception):
    """The agent's own command ended its environment."""


class Workspace:
    """The sandbox of one sample, made when first needed and rebuilt from the commands it remembers."""

    def __init__(self, provider: SandboxProvider, task: Task, config: BashConfig, owner: str) -> None:
        self._provider, self._task, self._config, self._owner = provider, task, config, owner
        self._sandbox: Sandbox | None = None
        self._base = ""
        self._done: list[tuple[str, ToolReply]] = []

    def remember(self, command: str, reply: ToolReply) -> None:
        self._done.append((command, reply))

    async def execute(self, command: str) -> ExecResult:
        """Run one command of the agent. Raises AgentDestroyedSandbox if it ended its own sandbox,
        SandboxLost if a fault of ours did."""
        sandbox = await self._open()
        try:
            result = await sandbox.exec(
                command,
                cwd=self._task.environment.workdir,
                timeout=self._config.command_timeout_s,
            )
        except SandboxLost as error:
            if error.repercussion is None:
                raise
            raise AgentDestroyedSandbox(f"{command!r} ended the sandbox: {error}") from error
        if result.repercussion in (Repercussion.INIT, Repercussion.SYSTEM):
            raise AgentDestroyedSandbox(f"{command!r} destroyed the sandbox ({result.repercussion})")
        if result.outcome is Ended.LOST:
            raise SandboxLost(f"{self._task.id}: the sandbox was lost under a command")
        return result

    async def diff(self) -> bytes:
        """Changes of the workspace against the commit that it began with, within the allowed paths."""
        sandbox = await self._open()
        paths = " ".join(shlex.quote(path.rstrip("/") or ".") for path in self._task.verifier.allowed)
        git = "git -c safe.directory='*' -c core.fsmonitor=false -c core.hooksPath=/dev/null"
        script = (
            f"export GIT_INDEX_FILE=$(mktemp -d)/index && {git} read-tree {self._base} && {git} add -A . && "
            f"{git} diff --cached --binary --full-index --no-ext-diff --no-textconv --no-color "
            f"{self._base} -- {paths} ':(exclude)**/__pycache__/**'"
        )
        limit = 64 << 20
        try:
            result = await sandbox.exec(
                script, cwd=self._task.environment.workdir, timeout=120, max_output=limit
            )
        except SandboxLost as error:
            if error.repercussion is None:
                raise
            raise AgentDestroyedSandbox(f"the sandbox did not outlive its commands: {error}") from error
        if result.outcome is Ended.LOST and result.repercussion is None:
            raise SandboxLost(f"{self._task.id}: the sandbox was lost while its changes were read")
        if not result.ok or result.stdout_total > len(result.stdout):
            raise AgentDestroyedSandbox(f"git cannot read the workspace any more: {result.text[-300:]}")
        return result.stdout

    async def close(self) -> None:
        if self._sandbox:
            await self._sandbox.close()

    async def _open(self) -> Sandbox:
        if self._sandbox:
            return self._sandbox
        limits = self._task.environment.limits
        spec = SandboxSpec(
            image=self._task.environment.image,
            owner=self._owner,
            workdir=self._task.environment.workdir,
            memory_mb=limits.memory_mb,
            pids=limits.pids,
            disk_mb=limits.disk_mb,
            network=self._config.network(self._task),
        )
        self._sandbox = sandbox = await self._provider.create(spec)
        base = await sandbox.exec("git -c safe.directory='*' rev-parse HEAD", cwd=spec.workdir)
        if not base.ok:
            raise SandboxLost(
                f"{self._task.id}: the image's workspace is no git checkout: {base.text[-200:]}"
            )
        self._base = base.stdout.decode().strip()
        for command, reply in self._done:
            again = await sandbox.exec(command, cwd=spec.workdir, timeout=self._config.command_timeout_s)
            if (again.outcome.value, again.exit_code) != (reply.outcome, reply.exit_code):
                raise SandboxLost(
                    f"{self._task.id}: the lost sandbox cannot be rebuilt: {command!r} ended with "
                    f"{again.outcome} {again.exit_code}, before with {reply.outcome} {reply.exit_code}"
                )
        return sandbox


def parse_command(text: str) -> str | None:
    """The one fenced block of a turn; None if there is none or more than one."""
    blocks = _BLOCK.findall(text)
    return blocks[0] if len(blocks) == 1 and blocks[0].strip() else None


def show(result: ExecResult, limit: int) -> str:
    """A command's output as the policy reads it: the middle cut out beyond `limit` characters."""
    text = result.text
    lost = max(0, result.stdout_total - len(result.stdout)) + max(0, result.stderr_total - len(result.stderr))
    if len(text) > limit:
        head, tail = limit // 2, limit - limit // 2
        cut = len(text) - limit + lost
        text = f"{text[:head]}\n[{cut} characters cut out here]\n{text[-tail:]}"
    elif lost:
        text += f"\n[{lost} bytes cut out]"
    ending = {Ended.EXITED: f"exit {result.exit_code}"}.get(
        result.outcome, f"ended by {result.outcome.value}"
    )
    return f"{text.rstrip()}\n[{ending}]" if text.strip() else f"[{ending}]"


def _submits(text: str) -> bool:
    return any(line.strip().lower() == "submit" for line in text.splitlines())


def _opening(task: Task, effort: int | None) -> list[tuple[str, str]]:
    allowed = ", ".join(task.verifier.allowed)
    instructions = INSTRUCTIONS.format(workdir=task.environment.workdir, allowed=allowed)
    system = instructions if effort is None else f"{effort_line(effort)}\n{instructions}"
    return [("system", system), ("user", task.problem.statement)]
