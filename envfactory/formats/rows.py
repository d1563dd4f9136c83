"""Rows of a dataset: JSON lines, a JSON list (or object of rows), or parquet, by the file's suffix."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any

from catalog.atomic import write_atomic
from envfactory.errors import full_disk_is_a_user_error
from envfactory.formats.fields import Fields, FormatError, parse_json

SUFFIXES = (".jsonl", ".json", ".parquet")
MAX_FILE = 4 << 30
"""Bytes of the largest file that is opened."""
MAX_LINE = 256 << 20


def read_rows(path: Path) -> Iterator[Fields]:
    """The rows of a file, or of every parquet and JSONL file beneath a folder. Raises FormatError."""
    if path.is_dir():
        files = sorted(one for one in path.rglob("*") if one.suffix in (".parquet", ".jsonl"))
        if not files:
            raise FormatError(f"{path} holds no .parquet and no .jsonl file: name a file with rows")
        for file in files:
            yield from read_rows(file)
        return
    if path.suffix not in SUFFIXES:
        raise FormatError(f"{path} is none of {', '.join(SUFFIXES)}: rename it after what it holds")
    if path.stat().st_size > MAX_FILE:
        raise FormatError(f"{path} is larger than {MAX_FILE >> 30} GiB: split it")
    if path.suffix == ".parquet":
        yield from _parquet(path)
    elif path.suffix == ".jsonl":
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), start=1):
                if len(line) > MAX_LINE:
                    raise FormatError(f"{path}, line {number} is longer than {MAX_LINE >> 20} MiB")
                if line.strip():
                    place = f"{path}, line {number}"
                    yield Fields.of(parse_json(line, place), place)
    else:
        value = parse_json(path.read_bytes(), str(path))
        rows = list(value.values()) if isinstance(value, dict) and "instance_id" not in value else value
        rows = rows if isinstance(rows, list) else [rows]
        for number, row in enumerate(rows, start=1):
            yield Fields.of(row, f"{path}, row {number}")


def write_rows(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write a new file of rows, whole or not at all; how many. Raises FormatError."""
    if path.suffix not in SUFFIXES:
        raise FormatError(f"rows go into a file ending with {', '.join(SUFFIXES)}, and {path} is none")
    if path.exists():
        raise FormatError(f"{path} exists already: remove it or choose another name")
    listed = [dict(row) for row in rows]
    with full_disk_is_a_user_error(path.parent):
        write_atomic(path, encode_rows(listed, path.suffix))
    return len(listed)


def encode_rows(rows: list[dict[str, Any]], suffix: str) -> bytes:
    """The bytes of a file of rows."""
    if suffix == ".parquet":
        return _to_parquet(rows)
    texts = [json.dumps(row, ensure_ascii=False) for row in rows]
    if suffix == ".jsonl":
        return "".join(text + "\n" for text in texts).encode()
    return ("[\n" + ",\n".join(texts) + "\n]\n").encode()


def _parquet(path: Path) -> Iterator[Fields]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    number += 1
                    # Parquet fills absent columns with null: what is null was not said.
                    said = {key: _plain(value) for key, value in row.items() if value is not None}
                    yield Fields(said, f"{path}, row {number}")
    except (pa.ArrowException, OSError, UnicodeError) as error:
        text = " ".join(str(error).split())[:120]
        raise FormatError(f"{path} is not a parquet file that can be read ({text})") from error


def _plain(value: Any) -> Any:
    """Parquet's own types as JSON has them: times as ISO 8601 text, bytes as base64 text."""
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value


def _to_parquet(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns: dict[str, Any] = {}
    for name in names:
        # Objects go as JSON text: columns of one struct type would invent keys.
        values = [_flat(row.get(name)) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise FormatError(
                f"the column {name} holds values of several types, which parquet cannot: use .jsonl"
            ) from error
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="zstd")
    return buffer.getvalue()


def _flat(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
