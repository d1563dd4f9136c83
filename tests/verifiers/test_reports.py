"""Parsers of reports: on what the real tools wrote (`record`), on hostile input, and there and back."""

from __future__ import annotations

import contextlib
import functools
import json
from xml.sax.saxutils import quoteattr

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catalog.models import TestStatus, VerifierSpec
from tests.verifiers.record import MARK, RECORDED
from tests.verifiers.suites import SUITES
from verifiers.reports import base, cargo, ctrf, gotest, jest, junit, marked
from verifiers.reports.base import ReportError, make_id
from verifiers.suite import RUNNERS

PASSED, FAILED, SKIPPED = TestStatus.PASSED, TestStatus.FAILED, TestStatus.SKIPPED
XFAILED, ERROR = TestStatus.XFAILED, TestStatus.ERROR
parse_marked = functools.partial(marked.parse, mark=MARK)
PARSERS = {
    "junit": junit.parse, "ctrf": ctrf.parse, "jest": jest.parse, "go": gotest.parse, "cargo": cargo.parse,
    "marked": parse_marked,
}  # fmt: skip


def statuses(report: base.Report) -> dict[str, TestStatus]:
    return {result.id: result.status for result in report.results}


# ---- what real tools wrote


@pytest.mark.parametrize("name", sorted(file.stem for file in RECORDED.glob("*.txt")))
def test_recorded_reports_are_read(name):
    suite = SUITES[name.removesuffix("-json")]
    parse = RUNNERS["jest-json" if name.endswith("-json") else suite.runner].parse or parse_marked
    report = parse((RECORDED / f"{name}.txt").read_bytes()).inside("/workspace")
    assert statuses(report) == suite.expected
    assert report.finished
    assert not report.doubts
    assert not report.tampered


def test_most_runners_have_a_record():
    assert len(list(RECORDED.glob("*.txt"))) >= 6


# ---- ids

words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
letters = st.characters(
    codec="utf-8",
    exclude_categories=("Cc", "Cs"),
    include_characters="\n\t",
    exclude_characters="\ufffe\uffff",
)
xml_words = st.text(letters, max_size=12)
tests = st.lists(st.tuples(words, words, st.sampled_from(["passed", "failed", "skipped"])), max_size=8)


def numbered(ids: list[str]) -> list[str]:
    """The rule, written another way: the n-th of the same id gets #n, or the next that is free."""
    taken: list[str] = []
    for each in ids:
        candidates = [each, *(f"{each}#{n}" for n in range(2, len(ids) + 2))]
        taken.append(next(name for name in candidates if name not in taken))
    return taken


@settings(deadline=None)
@given(tests)
def test_names_survive_json(listed):
    document = {
        "testResults": [
            {"name": "f", "status": "x",
             "assertionResults": [{"ancestorTitles": [a], "title": b, "status": c} for a, b, c in listed]}
        ]
    }  # fmt: skip
    report = jest.parse(json.dumps(document).encode())
    assert [result.id for result in report.results] == numbered([f"f::{a} > {b}" for a, b, _ in listed])
    assert [result.status for result in report.results] == [c for _, _, c in listed]


@settings(deadline=None)
@given(tests)
def test_names_survive_our_lines(listed):
    lines = [json.dumps({"place": a, "names": [b], "status": c}) for a, b, c in listed]
    lines.append(json.dumps({"end": len(listed)}))
    report = parse_marked("".join(f"{MARK} {line}\n" for line in lines).encode())
    assert report.finished
    assert [result.id for result in report.results] == numbered([f"{a}::{b}" for a, b, _ in listed])


@settings(deadline=None)
@given(st.lists(st.tuples(xml_words.filter(bool), xml_words), max_size=8))
def test_names_survive_xml(listed):
    def attribute(text: str) -> str:
        return quoteattr(text, {"\n": "&#10;", "\t": "&#9;", "\r": "&#13;"})

    cases = "".join(f"<testcase classname={attribute(a)} name={attribute(b)}/>" for a, b in listed)
    report = junit.parse(f'<testsuite tests="{len(listed)}">{cases}</testsuite>'.encode())
    assert [result.id for result in report.results] == numbered([f"{a}::{b}" for a, b in listed])
    assert not report.doubts


