"""Suites judged in sandboxes: unittest for real, and reports of a command that lies in every way."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from catalog.models import TestStatus
from sandbox.base import SandboxSpec
from tests.verifiers.suites import SUITES, Suite, task_of
from verifiers.suite import STOP

pytestmark = pytest.mark.asyncio(loop_scope="module")
UNITTEST = SUITES["unittest"]
FIXED = {name: text.encode() for name, text in UNITTEST.fixed.items()}
ABOVE = "tests.test_clamp.TestClamp::test_above"
CASE = '<testcase classname="c" name="t"/>'
FAILED = '<testsuite><testcase name="x"><failure/></testcase></testsuite>'
GOOD = f'<testsuite tests="1" failures="0">{CASE}</testsuite>'


@pytest.fixture(scope="module")
def unittest_task(images, blobs):
    return task_of(UNITTEST, images.workspace(UNITTEST.files), blobs)


async def test_a_unittest_suite_is_judged_by_its_ids(grader, unittest_task):
    good = await grader.grade_files(unittest_task, FIXED)
    assert good.reward == 1.0, good
    assert good.tests == UNITTEST.expected
    bad = await grader.grade_files(unittest_task, {})
    assert bad.reward == 0.0
    assert bad.tests[ABOVE] is TestStatus.FAILED


@pytest.mark.parametrize(
    "lines",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "import os\nfor fd in range(3, 200):\n    try: os.write(fd, b'x {}\\n')\n    except OSError: pass",
        "import unittest; unittest.TestCase.run = lambda self, result=None: None",
        "raise ImportError('no')",
    ],
)
async def test_hostile_modules_do_not_pass(grader, unittest_task, lines):
    verdict = await grader.grade_files(
        unittest_task, {"pkg/numbers.py": FIXED["pkg/numbers.py"] + lines.encode()}
    )
    assert verdict.reward == 0.0


async def test_tests_and_what_steers_python_do_not_apply(grader, unittest_task):
    files = {
        "tests/test_clamp.py": b"",
        "sitecustomize.py": b"import os; os._exit(0)",
        "a/x.pth": b"import os",
        **FIXED,
    }
    verdict = await grader.grade_files(unittest_task, files)
    assert verdict.reward == 1.0
    assert verdict.evidence.endswith("left out: a/x.pth, sitecustomize.py, tests/test_clamp.py.")


async def test_protected_files_cannot_be_moved_while_tests_run(grader, unittest_task):
    code = (
        b"import os\n"
        b"for act in (lambda: os.rename('tests', 'x'), lambda: os.remove('tests/test_clamp.py'),\n"
        b"            lambda: open('tests/test_clamp.py', 'w'), lambda: open('/run/suite/x', 'w'),\n"
        b"            lambda: os.remove('/run/suite/unittest_main.py')):\n"
        b"    try: act()\n"
        b"    except OSError: continue\n"
        b"    raise SystemExit('reached')\n"
    )
    files = {"pkg/numbers.py": FIXED["pkg/numbers.py"] + code}
    assert (await grader.grade_files(unittest_task, files)).reward == 1.0


# ---- any tool's reports


@pytest.fixture(scope="module")
def told(images, blobs, grader):
    """Judges a task whose command is a script of the workspace."""
    suite = Suite(
        "junit", {"kept": ""}, {}, ("kept",), (), {"c::t": TestStatus.PASSED}, ("c::t",),
        settings={"command": ["sh", "run.sh"], "reports": ["out"]},
    )  # fmt: skip

    async def judge(script: str, **changes):
        changed = replace(suite, **changes) if changes else suite
        task = task_of(changed, images.workspace({"run.sh": "exit 9", "out/old.xml": GOOD}), blobs)
        return await grader.grade_files(task, {"run.sh": script.encode()})

    return judge


async def test_reports_in_files_are_read_and_old_ones_are_not(told):
    good = await told(f"mkdir out; echo '{GOOD}' > out/a.xml; echo noise > out/a.txt")
    assert good.reward == 1.0, good
    old = await told("true")
    assert old.reward == 0.0
    two = await told(f"mkdir out; echo '{GOOD}' > out/b.xml; echo '{GOOD}' > out/a.xml")
    assert set(two.tests) == {"c::t", "c::t#2"}


async def test_a_report_can_be_one_file_or_the_output(told):
    reports = {"command": ["sh", "run.sh"]}
    assert (await told(f"echo '{GOOD}'; echo noise >&2", settings=reports)).reward == 1.0
    reports = {"command": ["sh", "run.sh"], "reports": ["a b.xml"]}
    assert (await told(f"echo '{GOOD}' > 'a b.xml'; echo noise", settings=reports)).reward == 1.0


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (f"mkdir out; echo '{GOOD}' > out/a.xml; exit 1", "disagreement"),
        (f"mkdir out; echo '{GOOD}' | sed 's/tests=.1./tests=\"2\"/' > out/a.xml", "disagreement"),
        (f"mkdir out; echo '{GOOD}' > out/a.xml; echo '{FAILED}' > out/b.xml", "disagreement"),
        ("mkdir out; echo '<testsuite' > out/a.xml", "report-malformed"),
        ("mkdir out; head -c 40000000 /dev/zero > out/a.xml", "report-malformed"),
        ("exit 127", "runner"),
    ],
)  # fmt: skip
async def test_what_disagrees_or_cannot_be_read_is_no_verdict(told, script, kind):
    verdict = await told(script)
    assert verdict.reward is None
    assert (verdict.failure.boundary, verdict.failure.kind) == ("verifier", kind)


async def test_what_ends_the_run_fails_the_solution(told):
    assert (await told("kill -9 $$")).reward == 0.0
    assert (await told("exit 1")).reward == 0.0


async def test_what_the_suite_left_running_is_ended(sandboxes, images):
    async with await sandboxes.create(SandboxSpec(image=images.workspace({"a": ""}))) as box:
        forger = "(setsid sh -c 'while :; do echo x >> late; sleep 0.01; done' >/dev/null 2>&1 &)"
        assert (await box.exec(forger)).ok
        assert (await box.exec(STOP, user="root")).ok
        before = (await box.exec("wc -c < late")).stdout
        await asyncio.sleep(0.2)
        assert (await box.exec("wc -c < late")).stdout == before


async def test_faults_of_the_task_are_typed(told):
    for settings in ({}, {"command": ["sh"], "reports": ["../x"]}, {"command": 1}):
        verdict = await told("true", settings=settings)
        assert (verdict.reward, verdict.failure.kind) == (None, "settings")
    verdict = await told(f"mkdir out; echo '{GOOD}' > out/a.xml", fail_to_pass=())
    assert (verdict.reward, verdict.failure.kind) == (None, "settings")
