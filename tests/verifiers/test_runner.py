"""Jailed runs of pytest, for real. Everything hostile here runs inside of jails only."""

from __future__ import annotations

import asyncio

import pytest

from catalog.models import TestStatus
from verifiers.runner import RunnerFailed, check_path

pytestmark = pytest.mark.asyncio(loop_scope="module")
PASSED, FAILED, ERROR = TestStatus.PASSED, TestStatus.FAILED, TestStatus.ERROR
SKIPPED, XFAILED, XPASSED = TestStatus.SKIPPED, TestStatus.XFAILED, TestStatus.XPASSED

PACKAGE = {
    "pkg/__init__.py": "",
    "pkg/core.py": (
        "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return [y for y in (x / 2,)][0]\n"
    ),
    "test_core.py": (
        "from pkg import core\n\n\ndef test_double():\n    assert core.double(2) == 4\n\n\n"
        "def test_half():\n    assert core.half(core.double(4)) == 4\n"
    ),
}
STATUSES = """
import unittest
import pytest


@pytest.fixture
def broken():
    raise RuntimeError("setup")


@pytest.fixture
def messy():
    yield
    raise RuntimeError("teardown")


def test_passes(): pass
def test_fails(): assert [1] == [2]
def test_setup(broken): pass
def test_teardown(messy): pass
def test_skips(): pytest.skip("no")
@pytest.mark.xfail
def test_xfails(): assert 0
@pytest.mark.xfail
def test_xpasses(): pass
@pytest.mark.xfail(strict=True)
def test_strict(): pass


class TestUnit(unittest.TestCase):
    def test_ok(self): self.assertTrue(True)
    def test_not(self): self.fail("it does")
    def test_parts(self):
        for i in range(3):
            with self.subTest(i=i):
                self.assertNotEqual(i, 1)
    @unittest.expectedFailure
    def test_expected(self): self.fail()
    @unittest.skip("never")
    def test_never(self): pass


class TestAsync(unittest.IsolatedAsyncioTestCase):
    async def test_waits(self): pass
    async def test_wrong(self): assert 0
"""


async def test_every_status_is_told_apart(runner_of):
    runner = await runner_of({"test_statuses.py": STATUSES})
    run = await runner.run({}, ["test_statuses.py"])
    assert (run.outcome, run.tampered) == ("finished", ())
    assert {name.partition("::")[2]: status for name, status in run.tests.items()} == {
        "test_passes": PASSED,
        "test_fails": FAILED,
        "test_setup": ERROR,
        "test_teardown": ERROR,
        "test_skips": SKIPPED,
        "test_xfails": XFAILED,
        "test_xpasses": XPASSED,
        "test_strict": FAILED,
        "TestUnit::test_ok": PASSED,
        "TestUnit::test_not": FAILED,
        "TestUnit::test_parts": FAILED,
        "TestUnit::test_expected": XFAILED,
        "TestUnit::test_never": SKIPPED,
        "TestAsync::test_waits": PASSED,
        "TestAsync::test_wrong": FAILED,
    }
    assert "assert [1] == [2]" in run.messages["test_statuses.py::test_fails"]
    assert "setup" in run.messages["test_statuses.py::test_setup"]


async def test_ids_survive(runner_of):
    names = ["a b", "[x]", "a/b::c", 'it\'s "so"', "é", "- dash", "", "\n"]
    source = f"import pytest\n@pytest.mark.parametrize('x', {names!r}, ids=str)\ndef test_it(x): pass\n"
    runner = await runner_of({"tests dir/test_odd é.py": source})
    run = await runner.run({}, ["tests dir/test_odd é.py"])
    assert len(run.tests) == len(names)
    assert set(run.tests.values()) == {PASSED}
    again = await runner.run({}, ["tests dir/test_odd é.py::test_it[a b]"])
    assert again.tests == {"tests dir/test_odd é.py::test_it[a b]": PASSED}


