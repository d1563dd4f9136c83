"""Fields of documents that come from strangers, read with sentences for errors.

Types, sizes, names, duplicates and encodings are checked before anything else looks at a value.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, field
from typing import Any

from catalog.models import canonical_json
from envfactory.errors import FactoryError

MAX_TEXT = 32 << 20
"""Characters of one field."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]{0,199}")


class FormatError(FactoryError):
    """A document that cannot be read, or a task that a format cannot hold. One sentence, exit code 2."""

    def __init__(self, sentence: str) -> None:
        super().__init__(" ".join(sentence.split()))


@dataclass(frozen=True)
class Fields:
    """One JSON object of a document, read with sentences for errors."""

    value: dict[str, Any]
    place: str
    """Where it stands, for sentences: `rows.jsonl, line 3`."""
    seen: set[str] = field(default_factory=set[str])

    @classmethod
    def of(cls, value: object, place: str) -> Fields:
        """The fields of an object. Raises FormatError for anything else."""
        if not isinstance(value, dict):
            raise FormatError(f"{place} is {_kind(value)}, not an object of fields")
        return cls(value, place)

    def get(self, name: str) -> Any:
        """The raw value, None where it is absent."""
        self.seen.add(name)
        return self.value.get(name)

    def text(self, name: str, default: str | None = None) -> str:
        """A string; without a default it must be there."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise FormatError(f"{self.place}: {name} must be a string, and it is {_kind(value)}")
        if len(value) > MAX_TEXT:
            raise FormatError(f"{self.place}: {name} is longer than {MAX_TEXT >> 20} MiB")
        return value

    def texts(self, name: str, *, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """A list of different strings, or the JSON text of one, as datasets have both."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, str):
            value = parse_json(value.encode(), f"{self.place}: {name}")
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise FormatError(f"{self.place}: {name} must be a list of strings")
        if len(set(value)) != len(value):
            twice = next(one for one in value if value.count(one) > 1)
            raise FormatError(f"{self.place}: {name} lists {twice[:80]!r} twice")
        return tuple(value)

    def object(self, name: str) -> Fields:
        """A nested object, or the JSON text of one; empty where it is absent."""
        value = self.get(name)
        if isinstance(value, str):
            value = parse_json(value.encode(), f"{self.place}: {name}")
        return Fields.of({} if value is None else value, f"{self.place}: {name}")

    def id(self, name: str) -> str:
        """A name that may become part of a file name."""
        return checked_id(self.text(name), f"{self.place}: {name}")

    def rest(self) -> dict[str, Any]:
        """The fields that nobody asked for."""
        return {key: value for key, value in self.value.items() if key not in self.seen}


def checked_id(value: str, place: str) -> str:
    """The id, if a folder may have that name (letters, digits, `._+=@-`, at most 200). Raises FormatError."""
    if not _ID.fullmatch(value) or ".." in value:
        raise FormatError(
            f"{place} is {value[:80]!r}: an id consists of letters, digits and ._+=@- (200 at most, no '..')"
        )
    return value


def parse_json(data: bytes, place: str) -> Any:
    """JSON of a stranger: UTF-8, no NaN, no key twice, no lone surrogate, no bottomless nesting."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(items)
        if len(value) != len(items):
            raise FormatError(f"{place} has the same key twice in one object")
        return value

    def constant(name: str) -> Any:
        raise FormatError(f"{place} holds {name}, which is no JSON number")

    try:
        value = json.loads(data.decode(), object_pairs_hook=pairs, parse_constant=constant)
        canonical_json(value)
    except RecursionError:
        raise FormatError(f"{place} is nested too deeply") from None
    except UnicodeError:
        raise FormatError(f"{place} is not UTF-8 text") from None
    except ValueError as error:
        raise FormatError(f"{place} is not JSON ({str(error)[:120]})") from None
    return value


def decode_base64(value: object, place: str) -> bytes:
    """Bytes from base64 text. Raises FormatError."""
    try:
        return base64.b64decode(value, validate=True)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        raise FormatError(f"{place}: the archive is not base64 text") from None


def text_of(data: bytes, what: str, format: str) -> str:
    """A diff as text, for formats that hold nothing else. Raises FormatError when it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise FormatError(f"{what} is not UTF-8, and {format} holds text only: use harbor instead") from None


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "absent"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)
