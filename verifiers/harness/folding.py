"""From frames to one status for every test: pure, outside of the jail.

What was reported once stays: a second report for the same phase, an id that was never collected, a frame
after the end all mark the run as tampered with and change no status.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from verifiers.harness.wire import Frame, Kind

SETUP, CALL, TEARDOWN = 0, 1, 2
PASSED, FAILED, SKIPPED = 0, 1, 2
XFAIL, SUBTEST = 16, 32
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{5,}")


@dataclass
class Item:
    """What is known of one collected test."""

    id: str
    has_function: bool
    phases: dict[int, int] = field(default_factory=dict[int, int])
    """Phase -> outcome + 16 * xfail mark."""
    returned: bool = False
    subtest_failed: bool = False
    message: str = ""
    functions: tuple[str, ...] = ()

    def status(self) -> str | None:
        """A `catalog.models.TestStatus` value, None when the test did not begin."""
        if not self.phases:
            return None
        setup, call, teardown = (self.phases.get(phase) for phase in (SETUP, CALL, TEARDOWN))
        if setup is None or setup & 3 == FAILED:
            return "error"
        if setup & 3 == SKIPPED:
            return "xfailed" if setup & XFAIL else "skipped"
        if call is None:
            return "error"
        if call & 3 == SKIPPED:
            status = "xfailed" if call & XFAIL else "skipped"
        elif call & 3 != PASSED or self.subtest_failed or (self.has_function and not self.returned):
            return "failed"
        else:
            status = "xpassed" if call & XFAIL else "passed"
        return status if teardown is not None and teardown & 3 != FAILED else "error"


class Fold:
    """Takes the frames of one run in order."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.uncollected: dict[str, tuple[str, str]] = {}
        """Node id -> status (`error` or `skipped`) and message of what could not be collected."""
        self.ready = False
        self.finished = False
        self.exit_code: int | None = None
        self.tampered: list[str] = []
        self.loaded: list[str] = []
        self.notes: list[str] = []
        self._names: set[str] = set()

    def take(self, frame: Frame) -> None:
        """Add one frame."""
        if self.finished:
            self._tamper("a report came after the end of the run")
            return
        text = frame.payload.decode(errors="replace")
        match frame.kind:
            case Kind.COLLECTED:
                self._collected(frame, text)
            case Kind.READY:
                if self.ready or frame.index != len(self.items):
                    self._tamper("the collection was reported twice or incompletely")
                self.ready = True
            case Kind.UNCOLLECTED:
                name, _, message = text.partition("\0")
                self.uncollected.setdefault(
                    name, ("skipped" if frame.flag else "error", self._clean(message))
                )
            case Kind.PHASE:
                self._phase(frame, text)
            case Kind.RETURNED:
                item = self._item(frame)
                if item and (item.returned or CALL in item.phases or SETUP not in item.phases):
                    self._tamper(f"an unexpected return of {item.id}")
                elif item:
                    item.returned = True
            case Kind.TRACE:
                if item := self._item(frame):
                    item.functions = tuple(sorted(filter(None, text.split("\n"))))
            case Kind.LOADED:
                self.loaded = text.split("\n")
            case Kind.PATCHED:
                self._tamper(text)
            case Kind.NOTE:
                self.notes.append(text)
            case Kind.END:
                self.finished, self.exit_code = True, frame.index
            case _:
                self._tamper(f"a report of unknown kind {frame.kind}")

    def _collected(self, frame: Frame, text: str) -> None:
        if self.ready or frame.index != len(self.items):
            self._tamper("a test was reported out of the order of collection")
            return
        name, n = text, 1
        while name in self._names:
            n += 1
            name = f"{text}#{n}"
        self._names.add(name)
        self.items.append(Item(name, bool(frame.flag)))

    def _item(self, frame: Frame) -> Item | None:
        if self.ready and frame.index < len(self.items):
            return self.items[frame.index]
        self._tamper("a report about a test that was not collected")
        return None

    def _phase(self, frame: Frame, text: str) -> None:
        item = self._item(frame)
        if item is None:
            return
        phase, outcome = frame.flag & 3, frame.flag >> 2 & 3
        if frame.flag & SUBTEST:
            item.subtest_failed = True
        elif phase in item.phases or phase > TEARDOWN or outcome > SKIPPED:
            self._tamper(f"a second report for a phase of {item.id}")
            return
        else:
            item.phases[phase] = outcome | frame.flag & XFAIL
        if phase == CALL and not frame.flag & SUBTEST and outcome == PASSED:
            if item.has_function and not item.returned and not item.subtest_failed:
                self._tamper(f"{item.id} was reported as passed but its function did not return")
        elif text and not item.message:
            item.message = self._clean(text)

    @staticmethod
    def _clean(text: str) -> str:
        """Without what differs from run to run: addresses."""
        return _ADDRESS.sub(" at 0x...", text)

    def _tamper(self, reason: str) -> None:
        if len(self.tampered) < 20:
            self.tampered.append(reason)

    def result(self) -> dict[str, Any]:
        """The parts of a reply that come from the frames."""
        tests = {item.id: status for item in self.items if (status := item.status()) is not None}
        messages = {item.id: item.message for item in self.items if item.message}
        for item in self.items:
            if tests.get(item.id) == "error" and item.id not in messages:
                messages[item.id] = "the test process ended during this test"
        for name, (status, message) in self.uncollected.items():
            tests.setdefault(name, status)
            messages.setdefault(name, message)
        return {
            "tests": tests,
            "messages": messages,
            "functions": {item.id: item.functions for item in self.items if item.functions},
            "tampered": self.tampered,
            "notes": self.notes,
        }