@settings(deadline=None)
@given(st.text(max_size=20), st.text(max_size=20))
def test_an_id_is_never_empty_and_always_encodes(place, name):
    assert make_id(place, name).encode()
    assert make_id("", "") == "::"
    assert "\0" not in make_id(place, name)


@settings(deadline=None)
@given(st.binary(max_size=200))
@pytest.mark.parametrize("name", sorted(PARSERS))
def test_any_bytes_are_a_report_or_an_error(name, data):
    for prefix in (b"", b"{", b'{"Action":', f"{MARK} ".encode(), b"<testsuite>", b"running 1 test\n"):
        with contextlib.suppress(ReportError):
            PARSERS[name](prefix + data)


def test_wrong_utf8_and_byte_order_marks_are_read():
    report = junit.parse(b'\xef\xbb\xbf<testsuite><testcase classname="a" name="\xff\xc3("/></testsuite>')
    assert list(statuses(report)) == ["a::\ufffd\ufffd("]
    latin = (
        '<?xml version="1.0" encoding="ISO-8859-1"?><testsuite><testcase classname="a" name="é"/></testsuite>'
    )
    assert list(statuses(junit.parse(latin.encode("latin-1")))) == ["a::é"]
    wide = latin.replace("ISO-8859-1", "UTF-16").encode("utf-16")
    assert list(statuses(junit.parse(wide))) == ["a::é"]
    assert list(statuses(ctrf.parse(ctrf_of(b'"\xff"')))) == ["::\ufffd"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(max_size=12), st.text(max_size=12)), min_size=1, max_size=8))
def test_ids_survive_a_task_s_record(listed):
    report = base.collect(base.Result(make_id(a, b), PASSED) for a, b in listed)
    spec = VerifierSpec(
        kind="suite",
        fail_to_pass=(report.results[-1].id,),
        expected=statuses(report),
        protected="sha256:" + "0" * 64,
        allowed=(".",),
    )
    again = VerifierSpec.model_validate_json(spec.model_dump_json())
    assert again == spec
    assert list(again.expected) == [result.id for result in report.results]
    assert again.digest()


# ---- JUnit XML


def test_junit_statuses_and_messages():
    report = junit.parse(
        b"""<testsuites><testsuite name="s" tests="6" failures="1" errors="1" skipped="2">
        <testcase classname="c" name="ok" time="1,234.5"/>
        <testcase classname="c" name="failed"><failure message="short">long &lt;text&gt;</failure>
            <system-out><![CDATA[<failure/>]]></system-out></testcase>
        <testcase classname="c" name="broken"><error/></testcase>
        <testcase classname="c" name="skipped"><skipped message="why"/></testcase>
        <testcase classname="c" name="later"><skipped type="pytest.xfail"/></testcase>
        <testcase classname="c" name="flaky"><flakyFailure message="once"/></testcase>
        </testsuite></testsuites>"""
    )
    assert list(statuses(report).values()) == [PASSED, FAILED, ERROR, SKIPPED, XFAILED, PASSED]
    assert report.results[0].duration_s == 1234.5
    assert report.results[1].message == "short\nlong <text>"
    assert not report.doubts


def test_junit_cases_without_a_class_are_placed_by_their_suites():
    text = b'<testsuite name="a"><testsuite name="b"><testcase name="t"/></testsuite></testsuite>'
    assert list(statuses(junit.parse(text))) == ["a > b::t"]


def test_junit_files_are_numbered_together():
    one = b'<testsuite><testcase classname="c" name="t"/></testsuite>'
    assert list(statuses(junit.parse(one, one))) == ["c::t", "c::t#2"]


