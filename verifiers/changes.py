"""Changes to files on their way through JSON: path -> new content, None where the file is deleted."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping

from catalog.models import canonical_json


def encoded(changes: Mapping[str, bytes | None]) -> dict[str, str | None]:
    """Contents as base64."""
    return {path: None if data is None else base64.b64encode(data).decode() for path, data in changes.items()}


def dump(changes: Mapping[str, bytes | None]) -> bytes:
    """The same changes give the same bytes."""
    return canonical_json(encoded(changes))


def decoded(rows: Mapping[str, str | None]) -> dict[str, bytes | None]:
    """The inverse of `encoded`."""
    return {path: None if text is None else base64.b64decode(text) for path, text in rows.items()}


def load(data: bytes) -> dict[str, bytes | None]:
    """The inverse of `dump`."""
    return decoded(json.loads(data))
