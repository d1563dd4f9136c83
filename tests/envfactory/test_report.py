"""The HTML report: hostile text stays text, the pictures have the right numbers."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catalog.blobs import Blobs
from catalog.models import (
    Decision,
    Gate,
    Origin,
    Problem,
    QualityReport,
    SolveRate,
    Status,
    Task,
    TestStatus,
    wilson,
)
from catalog.store import Catalog
from envfactory import charts
from envfactory.report import diff_lines, proposals, render, visible, write
from tests.catalog.test_store import make_task

ATTACKS = [
    "<script>alert(1)</script>",
    "</pre></details><img src=x onerror=alert(1)>",
    "\"'><svg/onload=alert(1)>",
    "{{ 7 * 7 }}{% include 'x' %}",
    "</style><style>body{display:none}</style>",
    "<meta http-equiv=refresh content='0;url=http://example.org'>",
    "javascript:alert(1)",
    "\x1b[31mred\x1b[0m \x00 \u202eevil\u2066 \ufeff",
    "]]>--><!-- ",
]


class Outline(HTMLParser):
    """Counts elements and collects attributes, as a browser would see them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile(text: str, blobs: Blobs) -> tuple[Task, QualityReport]:
    """A task with `text` in every place that a task has."""
    task = make_task(
        status=Status.ACCEPTED,
        origin=Origin(
            kind="commit", source=text, revision=text, path=text, function=text, operator=text, licence=text
        ),
        problem=Problem(statement=text, visible_tests=(), interface=text or "-"),
        solution=blobs.put(f"diff --git a/x b/x\n@@ -1 +1 @@\n-{text}\n+{text}\n".encode()),
    )
    changed = {"fail_to_pass": (text,), "expected": {text: TestStatus.PASSED}}
    task = task.model_copy(update={"id": f"id {text}", "verifier": task.verifier.model_copy(update=changed)})
    report = QualityReport(
        task_id=task.id,
        gates=(Gate(name=text, passed=True, evidence=text), Gate(name=text, passed=False, evidence=text)),
        solve_rates=(SolveRate(solver=text, passed=1, attempts=3),),
        history=(Decision(actor=text, action="created", reason=text, at=0.0),),
    )
    return task, report


def hostile_page(text: str) -> str:
    blobs = Blobs("memory://report")
    task, report = hostile(text, blobs)
    return render([task], [report], {}, blobs, title=f"Title {text}", now=0.0)


def page(catalog: Catalog, folder: Path) -> str:
    write(catalog, folder / "r.html")
    return (folder / "r.html").read_text()


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_text_stays_text(attack: str) -> None:
    html = hostile_page(attack)
    attacked, plain = Outline(html), Outline(hostile_page("harmless"))
    assert attacked.elements == plain.elements, "the text made or closed an element"
    assert [a[:2] for a in attacked.attributes] == [a[:2] for a in plain.attributes]
    assert "7 * 7" not in attack or "49" not in attacked.text
    assert not re.search("[\x00\x1b\u202e\u2066\ufeff]", html)


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_gives_the_same_outline(text: str) -> None:
    # Line breaks make further lines of the diff, as they should.
    text = "x" + " ".join(text.splitlines())
    assert Outline(hostile_page(text)).elements == Outline(hostile_page("harmless")).elements


def test_the_file_fetches_nothing_and_runs_nothing() -> None:
    outline = Outline(hostile_page("a"))
    policy = [v for tag, name, v in outline.attributes if (tag, name) == ("meta", "content")]
    assert "default-src 'none'; style-src 'unsafe-inline'" in policy
    assert not outline.elements.keys() & {"script", "link", "img", "iframe", "object", "base", "form"}
    addresses = [v for _, name, v in outline.attributes if name in ("src", "href", "action", "xlink:href")]
    assert addresses
    assert all(address.startswith("#task-") for address in addresses)
    assert not [name for _, name, _ in outline.attributes if name.startswith("on")]