@pytest.mark.parametrize(
    ("told", "doubts"),
    [('tests="2"', 0), ('tests="1"', 1), ('tests="2" failures="1"', 1), ('tests="x"', 0), ("", 0)],
)
def test_junit_counts_are_compared(told, doubts):
    text = f'<testsuite {told}><testcase name="a"/><testcase name="b"/></testsuite>'
    assert len(junit.parse(text.encode()).doubts) == doubts


@pytest.mark.parametrize(
    "text",
    [
        '<!DOCTYPE x [<!ENTITY a "aaaaaaaa">]><testsuite><testcase name="&a;"/></testsuite>',
        '<!DOCTYPE x SYSTEM "file:///etc/passwd"><testsuite/>',
        "<html/>",
        "<testsuite>",
        "<testsuite>" * 100,
        '<?xml version="1.0" encoding="utf-7"?><testsuite/>',
        "",
    ],
)
def test_junit_that_is_hostile_or_none_is_refused(text):
    with pytest.raises(ReportError):
        junit.parse(text.encode())


def test_characters_that_xml_forbids_do_not_kill_a_report():
    case = '<testcase name="a\x1b[0m&#27;&#x0;&#55296;&#9;"><failure>\x00</failure></testcase>'
    (result,) = junit.parse(f"<testsuite>{case}</testsuite>".encode()).results
    assert result.id == "::a\ufffd[0m\ufffd\ufffd\ufffd\t"
    assert result.status is FAILED


def test_a_report_has_limits(monkeypatch):
    monkeypatch.setattr(base, "MAX_BYTES", 100)
    with pytest.raises(ReportError, match="MiB"):
        junit.parse(b" " * 60, b" " * 60)
    monkeypatch.setattr(base, "MAX_TESTS", 2)
    with pytest.raises(ReportError, match="more than 2 tests"):
        base.collect([base.Result("a", PASSED)] * 3)


# ---- CTRF, jest


def ctrf_of(name: bytes, **summary: int) -> bytes:
    test = b'{"name": ' + name + b', "status": "passed", "duration": 1500}'
    return b'{"results": {"summary": ' + json.dumps(summary).encode() + b', "tests": [' + test + b"]}}"


def test_ctrf_places_by_file_and_suite():
    rows = [
        {"name": "t", "status": "passed", "filePath": "a.js", "suite": ["x", "y"], "duration": 1500},
        {"name": "t", "status": "pending", "suite": "old"},
        {"name": "t", "status": "failed", "message": "m", "trace": "at"},
        {"name": "t", "status": "other"},
    ]
    document = {"results": {"tool": {"name": "x"}, "summary": {"tests": 4, "passed": 1}, "tests": rows}}
    report = ctrf.parse(json.dumps(document).encode())
    assert statuses(report) == {
        "a.js::x > y > t": PASSED,
        "::old > t": SKIPPED,
        "::t": FAILED,
        "::t#2": ERROR,
    }
    assert (report.results[0].duration_s, report.results[2].message) == (1.5, "m\nat")
    assert not report.doubts


def test_ctrf_counts_are_compared_and_strange_statuses_refused():
    assert not ctrf.parse(ctrf_of(b'"t"', tests=1, passed=1)).doubts
    assert len(ctrf.parse(ctrf_of(b'"t"', tests=2, failed=1)).doubts) == 2
    with pytest.raises(ReportError, match="status"):
        ctrf.parse(ctrf_of(b'"t"').replace(b"passed", b"fine"))
    for text in (b"[]", b"{}", b"[" * 100_000, b'{"results": {"tests": [1], "summary": {}}}'):
        with pytest.raises(ReportError):
            ctrf.parse(text)


def test_a_jest_report_with_text_around_it_is_refused():
    document = b'{"numTotalTests": 1, "numFailedTests": 0, "testResults": []}'
    assert len(jest.parse(document).doubts) == 1
    for forged in (document + b"x", b"{}" + document):
        with pytest.raises(ReportError):
            jest.parse(forged)


