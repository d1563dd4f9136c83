"""Stage 3, solvers: gold, no-op, stub, hack probes and the search-based repair solver on one task.

The first four go through the same grader as any agent's work. The search sees what an agent sees: the
workspace of the task's image, its visible tests, and nothing of the gold patch.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Awaitable, Mapping, Sequence

from catalog.blobs import Blobs
from catalog.models import Task, Verdict
from envfactory.bugs import Split
from envfactory.config import SynthConfig
from envfactory.packaging import workspace
from envfactory.prune import test_name, test_path, test_source
from envfactory.repair import BuggyWorkspace, Choice, Search, repair
from envfactory.stages.base import Attempt, Examined, Specification
from envfactory.trees import Changes, Tree, difference, is_text
from envfactory.workbench import Workbench
from verifiers.grading import Grader
from verifiers.hacks import HackProbe
from verifiers.operators import functions


class SolverEnsemble:
    """See the module.

    Args:
        probes: programs that try to fake a verdict; each must score 0.
        prior: operator -> weight for the search, by split; uniform where it has none.
    """

    name = "solvers"

    def __init__(
        self,
        bench: Workbench,
        grader: Grader,
        blobs: Blobs,
        config: SynthConfig,
        probes: Sequence[HackProbe],
        prior: Mapping[Split, Mapping[str, float]] | None = None,
    ) -> None:
        self._bench = bench
        self._grader = grader
        self._blobs = blobs
        self._config = config
        self._probes = probes
        self._prior = prior or {}

    async def run(self, given: tuple[Specification, Task]) -> Examined:
        """Every attempt, in a fixed order."""
        specification, task = given
        found = workspace(specification.draft)
        texts = [
            test_source(found[test_path(test)].data.decode("utf-8", "replace"), test_name(test))
            for test in task.problem.visible_tests
            if test_path(test) in found
        ]
        base = difference(self._bench.build.tree, found)
        buggy = buggy_workspace(task, found, base, "\n".join(texts))
        attempts = [
            await self._attempt("gold", "gold", self._grader.grade(task, self._blobs.get(task.solution))),
            await self._attempt("no-op", "noop", self._grader.grade_files(task, {}, fresh=True)),
        ]
        stubs = self._stub(task, found)
        if stubs is not None:
            attempts.append(await self._attempt("stub", "stub", self._grader.grade_files(task, stubs)))
        files = {path: file.data for path, file in found.items() if not file.link}
        for probe in self._probes:
            changes = probe.files(task, files)
            attempts.append(
                await self._attempt(
                    probe.name, "hack", self._grader.grade_files(task, _allowed(task, changes))
                )
            )
        began = time.monotonic()
        search = await self._search(task, buggy)
        reward: float | None = 0.0
        evidence = search.reason or "its first success fails hidden tests"
        if search.first is not None:
            verdict = await self._grader.grade_files(task, search.pool[search.first].files)
            reward, evidence = (
                verdict.reward,
                f"edit {len(search.tries)} of {len(search.pool)}: {verdict.evidence}",
            )
        data = {"tries": len(search.tries), "pool": len(search.pool)}
        attempts.append(Attempt("search", "search", reward, evidence, time.monotonic() - began, data))
        return Examined(specification, task, tuple(attempts), buggy, search)

    async def _search(self, task: Task, buggy: BuggyWorkspace) -> Search:
        """The search, which goes on past edits that only the visible tests let pass: the candidates need a
        right one. The solver's own result is its first success."""

        async def confirm(choice: Choice) -> bool:
            return (await self._grader.grade_files(task, choice.files)).reward == 1.0

        if task.split is None:  # mined from history: no single edit repairs it, so only the self-test runs
            alone = self._config.repair.model_copy(update={"budget": 0, "pool": 1})
            return await repair(buggy, self._bench, alone)
        prior = self._prior.get(task.split)
        return await repair(buggy, self._bench, self._config.repair, prior=prior, confirm=confirm)

    async def _attempt(self, solver: str, kind: str, grading: Awaitable[Verdict]) -> Attempt:
        began = time.monotonic()
        verdict = await grading
        evidence = verdict.evidence if verdict.failure is None else verdict.failure.message
        failing = sorted(
            name for name, status in verdict.tests.items() if status not in ("passed", "xpassed")
        )
        return Attempt(
            solver, kind, verdict.reward, evidence, time.monotonic() - began, {"not_passed": failing[:60]}
        )

    @staticmethod
    def _stub(task: Task, found: Tree) -> Changes | None:
        """The touched function without a body, where the task says which function it is."""
        path, function = task.origin.path, task.origin.function
        if path is None or function is None or path not in found:
            return None
        text = stubbed(found[path].data.decode("utf-8", "replace"), function)
        return None if text is None else {path: text.encode()}


def buggy_workspace(task: Task, found: Tree, base: Changes, test_source: str) -> BuggyWorkspace:
    """What the search is given of a task's workspace `found`, which `base` makes of the build's tree."""
    sources = {
        path: file.data.decode("utf-8")
        for path, file in found.items()
        if path.startswith(task.verifier.allowed) and path.endswith(".py") and is_text(file.data)
    }
    return BuggyWorkspace(
        files=sources, visible=task.problem.visible_tests, test_source=test_source, base=base
    )


def stubbed(source: str, function: str) -> str | None:
    """The file with the body of a function replaced by `return None`; None if it is not there."""
    span = next((span for span in functions(source) if span.qualname == function), None)
    if span is None:
        return None
    node = next(
        (
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.lineno == span.def_line
        ),
        None,
    )
    if node is None or node.body[0].lineno == node.lineno:
        return None
    lines = source.splitlines(keepends=True)
    first, last = node.body[0].lineno, node.end_lineno or node.body[-1].lineno
    indent = lines[first - 1][: len(lines[first - 1]) - len(lines[first - 1].lstrip())]
    return "".join([*lines[: first - 1], f"{indent}return None\n", *lines[last:]])


def _allowed(task: Task, changes: Mapping[str, bytes | None]) -> dict[str, bytes | None]:
    """A probe's files as far as a diff could carry them: what is outside `allowed` is refused anyway, and a
    probe must not be counted as stopped only because one of its files was."""
    inside = {path: data for path, data in changes.items() if path.startswith(task.verifier.allowed)}
    return inside or dict(changes)
