"""One shape for every report: results with unique ids, and what speaks against believing them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from catalog.models import TestStatus

MAX_BYTES = 32 << 20
"""Of all documents of one run together."""
MAX_TESTS = 200_000
_MESSAGE = 2000
FAILING = frozenset({TestStatus.FAILED, TestStatus.ERROR})


class ReportError(ValueError):
    """A report that cannot be read; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Result:
    """One test."""

    id: str
    status: TestStatus
    message: str = ""
    """Why it failed or was skipped, the last 2,000 letters."""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """One run of a suite. Ids are unique."""

    results: tuple[Result, ...]
    doubts: tuple[str, ...] = ()
    """Where the report contradicts itself: reasons to believe none of it."""
    tampered: tuple[str, ...] = ()
    """What something other than the reporter wrote into its channel."""
    finished: bool = True
    """False where the report says itself that the run did not come to its end."""

    @property
    def failing(self) -> bool:
        """Whether a runner that reports this must exit with an error."""
        return any(result.status in FAILING for result in self.results)

    def inside(self, root: str) -> Report:
        """With places relative to the folder `root` where they lie beneath it."""
        prefix = root.rstrip("/") + "/"
        return replace(self, results=tuple(replace(r, id=r.id.removeprefix(prefix)) for r in self.results))


class Parser(Protocol):
    """Reads what one run wrote. Raises ReportError for what is no such report."""

    def __call__(self, *documents: bytes) -> Report: ...


def make_id(place: str, *names: str) -> str:
    """`place::name > name`, never empty."""
    return f"{clean(place)}::{' > '.join(map(clean, names))}"


def clean(text: str) -> str:
    """Text that every store takes: without NUL and lone surrogates."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").replace("\0", "\ufffd")


def collect(
    results: Iterable[Result], doubts: Sequence[str] = (), tampered: Sequence[str] = (), finished: bool = True
) -> Report:
    """A report of these results: ids made unique, texts made short. Raises ReportError for too many."""
    taken: set[str] = set()
    counts: dict[str, int] = {}
    kept: list[Result] = []
    for result in results:
        name = result.id
        while name in taken:
            counts[result.id] = counts.get(result.id, 1) + 1
            name = f"{result.id}#{counts[result.id]}"
        taken.add(name)
        if len(taken) > MAX_TESTS:
            raise ReportError(f"the report has more than {MAX_TESTS:,} tests")
        seconds = result.duration_s if math.isfinite(result.duration_s) and result.duration_s > 0 else 0.0
        kept.append(Result(name, result.status, clean(result.message)[-_MESSAGE:].strip(), seconds))
    return Report(tuple(kept), tuple(doubts), tuple(tampered), finished)


def decoded(documents: Sequence[bytes]) -> list[str]:
    """UTF-8 text, a byte order mark removed, wrong bytes replaced. Raises ReportError for too much."""
    check_size(documents)
    return [document.decode("utf-8-sig", "replace") for document in documents]


def check_size(documents: Sequence[bytes]) -> None:
    """Raises ReportError for too much."""
    if sum(map(len, documents)) > MAX_BYTES:
        raise ReportError(f"the report has more than {MAX_BYTES >> 20} MiB")


def parse_json(text: str) -> Any:
    """Raises ReportError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"the report is not JSON: {str(error)[:200]}") from None


class Fields:
    """A JSON object whose fields are read by type; another type counts as absent."""

    def __init__(self, value: Any, what: str) -> None:
        if not isinstance(value, dict):
            raise ReportError(f"{what} is no JSON object")
        self._value: dict[str, Any] = value

    def text(self, name: str) -> str:
        """ "" where it is no string."""
        value = self._value.get(name)
        return value if isinstance(value, str) else ""

    def number(self, name: str) -> float:
        """0.0 where it is no number."""
        value = self._value.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return 0.0
        return float(value) if abs(value) < 1e300 else 0.0

    def count(self, name: str) -> int | None:
        """None where it is no whole number."""
        value = self._value.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def status(self, table: Mapping[str, TestStatus]) -> TestStatus:
        """What the field `status` means by the table. Raises ReportError for a word that is not in it."""
        word = self.text("status")
        if word not in table:
            raise ReportError(f"a test of the report has the status {word[:40]!r}")
        return table[word]

    def texts(self, name: str) -> list[str]:
        """A list's strings; one string is a list of one."""
        value = self._value.get(name)
        if isinstance(value, str):
            return [value]
        return [each for each in self._list(name) if isinstance(each, str)]

    def objects(self, name: str) -> list[Fields]:
        """A list of objects. Raises ReportError where something else is in it."""
        return [Fields(each, f"an entry of {name}") for each in self._list(name)]

    def object(self, name: str) -> Fields:
        """Raises ReportError where it is none."""
        return Fields(self._value.get(name), name)

    def _list(self, name: str) -> list[Any]:
        value = self._value.get(name)
        return value if isinstance(value, list) else []  # pyright: ignore[reportUnknownVariableType]
