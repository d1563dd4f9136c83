"""Grades what an agent left behind: its changes to allowed files, on the task's image, with the task's tests.

    grader = Grader(provider, images, blobs, VerdictCache())
    verdict = await grader.grade(task, diff)

The order of events: refuse what the diff may not touch, apply the rest to clean files, put every protected
file (tests, conftest, ini) back from the task's blob, drop configuration that the task does not have, run
the tests in a fresh jail, compare the complete set of ids; what passed must fail where the tests expect
something else. No process and no file of the agent's sandbox takes part.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import sys
import tarfile
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from catalog.models import Task, TestStatus, Verdict, VerifierSpec
from sandbox.base import SandboxProvider
from verifiers import changes, controls, patches
from verifiers.cache import VerdictCache
from verifiers.judging import OURS, Bench, Blobs, Change, ChatModel, Images, judge, strange, unjudged
from verifiers.pool import RunnerPool
from verifiers.runner import RunnerFailed, TestRun, TestRunner
from verifiers.verdicts import verdict

__all__ = ["Blobs", "Grader", "Images", "is_configuration", "protected_files", "verdict"]

_CONFIGURATION = frozenset(
    (
        *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
        *("pyproject.toml", "sitecustomize.py", "usercustomize.py", "pytest.py"),
    )
)
_PACKAGES = frozenset({"_pytest", "pytest", "pluggy"})


def is_configuration(path: str) -> bool:
    """Whether a file of this name can steer the tests or the interpreter; an agent's copy never applies."""
    *folders, name = path.split("/")
    return name in _CONFIGURATION or name.endswith((".pth", ".pyc")) or not _PACKAGES.isdisjoint(folders)


def hides(path: str, protected: Collection[str]) -> bool:
    """Whether Python would import a file of this name in the place of a protected module: packages and
    extension modules come before `.py` files."""
    *folders, name = path.split("/")
    above = ("/".join(folders[:depth]) for depth in range(1, len(folders) + 1))
    stem = "/".join((*folders, name.split(".")[0]))
    return any(f"{p}.py" in protected for p in above) or (name.endswith(".so") and f"{stem}.py" in protected)


def top_module(path: str) -> str:
    """The name under which a workspace's file is imported, up to the first dot."""
    return path.removeprefix("src/").split("/")[0].removesuffix(".py")


def plain_files(tar: bytes) -> dict[str, bytes]:
    """Path -> content of a tar. Raises ValueError for anything but plain files."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            for member in archive:
                name = member.name.removeprefix("./")
                handle = archive.extractfile(member) if member.isfile() else None
                if handle is not None:
                    found[name] = handle.read()
                elif not member.isdir():
                    raise ValueError(f"{name} in the tar is no plain file")
    except tarfile.TarError as error:
        raise ValueError(f"these bytes are no tar: {error}") from error
    return found


@lru_cache(maxsize=64)
def protected_files(tar: bytes) -> Mapping[str, bytes]:
    """`plain_files` of a task's protected tar, which every grading of the task reads."""
    return plain_files(tar)


@lru_cache(maxsize=64)
def control_runs(tar: bytes, tests: tuple[str, ...]) -> list[controls.Control]:
    """`controls.plan` for the tests in a task's protected tar, which every passing grading asks for."""
    return controls.plan(protected_files(tar), tests)