def test_the_gold_patch_stands_only_in_the_closed_reviewers_section(tmp_path: Path) -> None:
    with Catalog.open(tmp_path / "home") as catalog:
        task = make_task(solution=catalog.blobs.put(b"@@ -1 +1 @@\n-wrong\n+the_secret_answer\n"))
        catalog.put_task(task)
        html = page(catalog, tmp_path)
    before, _, rest = html.partition('<details class="reviewer">')
    inside, _, after = rest.partition("</details>")
    assert "the_secret_answer" in inside
    assert "the_secret_answer" not in before + after
    assert "<details open" not in html


def test_a_catalog_without_tasks_or_blobs_still_gives_a_page(tmp_path: Path) -> None:
    with Catalog.open(tmp_path / "home") as catalog:
        assert "There are no tasks yet" in page(catalog, tmp_path)
        catalog.put_task(make_task())
        html = page(catalog, tmp_path)
    assert "No gate has looked at it yet." in html
    assert "The patch cannot be shown" in html


def test_pictures_count_right() -> None:
    def report(n: int, *passed: bool | None) -> QualityReport:
        names = ("builds", "noop", "leak")
        gates = tuple(
            Gate(name=name, passed=ok, evidence="", cost_s=1.0)
            for name, ok in zip(names, passed, strict=False)
        )
        rates = (
            SolveRate(solver="noop", passed=0, attempts=1),
            SolveRate(solver="agent", effort=50, passed=n, attempts=4),
        )
        return QualityReport(task_id=str(n), gates=gates, solve_rates=rates)

    reports = [report(0, True, True, True), report(1, True, False), report(2, True, True, None),
               report(3, False), report(4, True, True, True)]  # fmt: skip
    tasks = [make_task(str(n), status=Status.ACCEPTED if n in (0, 4) else Status.DRAFT) for n in range(5)]
    steps = charts.funnel(tasks, reports, [("edits tried", 50)])
    assert [(s.label, s.count, s.lost) for s in steps] == [
        ("edits tried", 50, 0),
        ("tasks", 5, 45),
        ("pass builds", 4, 1),
        ("pass noop", 3, 1),
        ("accepted", 2, 1),
    ]
    bars = charts.gate_bars(reports)
    assert [(b.name, b.passed, b.failed, b.unknown) for b in bars] == [
        ("builds", 4, 1, 0),
        ("noop", 3, 1, 0),
        ("leak", 2, 0, 1),
    ]
    noop, agent = charts.solver_rows(reports)
    assert (noop.mean, noop.low, noop.high) == (0.0, *wilson(0, 5)), "a zero count has an upper bound"
    assert (agent.solver, agent.mean, agent.bins) == ("agent, effort 50", 0.5, (1, 1, 1, 1, 0, 1))
    assert 0 <= agent.low < 0.5 < agent.high <= 1
    assert [w.passed for w in charts.whiskers(reports, "agent, effort 50")] == [0, 1, 2, 3, 4]


def test_diffs_are_classified_by_place_not_by_look() -> None:
    patch = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n same\n--- minus\n+++ plus\n"
    assert [line.kind for line in diff_lines(patch)] == ["file", "file", "file", "hunk", "same", "del", "add"]


def test_long_text_is_cut_and_says_so() -> None:
    assert visible("a" * 30, 10) == "a" * 10 + "\n... 20 more characters are not shown"


def test_the_funnel_begins_with_what_never_became_a_task(tmp_path: Path) -> None:
    with Catalog.open(tmp_path / "home") as catalog:
        catalog.put_task(make_task())
        for number, reason in enumerate(["unnoticed", "slow", "unnoticed"]):
            catalog.stages.put("proposal", str(number), {"reason": reason, "task": None})
        catalog.stages.put("proposal", "3", {"reason": "", "task": {"id": "x"}})
        assert proposals(catalog, 1) == [("proposals", 4), ("not: unnoticed", 2), ("not: slow", 1)]
        assert "not: unnoticed" in page(catalog, tmp_path)
