"""Runs unittest or Django suites and writes one marked line for every test (`verifiers.reports.marked`).

    python -s -B unittest_main.py tests/test_a.py tests.test_b.TestX     # no names: discovery
    DJANGO_SETTINGS_MODULE=site.settings python -s -B unittest_main.py --django polls

Stands alone inside a sandbox. The suite's own runner runs it (Django: the one that its settings name); only
the result class is ours. The mark is the first line of standard input. What tests print goes to standard
error.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import sys
import traceback
import unittest
from time import perf_counter
from typing import Any

MESSAGE = 4000


class Channel:
    """The reports' way out: a descriptor of our own, which child processes do not inherit."""

    def __init__(self) -> None:
        self._mark = sys.stdin.buffer.readline().strip()
        self._fd = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 100)
        os.dup2(2, 1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        self._count = 0

    def test(self, place: str, names: list[str], status: str, message: str, seconds: float) -> None:
        """Report one test."""
        self._count += 1
        self._write(
            {
                "place": place,
                "names": names,
                "status": status,
                "message": message[-MESSAGE:],
                "seconds": seconds,
            }
        )

    def end(self) -> None:
        """Report that the run came to its end."""
        self._write({"end": self._count})

    def _write(self, value: dict[str, Any]) -> None:
        data = self._mark + b" " + json.dumps(value).encode("ascii") + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]


def result_class(channel: Channel) -> type[unittest.TextTestResult]:
    """A result class that reports into the channel."""

    class Results(unittest.TextTestResult):
        _status = ""
        _message = ""
        _since = 0.0
        _inside = False

        def startTest(self, test: Any) -> None:
            super().startTest(test)
            self._status, self._message, self._inside, self._since = "", "", True, perf_counter()

        def stopTest(self, test: Any) -> None:
            super().stopTest(test)
            self._inside = False
            place, name = name_of(test)
            seconds = perf_counter() - self._since
            channel.test(place, [name], self._status or "error", self._message, seconds)

        def addSuccess(self, test: Any) -> None:
            super().addSuccess(test)
            self._take(test, "passed", "")

        def addFailure(self, test: Any, err: Any) -> None:
            super().addFailure(test, err)
            self._take(test, "failed", text_of(err))

        def addError(self, test: Any, err: Any) -> None:
            super().addError(test, err)
            failed = self._inside and not is_unloaded(test)
            self._take(test, "failed" if failed else "error", text_of(err))

        def addSkip(self, test: Any, reason: str) -> None:
            super().addSkip(test, reason)
            self._take(test, "skipped", str(reason))

        def addExpectedFailure(self, test: Any, err: Any) -> None:
            super().addExpectedFailure(test, err)
            self._take(test, "xfailed", text_of(err))

        def addUnexpectedSuccess(self, test: Any) -> None:
            super().addUnexpectedSuccess(test)
            self._take(test, "failed", "Unexpected success")

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            super().addSubTest(test, subtest, err)
            if err is not None:
                self._take(test, "failed", text_of(err))

        def _take(self, test: Any, status: str, message: str) -> None:
            if not self._inside:  # fixtures of a class or a module
                place, name = name_of(test)
                channel.test(place, [name], status, message, 0.0)
            elif self._status not in ("failed", "error"):
                self._status, self._message = status, message

    return Results


def is_unloaded(test: Any) -> bool:
    """Whether it stands for a module that could not be imported."""
    return type(test).__module__ == "unittest.loader" and type(test).__name__ == "_FailedTest"


def name_of(test: Any) -> tuple[str, str]:
    """Place and name: module and class, then the method."""
    if is_unloaded(test):
        return test._testMethodName, ""
    if isinstance(test, unittest.TestCase) and hasattr(test, test._testMethodName):
        kind = type(test)
        if kind.__module__ != "unittest.case":
            return f"{kind.__module__}.{kind.__qualname__}", test._testMethodName
    name, _, place = test.id().partition(" (")
    return (place[:-1], name) if place.endswith(")") else ("", test.id())


def text_of(err: Any) -> str:
    """The end of a traceback."""
    return "".join(traceback.format_exception(*err))[-MESSAGE:]


def label(word: str) -> str:
    """A path as a dotted name, which both runners take."""
    if word.endswith(".py"):
        return word[:-3].replace("/", ".")
    return word


def run_unittest(results: Any, labels: list[str]) -> bool:
    """Whether all went well."""
    loader = unittest.TestLoader()
    suite = loader.loadTestsFromNames(labels) if labels else loader.discover(".")
    return unittest.TextTestRunner(verbosity=0, resultclass=results).run(suite).wasSuccessful()


def run_django(results: Any, labels: list[str]) -> bool:
    """Whether all went well."""
    settings: Any = importlib.import_module("django.conf").settings
    utils: Any = importlib.import_module("django.test.utils")
    importlib.import_module("django").setup()

    def get_resultclass(self: Any) -> Any:
        return results

    runner: Any = type("Runner", (utils.get_runner(settings),), {"get_resultclass": get_resultclass})
    return not runner(verbosity=0, interactive=False).run_tests(labels)


def main(words: list[str]) -> int:
    """Exit status."""
    channel = Channel()
    sys.path.insert(0, os.getcwd())
    results = result_class(channel)
    if words[:1] == ["--django"]:
        good = run_django(results, [label(word) for word in words[1:]])
    else:
        good = run_unittest(results, [label(word) for word in words])
    channel.end()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