@dataclass(frozen=True)
class _Place:
    """A runner and what one task has there."""

    runner: TestRunner
    tar: bytes
    """The protected files."""
    trusted: Mapping[str, bytes | None]
    """Laid over the runner's workspace to get the task's."""

    @property
    def protected(self) -> Mapping[str, bytes]:
        return protected_files(self.tar)

    async def keep(self, files: Mapping[str, bytes | None]) -> tuple[dict[str, bytes | None], list[str]]:
        """The changes that count, and the names of those that do not."""
        protected = self.protected
        library = {path for path in files if top_module(path) in sys.stdlib_module_names}
        if library:  # new modules under names of the standard library, which the tests mean
            there = {top_module(path) for path in (*await self.runner.listing(), *self.trusted)}
            library = {path for path in library if top_module(path) not in there}
        dropped = sorted(
            path
            for path in files
            if path in protected or path in library or is_configuration(path) or hides(path, protected)
        )
        return {path: data for path, data in files.items() if path not in dropped}, dropped

    async def run(
        self,
        kept: Mapping[str, bytes | None],
        arguments: Collection[str],
        timeout: float,
        *,
        executable: Collection[str] = (),
        trace: bool = False,
        altered: Mapping[str, bytes] | None = None,
    ) -> TestRun:
        """`altered`: protected files of a control run."""
        trusted, protected = {**self.trusted, **(altered or {})}, self.protected
        return await self.runner.run(
            kept,
            list(arguments),
            timeout=timeout,
            trace=trace,
            executable=set(executable) & set(kept),
            trusted=trusted,
            protected=[name for name in trusted if name in protected],
        )

    async def unearned(
        self, kept: Mapping[str, bytes | None], spec: VerifierSpec, executable: Collection[str]
    ) -> list[str]:
        """Tests that still pass where they expect something else (`verifiers.controls`)."""
        for control in await asyncio.to_thread(control_runs, self.tar, spec.fail_to_pass):
            run = await self.run(
                kept, sorted(control.tests), spec.timeout_s, executable=executable, altered=control.files
            )
            if run.outcome == "infrastructure":
                raise RunnerFailed(run.output[-500:] or "no jail")
            passed = [name for name, status in run.tests.items() if status is TestStatus.PASSED]
            if found := controls.still_passing(control, passed):
                return found
        return []

    async def apply(self, diff: bytes, allowed: Collection[str]) -> patches.Applied:
        """Apply a diff to the task's workspace; raises patches.PatchRefused."""
        names = [name for name in await asyncio.to_thread(patches.touched, diff) if not strange(name)]
        contents, modes = await self.runner.read(names), await self.runner.listing()
        contents |= {name: data for name, data in self.trusted.items() if name in contents}

        def read(name: str) -> patches.SourceFile | None:
            content = contents.get(name)
            return None if content is None else patches.SourceFile(content, modes.get(name, False))

        return await asyncio.to_thread(patches.apply, diff, read, allowed)


