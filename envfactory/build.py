"""From a history to an environment in which the package's own tests run, without a language model.

    tree of the newest revision -> layout, requirements -> wheels -> /opt/env -> images -> suite, twice

Code of the package runs in jails only. The result is kept by content: building the same revision again
reads one file. What is left out: packages with compiled parts that have no pure fallback, dependencies
without wheels, other interpreters than the one that runs us.
"""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from catalog.atomic import write_atomic
from catalog.jsonl import read_record
from catalog.models import TestStatus, digest_json
from envfactory import layout as layouts
from envfactory import metadata, requirements, wheels
from envfactory.errors import BuildError, full_disk_is_a_user_error
from envfactory.layout import Layout
from envfactory.sanitize import clean
from envfactory.sources.base import History, Progress, Revision, silent
from envfactory.trees import File, changed, scratch, tree_key, write_tree
from sandbox.base import SandboxProvider
from sandbox.images import ImageStore
from verifiers.runner import TestRun, TestRunner

FORMAT = 1
_BASE = ("pytest",)
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_OFFLINE = re.compile(
    r"gaierror|Network is unreachable|Name or service not known|name resolution|Max retries exceeded"
)
_MODULES = {"yaml": "pyyaml", "dateutil": "python-dateutil", "attr": "attrs", "pkg_resources": "setuptools"}
_MODULES |= {
    name: name for name in ("hypothesis", "mock", "six", "pytz", "freezegun", "attrs", "setuptools", "nose")
}
_MODULES |= {
    name: name.replace("_", "-") for name in ("pytest_asyncio", "pytest_mock", "parameterized", "tzdata")
}
"""Modules that tests import, to the distribution that brings them; anything else must be declared."""


