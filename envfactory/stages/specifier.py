"""Stage 1, feasibility and specification: a proposed bug becomes a draft with evaluation points.

The tests that execute the edited function are run on the clean tree (k times) and on the buggy one. What
passes before and fails after is fail-to-pass, what passes both times is pass-to-pass. A bug is rejected
when no test notices it, when it stops the run or a file's collection, or when too much fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from catalog.models import Limits, Origin, TestStatus
from envfactory import interface, statement
from envfactory.bugs import Bug
from envfactory.config import SynthConfig
from envfactory.layout import main_package, module_name
from envfactory.packaging import Draft
from envfactory.prune import test_name, test_path, test_source
from envfactory.stages.base import Rejection, Specification
from envfactory.workbench import Gold, Workbench
from verifiers.runner import TestRun

_BAD = (TestStatus.FAILED, TestStatus.ERROR)


class BugSpecifier:
    """See the module."""

    name = "specifier"

    def __init__(self, bench: Workbench, config: SynthConfig) -> None:
        self._bench = bench
        self._config = config
        build = bench.build
        self._symbols = {
            module: interface.symbols(file.data.decode("utf-8", "replace"), module)
            for path, file in build.tree.items()
            if path.startswith(build.layout.allowed) and path.endswith(".py")
            for module in (module_name(path, build.layout),)
        }

    async def run(self, given: Bug) -> Specification | Rejection:
        """The specification of one bug, or why it makes no task."""
        arguments = self._arguments(given.tests)
        if not arguments:
            return Rejection("no test file is quick enough")
        gold = await self._bench.gold(arguments, self._config.gold_runs)
        timeout = max(3.0, 6 * gold.duration_s)
        run = await self._bench.run(given.files, arguments, timeout=timeout)
        if run.outcome == "timeout":
            return Rejection("the bug hangs the tests")
        if run.outcome != "finished" or run.tampered:
            return Rejection("the bug stops the test run", run.outcome)
        missing = [name for name in gold.expected if name not in run.tests]
        if missing:
            return Rejection("the bug breaks the collection of tests", missing[0])
        passed = [name for name, status in gold.expected.items() if status is TestStatus.PASSED]
        failing = [name for name in passed if run.tests[name] in _BAD]
        if not failing:
            return Rejection("no test notices the bug")
        if len(failing) > self._config.max_fail_to_pass:
            return Rejection("too many tests fail", str(len(failing)))
        return self._specification(given, arguments, gold, run, failing)

    def _arguments(self, tests: Sequence[str]) -> tuple[str, ...]:
        """Files of the most specific tests, those that are too slow on the clean tree left out."""
        files = list(dict.fromkeys(test_path(test) for test in tests))
        return tuple(sorted(files[: self._config.max_test_files]))

    def _specification(
        self, bug: Bug, arguments: tuple[str, ...], gold: Gold, run: TestRun, failing: list[str]
    ) -> Specification:
        build = self._bench.build
        order = {test: i for i, test in enumerate(bug.tests)}
        failing = sorted(failing, key=lambda test: (order.get(test, len(order)), test))
        visible = tuple(failing[: self._config.max_visible])
        messages = {test: run.messages.get(test, "") for test in failing}
        draft = Draft(
            origin=Origin(
                kind="procedural",
                source=build.pinned,
                revision=build.revision.name,
                path=bug.path,
                function=bug.function,
                operator=bug.operator,
                licence=build.licence,
            ),
            slug=f"{build.name}-{bug.slug}"[:60],
            base=build.tree,
            layout=build.layout,
            start=bug.files,
            solved={},
            fail_to_pass=tuple(failing),
            pass_to_pass=tuple(
                name
                for name, status in gold.expected.items()
                if status is TestStatus.PASSED and run.tests[name] is TestStatus.PASSED
            ),
            expected=dict(gold.expected),
            arguments=arguments,
            visible=visible,
            statement=self._statement(bug, visible, messages),
            limits=Limits(timeout_s=round(max(4.0, 10 * gold.duration_s), 1)),
        )
        report = (
            f"{len(gold.expected)} tests of {', '.join(arguments)} are stable on the clean tree "
            f"({len(gold.unstable)} are not and left out); {len(failing)} of them fail with the bug."
        )
        return Specification(draft, report, messages)

    def _statement(self, bug: Bug, visible: Sequence[str], messages: dict[str, str]) -> str:
        build = self._bench.build
        first = visible[0]
        source = build.tree[test_path(first)].data.decode("utf-8", "replace")
        about = interface.subject(test_source(source, test_name(first)), self._symbols, test_name(first))
        name = main_package(build.layout)
        return statement.procedural(name, visible, messages, about=about, seed=bug.slug + bug.edit.after)
