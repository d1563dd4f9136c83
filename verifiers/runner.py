"""Runs pytest in jails inside a sandbox and returns one status for every test.

    async with TestRunner(provider, image) as runner:
        run = await runner.run({"pkg/core.py": source}, ["tests/test_core.py"])

One sandbox stays open with a warm interpreter (`verifiers.harness`); every run happens in a fresh jail forked
from it: own processes, mounts, network and ipc, a private writable workspace that is thrown away, no rights,
and no view of the harness. Printed text and exit codes decide nothing. Left out: all but pytest.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal, Self

from catalog.models import TestStatus
from sandbox.base import Process, Sandbox, SandboxLost, SandboxProvider, SandboxSpec
from verifiers.changes import decoded, encoded

PYTHON = "/opt/env/bin/python"
FOLDER = "/run/verifier"
MODULES = ("__init__.py", "folding.py", "jail.py", "memo.py", "plugin.py", "server.py", "wire.py")
START_S = 60.0
PATIENCE = 10
GRACE_S = 15.0
"""Beyond a run's own timeout, after which the harness itself is taken for dead."""

RunOutcome = Literal["finished", "timeout", "crashed", "infrastructure"]


class RunnerFailed(Exception):
    """The runner could not run tests at all; never the tested code's fault."""


@dataclass(frozen=True)
class TestRun:
    """What one jailed run of pytest did."""

    __test__ = False

    tests: dict[str, TestStatus]
    """By node id; a file that could not be collected stands under its own name."""
    messages: dict[str, str]
    """Failure texts, the last 2 kB each."""
    outcome: RunOutcome
    """`finished`: pytest came to its end; `crashed`: the process ended before; `infrastructure`: no jail."""
    duration_s: float
    functions: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Test id -> `path::qualname` of the package's functions that it executed; only with trace=True."""
    tampered: tuple[str, ...] = ()
    """Why the reports are not to be believed; empty for an honest run."""
    notes: tuple[str, ...] = ()
    output: str = ""
    """The end of what the tests printed; for people only."""


