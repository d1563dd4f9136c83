"""JUnit XML, as Maven Surefire, Gradle, pytest, gotestsum, ctest and many others write it.

Statuses: `error` is error, `failure` failed, `skipped` skipped (xfailed where pytest says so); a test that
failed and then passed on a rerun (`flakyFailure`, Surefire) passed, as it did for Surefire's exit status.
A document type, and with it every entity, is refused. Characters that XML does not allow, raw or as
references, become U+FFFD. What the format loses: line breaks in names where a tool did not write them as
`&#10;` (XML makes them spaces), and the file of a test.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field
from xml.parsers import expat

from catalog.models import TestStatus
from verifiers.reports.base import FAILING, Report, ReportError, Result, check_size, collect, make_id

_DEPTH = 64
_ENCODINGS = frozenset({"utf-8", "ascii", "iso8859-1", "cp1252", "utf-16"})
_DECLARED = re.compile(rb"""^\s*<\?xml[^>]{0,200}?encoding\s*=\s*["']([A-Za-z0-9._-]{1,40})["']""")
_RAW = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_REFERENCE = re.compile(r"&#(?:x([0-9a-fA-F]{1,8})|([0-9]{1,8}));")
_UNRUN = frozenset({"notrun", "disabled", "skipped", "suppressed"})


@dataclass
class _Suite:
    name: str
    told: dict[str, str]
    tests: int = 0
    direct: int = 0
    failing: int = 0


@dataclass
class _Case:
    place: str
    name: str
    seconds: float
    status: TestStatus = TestStatus.PASSED
    message: list[str] = field(default_factory=list[str])


def parse(*documents: bytes) -> Report:
    """Files in the order given; Surefire writes one for every class. Raises ReportError."""
    check_size(documents)
    results: list[Result] = []
    doubts: list[str] = []
    for document in documents:
        reader = _Reader()
        reader.read(_text(document))
        results += reader.results
        doubts += reader.doubts
    return collect(results, doubts)


class _Reader:
    """Handlers of one document; no tree is built."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self.doubts: list[str] = []
        self._depth = 0
        self._suites: list[_Suite] = []
        self._case: _Case | None = None
        self._said: str | None = None
        """The element below the case whose text is its message."""

    def read(self, text: str) -> None:
        parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.StartDoctypeDeclHandler = _refuse
        parser.EntityDeclHandler = _refuse
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters
        try:
            parser.Parse(text, True)
        except expat.ExpatError as error:
            raise ReportError(f"the report is not XML: {error}") from None

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth > _DEPTH:
            raise ReportError("the report is nested too deeply")
        if self._depth == 1 and tag not in ("testsuites", "testsuite"):
            raise ReportError(f"the report is no JUnit XML: it begins with <{tag[:40]}>")
        if tag == "testsuite":
            self._suites.append(_Suite(attributes.get("name", ""), attributes))
        elif tag == "testcase" and self._case is None:
            suites = " > ".join(suite.name for suite in self._suites)
            place = attributes.get("classname") or suites
            self._case = _Case(place, attributes.get("name", ""), _seconds(attributes.get("time", "")))
            if {attributes.get("status", ""), attributes.get("result", "")} & _UNRUN:
                self._case.status = TestStatus.SKIPPED
        elif self._case is not None and tag in ("error", "failure", "skipped"):
            status = {"error": TestStatus.ERROR, "failure": TestStatus.FAILED, "skipped": TestStatus.SKIPPED}
            if tag == "skipped" and attributes.get("type") == "pytest.xfail":
                status["skipped"] = TestStatus.XFAILED
            if self._case.status not in FAILING:
                self._case.status = status[tag]
            self._case.message.append(attributes.get("message", "") + "\n")
            self._said = tag

    def _characters(self, text: str) -> None:
        if self._case is not None and self._said is not None:
            self._case.message.append(text)

    def _end(self, tag: str) -> None:
        self._depth -= 1
        if tag == self._said:
            self._said = None
        elif tag == "testcase" and self._case is not None:
            case, self._case = self._case, None
            name = make_id(case.place, case.name)
            self.results.append(Result(name, case.status, "".join(case.message), case.seconds))
            for suite in self._suites:
                suite.tests += 1
                suite.failing += case.status in FAILING
            if self._suites:
                self._suites[-1].direct += 1
        elif tag == "testsuite" and self._suites:
            self._check(self._suites.pop())

    def _check(self, suite: _Suite) -> None:
        """Tools count nested suites or do not: either is right."""
        told = _whole(suite.told.get("tests", ""))
        if told is not None and told not in (suite.tests, suite.direct):
            self.doubts.append(f"suite {suite.name!r} counts {told} tests and lists {suite.tests}")
        failures, errors = (_whole(suite.told.get(name, "")) for name in ("failures", "errors"))
        if (failures is not None or errors is not None) and suite.tests == suite.direct:
            counted = (failures or 0) + (errors or 0)
            if bool(counted) != bool(suite.failing):
                self.doubts.append(f"suite {suite.name!r} counts {counted} failures, lists {suite.failing}")


def _refuse(*_: object) -> None:
    raise ReportError("the report declares a document type, which is refused")


def _text(document: bytes) -> str:
    """Decoded once, as the document says, and made of characters that XML allows."""
    encoding = "utf-8-sig"
    if document.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif match := _DECLARED.match(document.removeprefix(codecs.BOM_UTF8)):
        try:
            name = codecs.lookup(match[1].decode("ascii")).name
        except LookupError:
            name = "unknown"
        if name not in _ENCODINGS:
            raise ReportError(f"the report's encoding {match[1].decode('ascii')!r} is not read")
        encoding = encoding if name in ("utf-8", "utf-16") else name
    text = document.decode(encoding, "replace")
    return _REFERENCE.sub(_reference, _RAW.sub("\ufffd", text))


def _reference(match: re.Match[str]) -> str:
    code = int(match[1], 16) if match[1] else int(match[2])
    bad = code > 0x10FFFF or 0xD800 <= code < 0xE000 or code in (0xFFFE, 0xFFFF)
    return "&#65533;" if bad or (code < 32 and code not in (9, 10, 13)) else match[0]


def _seconds(text: str) -> float:
    """Surefire writes thousands with commas."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None
