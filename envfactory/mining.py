"""Tasks from history: what a release or commit changed, with the tests that came with it.

For each pair of neighbouring revisions the change is halved into sources and tests. The test half laid
over the parent must give between 1 and `max_fail_to_pass` tests that fail; the sources on top must turn
them to passing and break nothing. A release changes much at once, so each source file is also tried
alone, against the test files that belong to it. Rules after R2E-Gym's commit heuristics.

Honest limits: most releases yield nothing, because their files depend on each other or their tests came
later. Nothing here writes a test.
"""

from __future__ import annotations

import ast
import asyncio
import difflib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePosixPath

from catalog.models import Origin, TestStatus
from envfactory import interface, statement
from envfactory.build import Build, sandbox_env
from envfactory.errors import BuildError
from envfactory.layout import Layout, detect, is_protected, is_test_path, module_name
from envfactory.packaging import Draft
from envfactory.prune import test_name, test_path, test_source
from envfactory.sanitize import clean
from envfactory.sources.base import History, Progress, Revision, silent, slug
from envfactory.trees import File, Tree, changed, difference, scratch, write_tree
from sandbox.base import SandboxProvider
from sandbox.images import ImageStore
from verifiers.runner import TestRun, TestRunner


@dataclass(frozen=True, slots=True)
class MiningConfig:
    """Limits of the search; the defaults follow R2E-Gym where it has one."""

    max_files: int = 4
    """Source files of one task."""
    max_lines: int = 200
    """Added and removed source lines."""
    max_fail_to_pass: int = 50
    max_visible: int = 2
    """Failing tests that the agent sees."""
    pairs: int = 12
    """Neighbouring revisions looked at, newest first."""
    seconds: float = 40.0
    """Time for all test runs together."""
    run_timeout_s: float = 60.0
    skip_revisions: frozenset[str] = frozenset()
    """Names of revisions that were looked at before."""


