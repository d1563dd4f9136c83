"""The events of `go test -json`, which Go makes from what the test binary prints.

What Go loses: spaces in subtest names are underscores, an empty name is `#00`, a second one of a name gets
`#01`. A package that did not build, or failed without a failing test, stands as `package::`, an error. Before
Go 1.20 a test can print lines that become events: an end without a beginning, and a second end, are doubts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from catalog.models import TestStatus
from verifiers.reports.base import (
    FAILING,
    Fields,
    Report,
    Result,
    collect,
    decoded,
    make_id,
    parse_json,
)  # fmt: skip

_ENDS = {"pass": TestStatus.PASSED, "fail": TestStatus.FAILED, "skip": TestStatus.SKIPPED}
_UNBUILT = re.compile(r"FAIL\t(\S+)(?: \[(.+)\])?")
_OUTPUT = 4000


@dataclass
class _Test:
    package: str
    name: str
    status: TestStatus | None = None
    seconds: float = 0.0
    output: str = ""


@dataclass
class _Run:
    tests: list[_Test] = field(default_factory=list[_Test])
    latest: dict[tuple[str, str], _Test] = field(default_factory=dict[tuple[str, str], _Test])
    packages: dict[str, str] = field(default_factory=dict[str, str])
    """Package -> how it ended."""
    said: dict[str, str] = field(default_factory=dict[str, str])
    doubts: list[str] = field(default_factory=list[str])

    def take(self, event: Fields) -> None:
        action, package, test = event.text("Action"), event.text("Package"), event.text("Test")
        if not test:
            if action in _ENDS:
                self.packages[package] = action
            elif action == "output":
                self.said[package] = (self.said.get(package, "") + event.text("Output"))[-_OUTPUT:]
            return
        known = self.latest.get((package, test))
        if action == "run":
            known = self.latest[package, test] = _Test(package, test)
            self.tests.append(known)
        elif action == "output" and known is not None:
            known.output = (known.output + event.text("Output"))[-_OUTPUT:]
        elif action in _ENDS:
            if known is None or known.status is not None:
                self.doubts.append(f"{package} {test} ended {'again' if known else 'without a beginning'}")
                return
            known.status, known.seconds = _ENDS[action], event.number("Elapsed")


def parse(*documents: bytes) -> Report:
    """Standard output of `go test -json`. Raises ReportError."""
    run = _Run()
    for text in decoded(documents):
        for line in text.split("\n"):
            if line.startswith("{"):
                run.take(Fields(parse_json(line), "an event"))
            elif match := _UNBUILT.fullmatch(line.rstrip("\r")):
                run.packages[match[1]] = "fail"
                run.said.setdefault(match[1], match[2] or "")
    return _report(run)


def _report(run: _Run) -> Report:
    results: list[Result] = []
    failing: set[str] = set()
    for test in run.tests:
        ended = test.status or TestStatus.ERROR
        message = test.output if ended is not TestStatus.PASSED else ""
        results.append(Result(make_id(test.package, test.name), ended, message, test.seconds))
        if ended in FAILING:
            failing.add(test.package)
    for package, action in run.packages.items():
        if action == "fail" and package not in failing:
            results.append(Result(make_id(package, ""), TestStatus.ERROR, run.said.get(package, "")))
        elif action != "fail" and package in failing:
            run.doubts.append(f"package {package} ended as {action} with failing tests")
    unended = {test.package for test in run.tests} - set(run.packages)
    return collect(results, run.doubts, finished=not unended)
