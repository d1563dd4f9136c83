"""The JSON that jest (`--json`) and vitest (`--reporter=json`) write, which is one format.

A file that could not be loaded has no tests of its own: it stands as `file::`, with the status error. `todo`
tests have no body and count as skipped, as both runners say.
"""

from __future__ import annotations

from collections.abc import Iterator

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

_STATUSES = {
    "passed": TestStatus.PASSED,
    "failed": TestStatus.FAILED,
    "skipped": TestStatus.SKIPPED,
    "pending": TestStatus.SKIPPED,
    "disabled": TestStatus.SKIPPED,
    "todo": TestStatus.SKIPPED,
}


def parse(*documents: bytes) -> Report:
    """Raises ReportError."""
    results: list[Result] = []
    doubts: list[str] = []
    for text in decoded(documents):
        report = Fields(parse_json(text), "the report")
        files = sorted(report.objects("testResults"), key=lambda file: file.text("name"))
        for file in files:
            results += _results(file)
        tests = [test for file in files for test in file.objects("assertionResults")]
        told = {
            "numTotalTests": len(tests),
            "numPassedTests": sum(test.text("status") == "passed" for test in tests),
            "numFailedTests": sum(test.text("status") == "failed" for test in tests),
        }
        for name, number in told.items():
            if report.count(name) not in (None, number):
                doubts.append(f"{name} is {report.count(name)} and {number} are listed")
    return collect(results, doubts)


def _results(file: Fields) -> Iterator[Result]:
    place = file.text("name")
    failing = False
    for test in file.objects("assertionResults"):
        status = test.status(_STATUSES)
        failing = failing or status in FAILING
        name = make_id(place, *test.texts("ancestorTitles"), test.text("title"))
        yield Result(name, status, "\n".join(test.texts("failureMessages")), test.number("duration") / 1000)
    if file.text("status") == "failed" and not failing:
        yield Result(make_id(place, ""), TestStatus.ERROR, file.text("message"))