class TestRunner:
    """One sandbox with a warm interpreter. An async context manager; `start` and `close` do the same."""

    __test__ = False

    def __init__(
        self,
        provider: SandboxProvider,
        image: str,
        *,
        workdir: str = "/workspace",
        jobs: int = 2,
        base: Mapping[str, bytes | None] | None = None,
        protected: Collection[str] = (),
        env: Mapping[str, str] | None = None,
        plugins: Sequence[str] = (),
        memory_mb: int = 1024,
        pids: int = 256,
        disk_mb: int = 128,
        owner: str = "verifiers",
    ) -> None:
        """
        Args:
            provider: where the sandbox comes from; it must support `nested`.
            image: digest of an image with a workspace and with pytest in /opt/env.
            jobs: jails that may run at once; more requests wait.
            base: trusted files laid over the image's workspace before everything else. Tests can neither
                change nor remove them.
            protected: files of the image that tests can neither change nor remove.
            env: variables for the tests.
            plugins: pytest plugins to load by name; none load by themselves.
            memory_mb, pids, disk_mb: limits of one jail.
        """
        self._provider = provider
        self._spec = SandboxSpec(
            image=image,
            owner=owner,
            workdir=workdir,
            memory_mb=memory_mb * jobs + 256,
            pids=pids * jobs + 32,
            disk_mb=disk_mb * (2 * jobs + 1),
            nested=True,
        )
        self.image = image
        self._config = {
            "workdir": workdir,
            "base_mb": 4 * disk_mb,
            "base": encoded(base or {}),
            "protected": sorted(protected),
            "env": dict(env or {}),
            "plugins": list(plugins),
            "limits": {"memory_mb": memory_mb, "processes": pids, "disk_mb": disk_mb, "cpu_s": 3600},
        }
        self._slots = asyncio.Semaphore(jobs)
        self._sandbox: Sandbox | None = None
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next = 0
        self.versions: dict[str, str] = {}
        """`python` and `pytest` of the image."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def alive(self) -> bool:
        """Whether `run` can be called."""
        return self._reader is not None and not self._reader.done()

    async def start(self) -> None:
        """Create the sandbox and warm the interpreter. Raises RunnerFailed, SandboxError."""
        sandbox = await self._provider.create(self._spec)
        self._sandbox = sandbox
        try:
            await self._install(sandbox)
            script = (
                f'VERIFIER_PYTHONPATH="$PYTHONPATH" PYTHONPATH={FOLDER} PYTHONHASHSEED=0 '
                f"exec {PYTHON} -s -P -B -m verifiers.harness.server"
            )
            self._process = await sandbox.spawn(["/bin/sh", "-c", script], cwd="/", user="root")
            self._reader = asyncio.create_task(self._read(self._process))
            hello = self._expect(0)
            await self._send(self._config)
            self.versions = await asyncio.wait_for(hello, START_S)
        except TimeoutError:
            await self.close()
            raise RunnerFailed(f"the test harness did not start within {START_S:.0f} s") from None
        except BaseException:
            await self.close()
            raise

    @staticmethod
    async def _install(sandbox: Sandbox) -> None:
        package = resources.files("verifiers.harness")
        made = await sandbox.exec(["/bin/mkdir", "-p", f"{FOLDER}/verifiers/harness"], user="root", cwd="/")
        if not made.ok:
            raise RunnerFailed(f"no folder for the test harness: {made.text[-300:]}")
        for name in MODULES:
            await sandbox.write(f"{FOLDER}/verifiers/harness/{name}", package.joinpath(name).read_bytes())
        await sandbox.write(f"{FOLDER}/verifiers/__init__.py", b"")

    async def run(
        self,
        files: Mapping[str, bytes | None],
        arguments: Sequence[str],
        *,
        timeout: float = 60,
        trace: bool = False,
        executable: Collection[str] = (),
        trusted: Mapping[str, bytes | None] | None = None,
        protected: Collection[str] = (),
    ) -> TestRun:
        """Run pytest in a fresh jail.

        Args:
            files: workspace-relative path -> new content, None deletes; laid over the clean workspace.
            arguments: test files or node ids, relative to the workspace. `--` options are refused.
            timeout: seconds after which the whole jail is killed. Time spent waiting for a processor does not
                count, up to ten times the timeout in all.
            trace: also return which functions of the package each test executed (about twice as slow).
            executable: paths among `files` that get the execute bit.
            trusted: files of ours, laid before `files`.
            protected: further files that the tests can neither change nor remove.

        Raises RunnerFailed when the harness is gone, ValueError for a bad path or argument.
        """
        for path in (*files, *(trusted or {})):
            check_path(path)
        if bad := [a for a in arguments if a.startswith("-") or not a]:
            raise ValueError(f"not a test file or id: {bad[0]!r}")
        request = {
            "op": "run",
            "files": encoded(files),
            "trusted": encoded(trusted or {}),
            "protected": sorted(protected),
            "executable": sorted(executable),
            "arguments": list(arguments),
            "timeout": timeout,
            "trace": trace,
        }
        async with self._slots:
            result = await self._ask(request, PATIENCE * timeout + GRACE_S)
        return _test_run(result)

    async def read(self, paths: Collection[str]) -> dict[str, bytes | None]:
        """Files of the clean workspace (with `base`); None for what is no regular file."""
        result = await self._ask({"op": "read", "paths": sorted(paths)}, GRACE_S)
        files: dict[str, str | None] = result["files"]
        return decoded(files)

    async def listing(self) -> dict[str, bool]:
        """Every file of the clean workspace outside .git -> whether it is executable."""
        result = await self._ask({"op": "read", "paths": None}, GRACE_S)
        return result["files"]

    async def close(self) -> None:
        """Idempotent; ends every run with RunnerFailed."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None
        if self._process is not None:
            await self._process.kill()
            self._process = None
        if self._sandbox is not None:
            await self._sandbox.close()
            self._sandbox = None

    async def _ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        if not self.alive:
            raise RunnerFailed("the test runner is not running: start it, or make a new one")
        self._next += 1
        number = self._next
        reply = self._expect(number)
        try:
            await self._send(request | {"id": number})
            return await asyncio.wait_for(reply, timeout)
        except TimeoutError:
            await self.close()
            raise RunnerFailed("the test harness does not answer") from None
        except asyncio.CancelledError:
            if self.alive:
                await self._send({"op": "cancel", "id": number})
            raise
        finally:
            self._waiting.pop(number, None)

    def _expect(self, number: int) -> asyncio.Future[dict[str, Any]]:
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        return reply

    async def _send(self, message: dict[str, Any]) -> None:
        if self._process is None:
            raise RunnerFailed("the test runner is closed")
        try:
            await self._process.write(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise RunnerFailed(f"the test harness is gone: {error}") from error

    async def _read(self, process: Process) -> None:
        """Collect reply lines until the harness ends, then fail whoever still waits."""
        parts: dict[int, list[str]] = {}
        why = "the test harness ended"
        try:
            while line := await process.readline():
                number_text, last, piece = line.decode().rstrip("\n").split(" ", 2)
                number = int(number_text)
                parts.setdefault(number, []).append(piece)
                if last == "1":
                    text = "".join(parts.pop(number))
                    waiter = self._waiting.pop(number, None)
                    if waiter is not None and not waiter.done():
                        waiter.set_result(json.loads(text))
            ended = await process.wait()
            why += f": {ended.stderr[-500:].decode(errors='replace').strip() or ended.outcome}"
        except SandboxLost as error:
            why += f": {error}"
        finally:
            for waiter in self._waiting.values():
                if not waiter.done():
                    waiter.set_exception(RunnerFailed(why))
            self._waiting.clear()


def check_path(path: str) -> None:
    """Raises ValueError unless `path` is a plain workspace-relative path."""
    parts = path.split("/")
    if not path or path.startswith("/") or "\0" in path or any(p in ("", ".", "..") for p in parts):
        raise ValueError(f"not a path inside the workspace: {path!r}")


def _test_run(result: dict[str, Any]) -> TestRun:
    return TestRun(
        tests={name: TestStatus(status) for name, status in result["tests"].items()},
        messages=result["messages"],
        outcome=result["outcome"],
        duration_s=result["duration"],
        functions={name: tuple(found) for name, found in result["functions"].items()},
        tampered=tuple(result["tampered"]),
        notes=tuple(result["notes"]),
        output=result["output"],
    )