async def test_files_are_laid_over_and_forgotten(runner_of):
    runner = await runner_of(PACKAGE)
    wrong = {"pkg/core.py": b"def double(x):\n    return 3 * x\n\n\ndef half(x):\n    return x / 2\n"}
    run = await runner.run(wrong, ["test_core.py"])
    assert run.tests == {"test_core.py::test_double": FAILED, "test_core.py::test_half": FAILED}
    run = await runner.run({"pkg/core.py": None}, ["test_core.py"])
    assert run.tests == {"test_core.py": ERROR}
    assert "ImportError" in run.messages["test_core.py"]
    run = await runner.run({}, ["test_core.py"])
    assert set(run.tests.values()) == {PASSED}
    assert await runner.read(["pkg/core.py", "nothing"]) == {
        "pkg/core.py": PACKAGE["pkg/core.py"].encode(),
        "nothing": None,
    }
    assert await runner.listing() == dict.fromkeys(PACKAGE, False)


async def test_a_trace_names_the_functions_of_each_test(runner_of):
    runner = await runner_of(PACKAGE)
    run = await runner.run({}, ["test_core.py"], trace=True)
    assert run.functions == {
        "test_core.py::test_double": ("pkg/core.py::double",),
        "test_core.py::test_half": ("pkg/core.py::double", "pkg/core.py::half"),
    }


async def test_addopts_of_missing_plugins_are_left_out(runner_of):
    ini = "[pytest]\naddopts = --cov=pkg -n auto\nmarkers = slow\n"
    runner = await runner_of({**PACKAGE, "pytest.ini": ini})
    run = await runner.run({}, ["test_core.py"])
    assert set(run.tests.values()) == {PASSED}
    assert run.notes
    wanted = {"pytest.ini": b"[pytest]\naddopts = -x --deselect test_core.py::test_half\n"}
    run = await runner.run(wanted, ["test_core.py"])
    assert run.tests == {"test_core.py::test_double": PASSED}


WALLS = """
import ctypes, os, pathlib, socket, time
import pytest


def test_a_user_without_rights():
    assert os.getuid() != 0 and os.geteuid() != 0
    status = pathlib.Path("/proc/self/status").read_text()
    for line in ("CapEff", "CapPrm", "CapBnd", "CapAmb"):
        assert f"{line}:\\t{0:016x}" in status, line
    assert "NoNewPrivs:\\t1" in status


def test_nothing_of_the_harness():
    assert os.listdir("/run/verifier") == []
    pids = sorted(int(p) for p in os.listdir("/proc") if p.isdigit())
    assert pids == [1, os.getpid()]
    with pytest.raises(OSError):
        open("/proc/1/mem", "rb")
    with pytest.raises(OSError):
        os.listdir("/proc/1/fd")
    with pytest.raises(OSError):
        os.kill(1, 9)


def test_the_system_is_read_only():
    for path in ("/opt/env/x", "/usr/x", "/run/x", "/etc/x", "/home/x"):
        with pytest.raises(OSError):
            open(path, "w")
    for path in ("/workspace/x", "/tmp/x", "/dev/shm/x"):
        open(path, "w").close()
    assert os.statvfs("/proc").f_flag & os.ST_RDONLY


def test_no_mounts():
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.umount2(b"/run/verifier", 2) == -1
    assert libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == -1


def test_no_network_but_loopback():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        socket.create_connection(server.getsockname(), 1).close()
    with pytest.raises(OSError):
        socket.create_connection(("10.0.0.1", 80), 0.2)


def test_nothing_was_left_behind():
    for path in ("/workspace/left", "/tmp/left", "/dev/shm/left"):
        assert not os.path.exists(path)
        open(path, "w").close()


def test_disk_is_limited():
    with pytest.raises(OSError):
        with open("/workspace/big", "wb") as file:
            for _ in range(400):
                file.write(bytes(1 << 20))
    os.unlink("/workspace/big")


def test_memory_is_limited():
    with pytest.raises(MemoryError):
        bytearray(2 << 30)


def test_leaves_a_process():
    if os.fork() == 0:
        os.setsid()
        time.sleep(1000)
"""