class Grader:
    """Judges tasks; keeps a few sandboxes warm and never judges the same change twice unless told to.

    An async context manager, or call `close`.
    """

    def __init__(
        self,
        provider: SandboxProvider,
        images: Images,
        blobs: Blobs,
        cache: VerdictCache | None = None,
        *,
        jobs: int = 2,
        warm: int = 4,
        plugins: Collection[str] = (),
        chat: ChatModel | None = None,
    ) -> None:
        """
        Args:
            jobs: jails that run at once for one task.
            warm: sandboxes kept open between gradings.
            plugins: pytest plugins that the images' tests need.
            chat: the model that judges rubrics; without one those cannot be judged.
        """
        self._provider = provider
        self._images = images
        self._blobs = blobs
        self.cache = cache or VerdictCache()
        self._jobs = jobs
        self._plugins = tuple(plugins)
        self._pool = RunnerPool(warm)
        self._bench = Bench(provider, images, blobs, chat, self._judge_change)
        self._running: dict[str, asyncio.Future[Verdict]] = {}
        self._differences: dict[tuple[str, str, str], Mapping[str, bytes | None]] = {}

    async def grade(self, task: Task, diff: bytes, *, fresh: bool = False) -> Verdict:
        """Apply a git diff to the task's workspace and judge the result.

        Returns reward 0.0 for a diff that is refused or fails, 1.0 for one that passes, None with a typed
        failure when it could not be judged. `fresh` neither reads the cache nor shares a running grading.
        """
        key = self._key(task, ["diff", hashlib.sha256(diff).hexdigest()])
        known = None if fresh else self.cache.get(key, last=False)
        if known is not None:
            return known
        try:
            if task.verifier.kind == "pytest":
                async with self._place(task) as place:
                    applied = await place.apply(diff, task.verifier.allowed)
            else:
                applied = await self._bench.apply(task, diff)
        except patches.PatchRefused as refused:
            result = Verdict(reward=0.0, evidence=f"Refused: {refused}.")
        except _OURS as error:
            return unjudged(error)
        else:
            result = await self.grade_files(task, applied.files, executable=applied.executable, fresh=fresh)
        self.cache.put(key, result)
        return result

    async def grade_files(
        self,
        task: Task,
        files: Mapping[str, bytes | None],
        *,
        executable: Collection[str] = (),
        fresh: bool = False,
    ) -> Verdict:
        """The same for a caller that has the changed files (None: deleted) instead of a diff."""
        for path in files:
            if not patches.is_allowed(path, task.verifier.allowed):
                return Verdict(reward=0.0, evidence=f"Refused: {path} is outside of what may be changed.")
        change = [[p, None if d is None else hashlib.sha256(d).hexdigest()] for p, d in sorted(files.items())]
        key = self._key(task, [change, sorted(executable)])
        if fresh:
            return await self._judge(task, files, executable, key)
        known = self.cache.get(key)
        if known is not None:
            return known
        running = self._running.get(key)
        if running is None:
            running = asyncio.ensure_future(self._judge(task, files, executable, key))
            self._running[key] = running
            running.add_done_callback(lambda _: self._running.pop(key, None))
        # shielded: one caller that gives up does not take the verdict from the others
        return await asyncio.shield(running)

    async def run(
        self,
        task: Task,
        files: Mapping[str, bytes | None],
        arguments: Collection[str],
        *,
        trace: bool = False,
    ) -> TestRun:
        """Run chosen tests (the visible ones, say) on a changed workspace, with no verdict and no cache.

        Protected files are the task's own, as in grading. Raises RunnerFailed, SandboxError.
        """
        async with self._place(task) as place:
            kept, _ = await place.keep(files)
            return await place.run(kept, arguments, task.verifier.timeout_s, trace=trace)

    async def close(self) -> None:
        """Close the sandboxes."""
        for running in list(self._running.values()):
            running.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._pool.close()

    async def _judge(
        self, task: Task, files: Mapping[str, bytes | None], executable: Collection[str], key: str
    ) -> Verdict:
        spec = task.verifier
        if spec.kind != "pytest":
            result = await judge(self._bench, task, Change(dict(files), frozenset(executable)))
            self.cache.put(key, result)
            return result
        try:
            async with self._place(task) as place:
                kept, dropped = await place.keep(files)
                run = await place.run(kept, spec.arguments, spec.timeout_s, executable=executable)
                result = verdict(spec.expected, spec.fail_to_pass, spec.pass_to_pass, run)
                unearned = await place.unearned(kept, spec, executable) if result.reward else []
        except _OURS as error:
            return unjudged(error)
        if unearned:
            why = f"Passes whatever the test expects: {', '.join(unearned[:5])}."
            result = result.model_copy(update={"reward": 0.0, "evidence": why})
        if dropped:
            note = f" Put back or left out: {', '.join(dropped)}."
            result = result.model_copy(update={"evidence": result.evidence + note})
        self.cache.put(key, result)
        return result

    async def _judge_change(self, task: Task, change: Change) -> Verdict:
        """For verifiers that are made of others; never from the cache, since the whole is looked up there."""
        return await self.grade_files(task, change.files, executable=change.executable, fresh=True)

    @asynccontextmanager
    async def _place(self, task: Task) -> AsyncGenerator[_Place]:
        """A warm runner that holds the task's graded workspace, its protected files out of reach."""
        environment = task.environment
        shared = environment.substrate
        tar = self._blobs.get(task.verifier.protected)
        protected = protected_files(tar)
        image = shared.image if shared else environment.image
        limits = environment.limits

        async def make() -> TestRunner:
            if not self._images.exists(image):
                raise RunnerFailed(f"image {image} is not in the store: build the task again")
            runner = TestRunner(
                self._provider,
                image,
                workdir=environment.workdir,
                jobs=self._jobs,
                base={} if shared else protected,
                protected=protected if shared else (),
                plugins=self._plugins,
                memory_mb=limits.memory_mb,
                pids=limits.pids,
                disk_mb=limits.disk_mb,
            )
            await runner.start()
            return runner

        # a shared runner knows the names of protected files, not one task's contents
        inside = tuple(sorted(protected)) if shared else task.verifier.protected
        key = (image, environment.workdir, limits.model_dump_json(), inside)
        async with self._pool.lease(key, make) as runner:
            yield _Place(runner, tar, await self._trusted(runner, task, protected))

    async def _trusted(
        self, runner: TestRunner, task: Task, protected: Mapping[str, bytes]
    ) -> Mapping[str, bytes | None]:
        """What makes the task's graded workspace out of a substrate's; protected contents are checked."""
        shared = task.environment.substrate
        if shared is None:
            return {}
        key = (shared.image, shared.changes, task.verifier.protected)
        if key not in self._differences:
            laid = changes.load(self._blobs.get(shared.changes))
            there = await runner.read(list(protected))
            wrong = {name: data for name, data in protected.items() if laid.get(name, there[name]) != data}
            self._differences[key] = {**laid, **wrong}
        return self._differences[key]

    def _key(self, task: Task, change: object) -> str:
        if task.verifier.kind != "pytest" and self._bench.chat is not None:
            change = [change, self._bench.chat.identity]
        return VerdictCache.key(task.environment.image, change, task.verifier.digest())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


_OURS = (*OURS, RunnerFailed)