class BuildConfig(BaseModel):
    """Settings of a build."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file_timeout_s: float = 90.0
    """For one run of one test file; slower files are left out."""
    min_passing: float = 0.5
    """Share of the tests that must pass in both runs; below it the package is refused."""
    jobs: int = 2


@dataclass(frozen=True, slots=True)
class Suite:
    """What two runs of the package's tests said."""

    statuses: dict[str, TestStatus]
    """Tests with the same status in both runs."""
    flaky: tuple[str, ...]
    """Tests with two statuses, or seen only once."""
    slow: tuple[str, ...] = ()
    """Test files that took too long and are left out."""
    durations: dict[str, float] = field(default_factory=dict[str, float])
    """Test file to the seconds that one run of it took."""
    functions: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Test to the package functions that it executed, `path::qualified name`."""

    @property
    def passing(self) -> tuple[str, ...]:
        return tuple(sorted(test for test, status in self.statuses.items() if status is TestStatus.PASSED))

    @property
    def failing(self) -> tuple[str, ...]:
        bad = (TestStatus.FAILED, TestStatus.ERROR)
        return tuple(sorted(test for test, status in self.statuses.items() if status in bad))


@dataclass(frozen=True)
class Build:
    """A package that runs: images, layout and the verdict on its suite."""

    name: str
    source: str
    pinned: str
    revision: Revision
    version: str
    licence: str | None
    layout: Layout
    requirements: tuple[str, ...]
    lock: wheels.Lock
    env_image: str
    """Host base and /opt/env."""
    image: str
    """The same with the clean workspace at /workspace, for test runners."""
    tree: dict[str, File]
    """The clean workspace."""
    suite: Suite
    plugins: tuple[str, ...] = ()
    """pytest plugins that the tests need, for `TestRunner` and `Grader`."""

    @property
    def env(self) -> dict[str, str]:
        return sandbox_env(self.layout)


def sandbox_env(layout: Layout) -> dict[str, str]:
    """Environment variables of every image: fixed zone, locale and hash seed, and the module path."""
    return {
        "PATH": "/opt/env/bin:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": layout.pythonpath,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "TZ": "UTC",
        "LANG": "C.UTF-8",
        # The agent's user does not own the workspace's repository in every backend.
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
    }


async def build(
    history: History,
    home: Path,
    provider: SandboxProvider,
    images: ImageStore,
    *,
    revision: Revision | None = None,
    config: BuildConfig | None = None,
    progress: Progress = silent,
) -> Build:
    """Build the environment of a revision (default: the newest). Raises BuildError with what to change."""
    config = config or BuildConfig()
    revision = revision or history.newest
    raw = history.tree(revision)
    version = metadata.version_of(raw, revision.name if history.kind == "release" else "0")
    tree = clean(changed(raw, metadata.generated_files(raw, version)))
    layout = layouts.detect(tree, history.name)
    _refuse_broken_settings(tree, history.name)
    key = digest_json(
        [FORMAT, tree_key(tree), history.name, version, images.host_base(), config.model_dump()]
    )
    record = home / "builds" / f"{history.name}-{version}-{key[7:19]}.json"
    if record.is_file():
        known = _load(read_record(record), history, revision, tree, layout)
        if images.exists(known.image) and images.exists(known.env_image):
            return known
    result = await _Builder(history, revision, version, raw, tree, layout, config, progress).run(
        home, provider, images
    )
    with full_disk_is_a_user_error(home):
        write_atomic(record, json.dumps(_dump(result), indent=1).encode())
    return result


@dataclass
class _Builder:
    """One build that no record spares us."""

    history: History
    revision: Revision
    version: str
    raw: Mapping[str, File]
    tree: dict[str, File]
    layout: Layout
    config: BuildConfig
    progress: Progress

    async def run(self, home: Path, provider: SandboxProvider, images: ImageStore) -> Build:
        """Environment, images, suite; again with more when the tests miss a module that we know."""
        name, raw = self.history.name, self.raw
        needs = requirements.needs(raw, name)
        about = raw["PKG-INFO"].data if "PKG-INFO" in raw else None
        extra = wheels.package_metadata(name, self.version, about, metadata.entry_points(raw))
        options = str(layouts.ini_settings(self.tree).get("addopts", ""))
        wanted = [*needs.runtime, *_BASE, *requirements.pytest_plugins(options)]
        optional = [text for text in needs.tests if text not in wanted]
        while True:
            self.progress(f"{name} {self.version}: environment with {', '.join([*wanted, *optional])}")
            lock = _resolve(wanted, optional, home, name)
            environment = wheels.environment_tree(lock, home, extra)
            plugins = wheels.pytest_plugins(environment)
            env_image, image = _images(environment, self.tree, self.layout, images)
            suite, messages = await _suite(provider, image, plugins, self.layout, self.config, self.progress)
            more = _missing_modules(messages, lock)
            if not more:
                break
            wanted += more
        _judge(suite, messages, name, self.config, compiled=requirements.extension_modules(raw))
        return Build(
            name=name,
            source=self.history.source,
            pinned=self.history.pinned,
            revision=self.revision,
            version=self.version,
            licence=layouts.licence(raw),
            layout=self.layout,
            requirements=tuple(wanted + optional),
            lock=lock,
            env_image=env_image,
            image=image,
            tree=self.tree,
            suite=suite,
            plugins=plugins,
        )


def _refuse_broken_settings(tree: Mapping[str, File], name: str) -> None:
    # pytest does not start where it cannot read pyproject.toml.
    if (file := tree.get("pyproject.toml")) is not None:
        try:
            tomllib.loads(file.data.decode("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BuildError(f"{name} does not build: its pyproject.toml is damaged ({error})") from None


def _resolve(wanted: Sequence[str], optional: list[str], home: Path, name: str) -> wheels.Lock:
    """Resolve; a test requirement without a wheel is dropped, a runtime one is an error."""
    while True:
        try:
            return wheels.resolve([*wanted, *optional], home)
        except wheels.NoWheel as error:
            culprit = re.split(r"[\[<>=!~;]", error.requirement)[0].lower()
            kept = [text for text in optional if re.split(r"[\[<>=!~;]", text)[0].lower() != culprit]
            if len(kept) == len(optional):
                raise BuildError(f"{name} does not build: {error}") from error
            optional[:] = kept
        except BuildError as error:
            if not optional or "reach" in str(error):
                raise
            # Test requirements that contradict each other: the suite says later which of them it misses.
            optional.clear()


def _images(
    environment: dict[str, File], tree: dict[str, File], layout: Layout, images: ImageStore
) -> tuple[str, str]:
    with full_disk_is_a_user_error(images.root), scratch() as folder:
        wheels.write_environment(environment, folder / "env")
        env_image = images.add_layer(
            images.host_base(), folder / "env", env=sandbox_env(layout), note="environment", owner="root"
        )
        write_tree(tree, folder / "workspace")
        image = images.add_layer(env_image, folder / "workspace", at="/workspace", note="clean workspace")
    return env_image, image


async def _suite(
    provider: SandboxProvider,
    image: str,
    plugins: Sequence[str],
    layout: Layout,
    config: BuildConfig,
    progress: Progress,
) -> tuple[Suite, dict[str, str]]:
    """Run every test file twice, each time in a jail of its own, as graders will.

    The second time in the other order, and traced: which functions of the package each test reaches.
    """
    passes: list[list[TestRun]] = []
    async with TestRunner(provider, image, jobs=config.jobs, plugins=plugins) as runner:

        async def run(path: str, trace: bool) -> TestRun:
            done = await runner.run({}, [path], timeout=config.file_timeout_s, trace=trace)
            if trace and done.outcome == "timeout":  # tracing alone may make it too slow
                return await runner.run({}, [path], timeout=config.file_timeout_s)
            return done

        for trace in (False, True):
            files = list(layout.tests)[:: -1 if trace else 1]
            runs = await asyncio.gather(*(run(path, trace) for path in files))
            passes.append(runs[:: -1 if trace else 1])
            tests, seconds = sum(len(run.tests) for run in runs), sum(run.duration_s for run in runs)
            progress(f"{tests} tests in {seconds:.1f} s")
    statuses: dict[str, TestStatus] = {}
    messages: dict[str, str] = {}
    functions: dict[str, tuple[str, ...]] = {}
    flaky: list[str] = []
    slow: list[str] = []
    durations: dict[str, float] = {}
    for path, first, second in zip(layout.tests, *passes, strict=True):
        messages |= first.messages | second.messages
        if "timeout" in (first.outcome, second.outcome):
            slow.append(path)
            continue
        durations[path] = round(first.duration_s, 3)
        for test in sorted(first.tests.keys() | second.tests.keys()):
            if first.tests.get(test) == second.tests.get(test):
                statuses[test] = first.tests[test]
            else:
                flaky.append(test)
        functions |= second.functions
    if slow and not statuses:
        raise BuildError(
            f"every test file takes longer than {config.file_timeout_s:.0f} s: raise file_timeout_s or choose"
            " a package with quicker tests"
        )
    return Suite(statuses, tuple(flaky), tuple(slow), durations, functions), messages


def _missing_modules(messages: Mapping[str, str], lock: wheels.Lock) -> list[str]:
    """Distributions for modules that the tests import in vain, from a fixed table."""
    have = {wheel.name.partition("-")[0].lower().replace("_", "-") for wheel in lock.wheels}
    names = {match.partition(".")[0] for text in messages.values() for match in _MISSING.findall(text)}
    return sorted({_MODULES[name] for name in names if name in _MODULES} - have)


def _judge(
    suite: Suite, messages: Mapping[str, str], name: str, config: BuildConfig, *, compiled: bool
) -> None:
    total = len(suite.statuses) + len(suite.flaky)
    passing = len(suite.passing)
    if passing and passing >= config.min_passing * total:
        return
    texts = list(messages.values())
    missing = sorted({match for text in texts for match in _MISSING.findall(text)})
    offline = sum(bool(_OFFLINE.search(text)) for text in texts)
    if compiled and passing == 0:
        raise BuildError(f"{name} does not build: it has compiled parts, and only pure Python is supported")
    if missing:
        raise BuildError(
            f"{name} does not build: its tests import {', '.join(missing[:4])}, which it does not declare"
        )
    if offline * 2 > len(texts) > 0:
        raise BuildError(
            f"the tests of {name} need the network, which sandboxes do not have: choose another package"
        )
    why = next((text.strip().splitlines()[-1][:160] for text in texts if text.strip()), "no test was found")
    raise BuildError(f"{name} fails its own tests ({passing} of {total} pass; {why}): choose another version")


def _dump(build: Build) -> dict[str, object]:
    return {
        "format": FORMAT,
        "version": build.version,
        "licence": build.licence,
        "requirements": build.requirements,
        "wheels": [asdict(wheel) for wheel in build.lock.wheels],
        "env_image": build.env_image,
        "image": build.image,
        "suite": asdict(build.suite),
        "plugins": build.plugins,
    }


def _load(
    record: dict[str, object], history: History, revision: Revision, tree: dict[str, File], layout: Layout
) -> Build:
    suite: dict[str, object] = record["suite"]  # type: ignore[assignment]
    return Build(
        name=history.name,
        source=history.source,
        pinned=history.pinned,
        revision=revision,
        version=str(record["version"]),
        licence=record["licence"],  # type: ignore[arg-type]
        layout=layout,
        requirements=tuple(record["requirements"]),  # type: ignore[arg-type]
        lock=wheels.Lock(tuple(wheels.Wheel(**row) for row in record["wheels"])),  # type: ignore[attr-defined]
        env_image=str(record["env_image"]),
        image=str(record["image"]),
        tree=tree,
        suite=Suite(
            {test: TestStatus(status) for test, status in suite["statuses"].items()},  # type: ignore[attr-defined]
            tuple(suite["flaky"]),  # type: ignore[arg-type]
            tuple(suite["slow"]),  # type: ignore[arg-type]
            dict(suite["durations"]),  # type: ignore[call-overload]
            {test: tuple(names) for test, names in suite["functions"].items()},  # type: ignore[attr-defined]
        ),
        plugins=tuple(record["plugins"]),  # type: ignore[arg-type]
    )