@dataclass
class Funnel:
    """What became of the candidates, by reason."""

    counts: dict[str, int] = field(default_factory=dict[str, int])
    exhausted: bool = True
    """False when the time ran out before the last pair."""

    def add(self, reason: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A source half with the test files that may judge it."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


async def mine(
    history: History,
    build: Build,
    provider: SandboxProvider,
    images: ImageStore,
    *,
    config: MiningConfig | None = None,
    progress: Progress = silent,
) -> tuple[list[Draft], Funnel]:
    """Drafts from the newest pairs of revisions, and the funnel that says where the others went."""
    config = config or MiningConfig()
    funnel, drafts = Funnel(), list[Draft]()
    deadline = time.monotonic() + config.seconds
    known: dict[str, bytes] = {}
    revisions = history.revisions[-config.pairs - 1 :]
    for parent, child in reversed(list(pairwise(revisions))):
        if child.name in config.skip_revisions:
            continue
        if time.monotonic() > deadline:
            funnel.exhausted = False
            break
        before = clean(history.tree(parent, known=known))
        after = clean(history.tree(child, known=known))
        pair = _Pair(history, build, config, parent, child, before, after, funnel)
        if pair.candidates:
            progress(f"{history.name} {parent.name} to {child.name}: {len(pair.candidates)} candidates")
            drafts += await pair.examine(provider, images, deadline)
    return drafts, funnel


class _Pair:
    """Two neighbouring revisions."""

    def __init__(
        self,
        history: History,
        build: Build,
        config: MiningConfig,
        parent: Revision,
        child: Revision,
        before: dict[str, File],
        after: dict[str, File],
        funnel: Funnel,
    ) -> None:
        self.history, self.build, self.config, self.funnel = history, build, config, funnel
        self.parent, self.child, self.before, self.after = parent, child, before, after
        self.layout: Layout | None = None
        self.candidates: list[Candidate] = []
        try:
            self.layout = detect(before, history.name)
        except BuildError:
            funnel.add("parent has no package or no tests")
            return
        self.changes = difference(before, after)
        self.candidates = self._find(self.layout)

    def _find(self, layout: Layout) -> list[Candidate]:
        sources = [path for path in self.changes if self._is_source(path, layout)]
        tests = [
            path
            for path, data in self.changes.items()
            if data is not None and is_test_path(path) and is_protected(path)
        ]
        if not sources or not tests:
            self.funnel.add("no source change" if not sources else "no test change")
            return []
        meant = [path for path in sources if not same_meaning(self._old(path), self.changes[path] or b"")]
        if not meant:
            self.funnel.add("formatting, comments or version only")
            return []
        found: list[Candidate] = []
        if len(meant) <= self.config.max_files:
            found.append(Candidate(tuple(meant), tuple(tests)))
        if len(meant) > 1 or len(tests) > 1:
            for path in meant:
                own = tuple(test for test in tests if self._belongs(test, path, layout))
                if own:
                    found.append(Candidate((path,), own))
        unique = list(dict.fromkeys(found))
        small = [item for item in unique if self._size(item) <= self.config.max_lines]
        for _ in range(len(unique) - len(small)):
            self.funnel.add("too large")
        return small

    def _is_source(self, path: str, layout: Layout) -> bool:
        inside = any(path == prefix or path.startswith(prefix) for prefix in layout.allowed)
        return inside and path.endswith(".py") and not is_protected(path) and self.changes[path] is not None

    def _old(self, path: str) -> bytes:
        return self.before[path].data if path in self.before else b""

    def _belongs(self, test: str, source: str, layout: Layout) -> bool:
        stem, module = PurePosixPath(source).stem, module_name(source, layout)
        name = PurePosixPath(test).stem
        if stem.strip("_") and stem.strip("_") in name:
            return True
        text = (self.changes[test] or b"").decode("utf-8", "replace")
        return bool(re.search(rf"\b{re.escape(module)}\b|import .*\b{re.escape(stem)}\b", text))

    def _size(self, candidate: Candidate) -> int:
        return sum(changed_lines(self._old(path), self.changes[path] or b"") for path in candidate.sources)

    async def examine(self, provider: SandboxProvider, images: ImageStore, deadline: float) -> list[Draft]:
        """Run the candidates of this pair."""
        assert self.layout is not None
        with scratch() as temporary:
            write_tree(self.before, temporary / "workspace")
            image = images.add_layer(
                self.build.env_image,
                temporary / "workspace",
                at="/workspace",
                env=sandbox_env(self.layout),
                note=f"parent {self.parent.name}",
            )
        support = {
            path: data for path, data in self.changes.items() if is_protected(path) and not is_test_path(path)
        }
        drafts: list[Draft] = []
        covered: set[str] = set()
        async with TestRunner(provider, image, plugins=self.build.plugins) as runner:

            async def run(files: dict[str, bytes | None], arguments: Sequence[str]) -> TestRun:
                return await runner.run(files, arguments, timeout=self.config.run_timeout_s)

            for candidate in self.candidates:
                if time.monotonic() > deadline:
                    self.funnel.exhausted = False
                    break
                if covered & set(candidate.sources):
                    continue
                tests = support | {path: self.changes[path] for path in candidate.tests}
                gold = {path: self.changes[path] for path in candidate.sources}
                failing, passing = await asyncio.gather(
                    run(tests, candidate.tests), run(tests | gold, candidate.tests)
                )
                draft = self._judge(candidate, tests, gold, failing, passing)
                if draft is not None:
                    covered |= set(candidate.sources)
                    drafts.append(draft)
        return drafts

    def _judge(
        self,
        candidate: Candidate,
        tests: dict[str, bytes | None],
        gold: dict[str, bytes | None],
        failing: TestRun,
        passing: TestRun,
    ) -> Draft | None:
        before, after = failing.tests, passing.tests
        good = TestStatus.PASSED
        fail_to_pass = sorted(t for t, s in after.items() if s is good and before.get(t) is not good)
        broken = [t for t, s in before.items() if s is good and after.get(t) is not good]
        if passing.outcome != "finished" or not after:
            self.funnel.add("gold run did not finish")
        elif not fail_to_pass:
            self.funnel.add("no test turns to passing")
        elif len(fail_to_pass) > self.config.max_fail_to_pass:
            self.funnel.add("too many tests turn to passing")
        elif broken:
            self.funnel.add("breaks a passing test")
        else:
            self.funnel.add("found")
            return self._draft(candidate, tests, gold, fail_to_pass, failing, passing)
        return None

    def _draft(
        self,
        candidate: Candidate,
        tests: dict[str, bytes | None],
        gold: dict[str, bytes | None],
        fail_to_pass: Sequence[str],
        failing: TestRun,
        passing: TestRun,
    ) -> Draft:
        assert self.layout is not None
        kind = self.history.kind
        used = {test: self._words_of(test, tests) for test in fail_to_pass}
        every = set().union(*used.values())
        solved = changed(self.before, gold)
        found = interface.changed_interface(self.before, solved, gold.keys(), self.layout, every)
        names = {symbol.name.rpartition(".")[2] for symbol in found}
        # A test that fails by assertion shows more than one whose file cannot even be imported; among the
        # latter, one that uses a new name says which.
        order = sorted(fail_to_pass, key=lambda t: (t not in failing.tests, not names & used[t], t))
        visible = order[: self.config.max_visible]
        messages = dict(failing.messages)
        for test in visible:
            # A file that does not import reports no test of its own: its message stands under the file.
            messages.setdefault(test, failing.messages.get(test_path(test), ""))
        shown = interface.render(found)
        first = candidate.sources[0]
        name = slug(f"{self.history.name}-{PurePosixPath(first).stem}-{self.child.name}")
        notes = self._notes([symbol.name for symbol in found] + [PurePosixPath(first).stem], gold)
        return Draft(
            origin=Origin(
                kind=kind,
                source=self.history.source,
                revision=self.parent.name,
                path=first,
                licence=self.build.licence,
            ),
            slug=name,
            base=self.before,
            start={},
            solved=gold,
            fail_to_pass=tuple(fail_to_pass),
            pass_to_pass=tuple(
                sorted(
                    t
                    for t, s in passing.tests.items()
                    if s is TestStatus.PASSED and t not in set(fail_to_pass)
                )
            ),
            expected=dict(passing.tests),
            arguments=candidate.tests,
            visible=tuple(visible),
            statement=statement.release(
                self.history.name, visible, messages, notes=notes, interface=shown, seed=name
            ),
            layout=self.layout,
            interface=shown,
            tests=tests,
        )

    def _words_of(self, test: str, tests: dict[str, bytes | None]) -> set[str]:
        source = (tests.get(test_path(test)) or b"").decode("utf-8", "replace")
        return interface.words(test_source(source, test_name(test)))

    def _notes(self, mentions: list[str], gold: dict[str, bytes | None]) -> list[str]:
        """Lines of the change log that are new in the child, or its commit message."""
        added = "\n".join(
            line
            for path, data in gold.items()
            for line in (data or b"").decode("utf-8", "replace").splitlines()
            if line.encode() not in self._old(path)
        )
        if self.history.kind == "commit":
            return statement.clean_notes(self.child.message.splitlines(), gold=added)
        lines: list[str] = []
        for path, data in self.changes.items():
            if (
                re.search(r"(?:^|/)(?:change|history|news|releases?|versions)[\w-]*(?:\.\w+)?$", path, re.I)
                and data
            ):
                old = set(self._old(path).decode("utf-8", "replace").splitlines())
                lines += [line for line in data.decode("utf-8", "replace").splitlines() if line not in old]
        names = [part for name in mentions for part in name.split(".") if len(part) > 2]
        return statement.clean_notes(lines, gold=added, mentions=names)


def same_meaning(before: bytes, after: bytes) -> bool:
    """Whether two Python sources differ at most in formatting, comments, docstrings and version numbers."""
    try:
        return _meaning(before) == _meaning(after)
    except (SyntaxError, ValueError):
        return before == after


def _meaning(source: bytes) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
            node.body = [item for item in node.body if not _is_version(item)]
    return ast.dump(tree)


def _is_version(node: ast.stmt) -> bool:
    names = {
        "__version__",
        "version",
        "VERSION",
        "__version_tuple__",
        "version_tuple",
        "__version_info__",
        "__date__",
    }
    return isinstance(node, ast.Assign) and all(
        isinstance(target, ast.Name) and target.id in names for target in node.targets
    )


def changed_lines(before: bytes, after: bytes) -> int:
    """Added and removed lines of a change (moved ones counted twice)."""
    old, new = before.splitlines(), after.splitlines()
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    kept = sum(block.size for block in matcher.get_matching_blocks())
    return len(old) + len(new) - 2 * kept


def parent_tree(history: History, revision: Revision) -> Tree:
    """The clean tree of a revision."""
    return clean(history.tree(revision))