async def test_the_walls_of_a_jail(runner_of):
    runner = await runner_of({"test_walls.py": WALLS})
    for _ in range(2):
        run = await runner.run({}, ["test_walls.py"])
        bad = {name: run.messages.get(name) for name, status in run.tests.items() if status is not PASSED}
        assert bad == {}
        assert (len(run.tests), run.outcome, run.duration_s < 60) == (9, "finished", True)


async def test_time_processes_and_crashes(runner_of):
    runner = await runner_of(
        {
            "test_hang.py": "import time\ndef test_ok(): pass\ndef test_hang(): time.sleep(1000)\n",
            "test_bomb.py": (
                "import os\ndef test_bomb():\n    pids = []\n    try:\n        for _ in range(2000):\n"
                "            if os.fork() == 0:\n                import time; time.sleep(100)\n"
                "    except OSError:\n        return\n    assert 0\n"
            ),
            "test_crash.py": (
                "import ctypes\ndef test_ok(): pass\n"
                "def test_crash(): ctypes.string_at(0)\ndef test_c(): pass\n"
            ),
        },
        pids=48,
    )
    hang, bomb, crash = await asyncio.gather(
        runner.run({}, ["test_hang.py"], timeout=4),
        runner.run({}, ["test_bomb.py"]),
        runner.run({}, ["test_crash.py"]),
    )
    assert hang.outcome == "timeout"
    assert hang.tests == {"test_hang.py::test_ok": PASSED, "test_hang.py::test_hang": ERROR}
    assert bomb.tests == {"test_bomb.py::test_bomb": PASSED}
    assert crash.outcome == "crashed"
    assert crash.tests == {"test_crash.py::test_ok": PASSED, "test_crash.py::test_crash": ERROR}


async def test_a_cancelled_run_frees_its_place(runner_of):
    runner = await runner_of({"test_hang.py": "import time\ndef test_hang(): time.sleep(1000)\n"}, jobs=1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(runner.run({}, ["test_hang.py"]), 1.5)
    run = await asyncio.wait_for(runner.run({"test_x.py": b"def test_x(): pass\n"}, ["test_x.py"]), 30)
    assert run.tests == {"test_x.py::test_x": PASSED}


async def test_a_closed_runner_says_so(runner_of):
    runner = await runner_of(PACKAGE, jobs=3)
    waiting = asyncio.ensure_future(
        runner.run({"test_hang.py": b"import time\ndef test_h(): time.sleep(99)\n"}, ["test_hang.py"])
    )
    await asyncio.sleep(0.5)
    await runner.close()
    with pytest.raises(RunnerFailed):
        await waiting
    with pytest.raises(RunnerFailed, match="not running"):
        await runner.run({}, ["test_core.py"])


async def test_protected_files_cannot_be_changed_from_within(runner_of):
    base = {"tests/data/answer.txt": b"42", "tests/test_p.py": b"def test_p(): pass\n"}
    runner = await runner_of({"pkg.py": ""}, base=base)
    attack = (
        b"import os, pytest\n\ndef test_attack():\n"
        b"    open('tests/new.txt', 'w').close()\n"
        b"    for change in (lambda: open('tests/data/answer.txt', 'w'), lambda: os.rename('tests', 'old'),\n"
        b"                   lambda: os.unlink('tests/test_p.py'),\n"
        b"                   lambda: os.rename('tests/data', 'tests/d'),\n"
        b"                   lambda: os.chmod('tests/test_p.py', 0o777), lambda: os.chmod('tests', 0o777)):\n"
        b"        with pytest.raises(OSError):\n            change()\n"
    )
    run = await runner.run({"test_attack.py": attack}, ["test_attack.py", "tests/test_p.py"])
    assert run.messages == {}
    assert set(run.tests.values()) == {PASSED}


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a//b", "a/./b", "a/..", "x\0"])
async def test_paths_stay_inside(path):
    with pytest.raises(ValueError, match="inside the workspace"):
        check_path(path)


async def test_options_are_no_arguments(runner_of):
    runner = await runner_of(PACKAGE)
    with pytest.raises(ValueError, match="not a test file"):
        await runner.run({}, ["--collect-only"])
