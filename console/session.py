"""What every command is given: where things live, and how to print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cyclopts import Parameter

if TYPE_CHECKING:
    from catalog.store import Catalog


@dataclass(frozen=True)
class Session:
    """The global options. `stdout` gets results; with `--json` it gets exactly one JSON document."""

    home: Path | None = None
    """None: `$POSTTRAIN_HOME` or the user's cache folder."""
    json: bool = False
    debug: bool = False

    def catalog(self) -> Catalog:
        """Open the catalog of the home folder, making it if need be."""
        from catalog.store import Catalog

        return Catalog.open(self.home)

    def store(self) -> Path:
        """Folder of the image store."""
        from catalog.store import default_home

        return (self.home or default_home()) / "images"

    @property
    def log(self) -> TextIO:
        """Where progress goes: standard output, or standard error when that carries JSON."""
        return sys.stderr if self.json else sys.stdout

    def emit(self, value: Any, show: Callable[[], None]) -> None:
        """Print `value` as JSON when asked for, or else call `show`, which prints it for people."""
        if self.json:
            print(json.dumps(value, indent=2, ensure_ascii=False))
        else:
            show()


InSession = Annotated[Session, Parameter(parse=False)]
"""Type of the parameter through which a command gets the session; it is no option of the command."""


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """A table on a terminal, tab-separated lines elsewhere, the sentence `empty` if there are no rows."""
    if not rows:
        print(empty)
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(Text(_cell(cell)) for cell in row))
        Console().print(table)
    else:
        for line in (columns, *rows):
            print("\t".join(_cell(cell) for cell in line))


def _cell(value: object) -> str:
    return "-" if value is None else clean(str(value)).replace("\n", " ")


def clean(text: str) -> str:
    """Text from tasks without control characters, which could rewrite the terminal it is shown on."""
    return "".join(c if c in "\n\t" or (c.isprintable()) else "\N{REPLACEMENT CHARACTER}" for c in text)
