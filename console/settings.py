"""Settings of a command: defaults, then a TOML file, then dotted options.

    posttrain train rl --config fast.toml --loss.kind cispo --steps=40 --dry-run

Written here rather than taken from cyclopts so that the settings model is imported only when its
command runs, and so that a mistake is one sentence with the closest name there is.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import math
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from pydantic import BaseModel, ValidationError

from catalog.errors import UserError

Model = TypeVar("Model", bound=BaseModel)


def load_settings(model: type[Model], file: Path | None, overrides: Sequence[str] = ()) -> Model:
    """Validate `model` from a TOML file and tokens such as `--loss.kind cispo` or `--steps=40`.

    Raises UserError that names the key, with the closest known one, or what is wrong with the value.
    """
    values: dict[str, Any] = _read(file) if file else {}
    for key, text in _pairs(overrides):
        target = values
        *parents, last = key.split(".")
        for parent in parents:
            child = target.setdefault(parent, {})
            if not isinstance(child, dict):
                raise UserError(f"--{key}: {parent} is a value, not a group of settings.")
            target = child
        target[last] = _value(text)
    _refuse_infinite(values)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UserError(_sentence(model, error)) from None


def describe(model: type[BaseModel], prefix: str = "") -> list[tuple[str, str, str]]:
    """(option, default, explanation) of every setting, nested ones with their dotted names."""
    lines: list[tuple[str, str, str]] = []
    notes = _field_docs(model)
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is not None:
            lines += describe(inner, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else str(field.get_default(call_default_factory=True))
        lines.append((f"--{prefix}{name}", default, field.description or notes.get(name, "")))
    return lines


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.toml")], n=1)
        raise UserError(f"There is no {file}.{f' Did you mean {near[0]}?' if near else ''}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid TOML: {error}.") from None


def _pairs(tokens: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    waiting = list(tokens)
    while waiting:
        token = waiting.pop(0)
        if not token.startswith("--") or token == "--":
            raise UserError(f"{token} is not a setting: write --NAME VALUE or --NAME=VALUE.")
        key, equals, text = token[2:].partition("=")
        if not equals:
            # Negative numbers are values; the next option is not.
            if waiting and not waiting[0].startswith("--"):
                text = waiting.pop(0)
            else:
                text = "true"
        pairs.append((key.replace("-", "_"), text))
    return pairs


def _value(text: str) -> Any:
    # TOML's own notation where it fits (numbers, booleans, lists), a bare string otherwise.
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _refuse_infinite(value: Any, where: str = "") -> None:
    # TOML has nan and inf, and no setting has a use for them.
    if isinstance(value, dict):
        for key, inner in cast(dict[str, Any], value).items():
            _refuse_infinite(inner, f"{where}.{key}" if where else key)
    elif isinstance(value, list):
        for inner in cast(list[Any], value):
            _refuse_infinite(inner, where)
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}: Input should be a finite number (got {value}).")


def _sentence(model: type[BaseModel], error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = [option.removeprefix("--") for option, _, _ in describe(model)]
        near = difflib.get_close_matches(where, known, n=1, cutoff=0.4)
        return f"There is no setting {where}." + (f" Did you mean {near[0]}?" if near else "")
    if first["type"] == "missing":
        return f"The setting {where} is required: give --{where} VALUE."
    message = first["msg"].removeprefix("Value error, ")
    return f"{where or 'Settings'}: {message} (got {first['input']!r})."[:400]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    for kind in (annotation, *get_args(annotation)):
        if inspect.isclass(kind) and issubclass(kind, BaseModel):
            return kind
    return None


def _field_docs(model: type[BaseModel]) -> dict[str, str]:
    """The strings that stand under the fields of a model in its source."""
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    except (OSError, SyntaxError):
        return {}
    docs: dict[str, str] = {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    for field, note in itertools.pairwise(statements):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant):
            docs[field.target.id] = " ".join(str(note.value.value).split())
    return docs
