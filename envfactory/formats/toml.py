"""TOML out: tables of plain values, as the folder formats need them. (The standard library only reads it.)"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def dumps(value: Mapping[str, Any]) -> str:
    """A TOML document; None values are left out. Lists hold plain values or inline tables."""
    return "\n".join(_table(value, ())).lstrip("\n") + "\n"


def _table(value: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    plain = {k: v for k, v in value.items() if v is not None and not isinstance(v, Mapping)}
    nested = {k: v for k, v in value.items() if isinstance(v, Mapping)}
    lines: list[str] = []
    if path and (plain or not nested):
        lines += ["", f"[{'.'.join(map(_key, path))}]"]
    lines += [f"{_key(key)} = {_value(one)}" for key, one in plain.items()]
    for key, one in nested.items():
        lines += _table(one, (*path, key))
    return lines


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for delete, which JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    raise TypeError(f"TOML has no {type(value).__name__}")
