"""Lines of our own reporters (Python, node:test, jest and vitest), each under a secret mark.

    MARK {"place": "tests.test_a.TestX", "names": ["test_y"], "status": "passed", "seconds": 0.1}
    MARK {"end": 1}

The mark reaches the reporter on standard input, which it reads before any test is loaded. A line without it
is not a report: in a quiet channel the run is marked as tampered with. No end, or another count: the process
died.
"""

from __future__ import annotations

from importlib import resources

from catalog.models import TestStatus
from verifiers.reports.base import Fields, Report, Result, collect, decoded, make_id, parse_json

_STATUSES = {status.value: status for status in TestStatus}


def script(name: str) -> bytes:
    """The source of a reporter, to be put into a sandbox."""
    return resources.files("verifiers.reports").joinpath(name).read_bytes()


def parse(*documents: bytes, mark: str, quiet: bool = True) -> Report:
    """Standard output of one run; where it is not `quiet`, others' lines may stand in it.

    Raises ReportError, which only our own reporter could cause.
    """
    results: list[Result] = []
    tampered: list[str] = []
    told: int | None = None
    for text in decoded(documents):
        for line in text.split("\n"):
            said, _, rest = line.partition(" ")
            if not line:
                continue
            if said != mark:
                if quiet:
                    tampered = ["something else wrote into the reporter's channel"]
                continue
            value = Fields(parse_json(rest), "a line")
            if told is not None:
                tampered = ["a report came after the end of the run"]
            elif (told := value.count("end")) is None:
                results.append(_result(value))
    return collect(results, (), tampered, finished=told == len(results))


def _result(value: Fields) -> Result:
    name = make_id(value.text("place"), *value.texts("names"))
    return Result(name, value.status(_STATUSES), value.text("message"), value.number("seconds"))
