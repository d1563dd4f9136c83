"""CTRF (Common Test Report Format, ctrf.io): one JSON document for any runner.

`suite` is a string in older reports and a list in newer ones. `pending` is skipped, `other` is error: it says
that something came out which is neither. Flaky tests that passed in the end passed.
"""

from __future__ import annotations

from collections.abc import Iterator

from catalog.models import TestStatus
from verifiers.reports.base import Fields, Report, Result, collect, decoded, make_id, parse_json

_STATUSES = {
    "passed": TestStatus.PASSED,
    "failed": TestStatus.FAILED,
    "skipped": TestStatus.SKIPPED,
    "pending": TestStatus.SKIPPED,
    "other": TestStatus.ERROR,
}


def parse(*documents: bytes) -> Report:
    """Raises ReportError."""
    results: list[Result] = []
    doubts: list[str] = []
    for text in decoded(documents):
        report = Fields(parse_json(text), "the report").object("results")
        tests = report.objects("tests")
        summary = report.object("summary")
        results += _results(tests)
        listed = {name: sum(test.text("status") == name for test in tests) for name in _STATUSES}
        listed["tests"] = len(tests)
        for name, number in listed.items():
            if summary.count(name) not in (None, number):
                doubts.append(f"the summary counts {summary.count(name)} as {name} and {number} are listed")
    return collect(results, doubts)


def _results(tests: list[Fields]) -> Iterator[Result]:
    for test in tests:
        status = test.status(_STATUSES)
        name = make_id(test.text("filePath"), *test.texts("suite"), test.text("name"))
        message = "\n".join(filter(None, (test.text("message"), test.text("trace"))))
        yield Result(name, status, message, test.number("duration") / 1000)
