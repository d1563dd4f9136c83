"""Stages of a long command: bars on a terminal, plain lines elsewhere.

    with Stages(file=session.log) as stages:
        with stages.stage("Mining", total=40) as stage:
            for function in functions:
                ...
                stage.advance()
            stage.result("212 bugs in 40 functions")

Each stage ends as one line: a mark, its name, what came out, the seconds it took.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from console.session import clean

NAME_WIDTH = 14
PLAIN_EVERY_S = 15.0
"""Seconds between two lines about an unfinished stage where there is no terminal."""


STOPPED = (KeyboardInterrupt, asyncio.CancelledError)
"""Ctrl-C, as threads and as coroutines see it."""


class Stage:
    """One stage that is running. `total` may be set when it becomes known."""

    def __init__(self, name: str, total: int | None, changed: Callable[[Stage], None]) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self.text = ""
        self.started = time.monotonic()
        self._changed = changed

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def advance(self, count: int = 1, *, total: int | None = None) -> None:
        """So many more units are done."""
        self.update(self.done + count, total=total)

    def update(self, done: int, *, total: int | None = None, text: str | None = None) -> None:
        """`done` units are done, of `total` if that is known."""
        self.done = done
        self.total = self.total if total is None else total
        self.text = self.text if text is None else text
        self._changed(self)

    def note(self, text: str) -> None:
        """What the stage is at, in a few words; shown beside the bar."""
        self.text = text
        self._changed(self)

    def result(self, text: str) -> None:
        """What came out of the stage: the text of its final line."""
        self.text = text


class Stages:
    """Prints stages one after another to `file` (default: standard output)."""

    def __init__(self, *, file: TextIO | None = None, terminal: bool | None = None) -> None:
        self._file = file or sys.stdout
        self._terminal = self._file.isatty() if terminal is None else terminal
        self._console = Console(file=self._file, force_terminal=self._terminal, highlight=False)
        self._started = time.monotonic()

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.flush()

    @property
    def seconds(self) -> float:
        """Seconds since the stages began."""
        return time.monotonic() - self._started

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Generator[Stage]:
        """Run one stage. An exception marks its line as failed and goes on."""
        show = self._bar if self._terminal else self._plain
        with show(name, total) as stage:
            try:
                yield stage
            except BaseException as error:
                stage.text = "interrupted" if isinstance(error, STOPPED) else "failed"
                self._end("✗", "red", stage.name, stage.text, stage.seconds)
                raise
        self._end("✓", "green", stage.name, stage.text, stage.seconds)

    def skip(self, name: str, text: str) -> None:
        """A stage that an earlier run finished already."""
        self._end("=", "cyan", name, text, None)

    def line(self, text: str = "") -> None:
        """A line of its own."""
        self._console.print(Text(clean(text)), soft_wrap=True)

    @contextmanager
    def _bar(self, name: str, total: int | None) -> Generator[Stage]:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}", markup=False),
        )
        with Progress(*columns, console=self._console, transient=True) as bar:
            id = bar.add_task(f"{name:{NAME_WIDTH}}", total=total, text="")

            def changed(stage: Stage) -> None:
                bar.update(id, completed=stage.done, total=stage.total, text=clean(stage.text)[:60])

            yield Stage(name, total, changed)

    @contextmanager
    def _plain(self, name: str, total: int | None) -> Generator[Stage]:
        last = time.monotonic()

        def changed(stage: Stage) -> None:
            nonlocal last
            if time.monotonic() - last < PLAIN_EVERY_S:
                return
            last = time.monotonic()
            count = f"{stage.done}/{stage.total}" if stage.total else str(stage.done)
            self.line(f"  {stage.name:{NAME_WIDTH}} {count} {stage.text}  {stage.seconds:.0f} s".rstrip())
            self._file.flush()

        yield Stage(name, total, changed)

    def _end(self, mark: str, colour: str, name: str, text: str, seconds: float | None) -> None:
        line = Text()
        line.append(f"{mark} ", style=colour)
        line.append(f"{name:{NAME_WIDTH}} ", style="bold")
        line.append(f"{clean(text):<56} ")
        line.append("before" if seconds is None else f"{seconds:7.1f} s", style="dim")
        self._console.print(line, soft_wrap=True)
        self._file.flush()