# ---- go


def go_events(*rows: tuple[str, str]) -> bytes:
    return b"".join(
        json.dumps({"Action": action, "Package": "p", **({"Test": test} if test else {})}).encode() + b"\n"
        for action, test in rows
    )


def test_a_go_test_that_ends_twice_or_never_began_is_a_doubt():
    forged = gotest.parse(go_events(("run", "A"), ("pass", "A"), ("fail", "A"), ("fail", "")))
    assert forged.doubts
    assert gotest.parse(go_events(("pass", "B"), ("pass", ""))).doubts
    assert gotest.parse(go_events(("run", "A"), ("fail", "A"), ("pass", ""))).doubts
    again = gotest.parse(go_events(("run", "A"), ("pass", "A"), ("run", "A"), ("fail", "A"), ("fail", "")))
    assert statuses(again) == {"p::A": PASSED, "p::A#2": FAILED}
    assert not again.doubts


def test_a_go_package_that_dies_is_an_error():
    died = gotest.parse(go_events(("run", "A"), ("fail", "")))
    assert statuses(died) == {"p::A": ERROR}
    assert not gotest.parse(go_events(("run", "A"), ("pass", "A"))).finished
    assert statuses(gotest.parse(b"FAIL\tx/y [build failed]\n")) == {"x/y::": ERROR}


# ---- cargo


def test_libtest_json_stands_for_text():
    lines = [
        "     Running unittests src/lib.rs (target/debug/deps/clamp-0123456789abcdef)",
        '{ "type": "suite", "event": "started", "test_count": 3 }',
        '{ "type": "test", "event": "started", "name": "a::b" }',
        '{ "type": "test", "name": "a::b", "event": "ok", "exec_time": 0.5 }',
        '{ "type": "test", "name": "c", "event": "failed", "stdout": "said\\n" }',
        '{ "type": "test", "name": "d", "event": "ignored" }',
        '{ "type": "suite", "event": "failed", "passed": 1, "failed": 1, "ignored": 1, "measured": 0 }',
    ]
    report = cargo.parse("\n".join(lines).encode())
    place = "clamp:src/lib.rs"
    assert statuses(report) == {f"{place}::a::b": PASSED, f"{place}::c": FAILED, f"{place}::d": SKIPPED}
    assert [(r.duration_s, r.message) for r in report.results] == [(0.5, ""), (0.0, "said"), (0.0, "")]
    assert not report.doubts
    assert cargo.parse("\n".join([*lines[:4], *lines[5:]]).encode()).doubts


def test_a_test_binary_that_dies_is_an_error():
    report = cargo.parse(
        b"     Running tests/it.rs (t/it-0123456789abcdef)\n\nrunning 2 tests\ntest a ... ok\n"
    )
    assert statuses(report) == {"it:tests/it.rs::a": PASSED, "it:tests/it.rs::": ERROR}


def test_swallowed_lines_of_cargo_are_a_doubt():
    listed = b"running 2 tests\ntest a ... ok\ntest b ... noise ok\n\n"
    assert len(cargo.parse(listed + b"test result: ok. 2 passed; 0 failed; 0 ignored; x\n").doubts) == 1


# ---- our lines


def test_foreign_lines_and_missing_ends_are_told():
    good = f'{MARK} {{"place": "a", "names": ["b"], "status": "passed"}}\n'.encode()
    end = f'{MARK} {{"end": 1}}\n'.encode()
    assert parse_marked(good + end).finished
    assert not parse_marked(good).finished
    assert not parse_marked(end).finished
    assert not parse_marked(b"noise\n" + good + end, quiet=False).tampered
    assert parse_marked(good + b"wrong" + good[len(MARK) :] + end).tampered
    assert parse_marked(good + end + good).tampered
    with pytest.raises(ReportError, match="status"):
        parse_marked(good.replace(b"passed", b"absent?"))
