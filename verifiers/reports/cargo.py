"""What `cargo test` prints, standard output and error in one stream, as stable text or as libtest's JSON.

Text (`cargo test --no-fail-fast 2>&1`) is all that stable Rust has; nightly's JSON lines (`-- -Z
unstable-options --format json`) may stand in its place. Text loses durations and, where tests print past the
capture, whole results, which the counts at the end of each binary give away. Line numbers of documentation
tests are left out of their ids, since an edit above moves them. The crate in the place tells the members of a
workspace apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from catalog.models import TestStatus
from verifiers.reports.base import Fields, Report, Result, collect, decoded, make_id, parse_json

_RUNNING = re.compile(r"\s*Running (?:unittests )?(\S.*?) \((\S.*)\)")
_DOCS = re.compile(r"\s*Doc-tests (\S+)")
_BEGIN = re.compile(r"running (\d+) tests?")
_TEST = re.compile(r"test (.+) \.\.\. (ok|FAILED|ignored)(?:, (.*?))?(?: <([0-9.]+)s>)?")
_RESULT = re.compile(r"test result: (ok|FAILED)\. (\d+) passed; (\d+) failed; (\d+) ignored;.*")
_OUTPUT = re.compile(r"---- (.+) stdout ----")
_KIND = re.compile(r"( \(line \d+\))?( - (should panic|compile fail|compile))?$")
_STATUSES = {
    "ok": TestStatus.PASSED, "FAILED": TestStatus.FAILED, "failed": TestStatus.FAILED,
    "timeout": TestStatus.FAILED, "ignored": TestStatus.SKIPPED,
}  # fmt: skip
_COUNTED = (TestStatus.PASSED, TestStatus.FAILED, TestStatus.SKIPPED)


@dataclass
class _Run:
    results: list[Result] = field(default_factory=list[Result])
    doubts: list[str] = field(default_factory=list[str])
    place: str = ""
    announced: int | None = None
    """How many tests the running binary said it has; None between binaries."""
    first: int = 0
    """Where its results begin."""
    messages: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    message: list[str] | None = None

    def line(self, line: str) -> None:
        if line.startswith("{"):
            self.event(Fields(parse_json(line), "a line of libtest"))
        elif match := _RUNNING.fullmatch(line):
            self.move(f"{re.sub(r'-[0-9a-f]{16}$', '', match[2].rpartition('/')[2])}:{match[1]}")
        elif match := _DOCS.fullmatch(line):
            self.move(f"{match[1]}:doc")
        elif match := _BEGIN.fullmatch(line):
            self.begin(int(match[1]))
        elif match := _RESULT.fullmatch(line):
            self.end(int(match[2]), int(match[3]), int(match[4]))
        elif self.announced is not None:
            self.inside(line)

    def inside(self, line: str) -> None:
        """A line between a binary's beginning and its result."""
        if (match := _OUTPUT.fullmatch(line)) is not None:
            self.message = self.messages.setdefault(_name(match[1]), [])
        elif line == "failures:":
            self.message = None
        elif self.message is not None:
            self.message.append(line)
        elif match := _TEST.fullmatch(line):
            self.add(match[1], match[2], match[3] or "", float(match[4] or 0))

    def event(self, event: Fields) -> None:
        """One JSON line."""
        kind, what = event.text("type"), event.text("event")
        if kind == "suite" and what == "started":
            self.begin(event.count("test_count") or 0)
        elif kind == "suite" and what in ("ok", "failed"):
            self.end(*(event.count(name) or 0 for name in ("passed", "failed", "ignored")))
        elif kind == "test" and what in _STATUSES:
            said = "\n".join(filter(None, (event.text("stdout"), event.text("message"))))
            self.add(event.text("name"), what, said, event.number("exec_time"))

    def add(self, name: str, status: str, message: str, seconds: float) -> None:
        self.results.append(Result(make_id(self.place, _name(name)), _STATUSES[status], message, seconds))

    def move(self, place: str) -> None:
        self.abandon()
        self.place = place

    def begin(self, announced: int) -> None:
        self.abandon()
        self.announced, self.first, self.messages, self.message = announced, len(self.results), {}, None

    def end(self, passed: int, failed: int, ignored: int) -> None:
        """Compare with what was listed, and give the failures their texts."""
        listed = self.results[self.first :]
        found = tuple(sum(result.status is status for result in listed) for status in _COUNTED)
        if self.announced != len(listed) or found != (passed, failed, ignored):
            self.doubts.append(f"{self.place} counts {(passed, failed, ignored)} and lists {found}")
        texts = {make_id(self.place, name): "\n".join(lines) for name, lines in self.messages.items()}
        self.results[self.first :] = [
            Result(each.id, each.status, each.message or texts.get(each.id, ""), each.duration_s)
            for each in listed
        ]
        self.announced, self.message = None, None

    def abandon(self) -> None:
        """A binary that began and gave no result died."""
        if self.announced is not None:
            died = "the test binary ended before it gave its result"
            self.results.append(Result(make_id(self.place, ""), TestStatus.ERROR, died))
            self.announced = None


def parse(*documents: bytes) -> Report:
    """Raises ReportError for broken JSON; text that is none of cargo's has no results."""
    run = _Run()
    take: Callable[[str], None] = run.line
    for text in decoded(documents):
        for line in text.split("\n"):
            take(line.rstrip("\r"))
        run.abandon()
    return collect(run.results, run.doubts)


def _name(name: str) -> str:
    """Without what is no part of the test's path: the kind, and the line of a documentation test."""
    return _KIND.sub("", name)
