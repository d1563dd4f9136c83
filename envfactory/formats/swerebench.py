"""SWE-rebench rows, version 2: SWE-bench's columns, `image_name`, `language`, `install_config` and `meta`.

The reader takes version 1 (`docker_image`) as well, and `install_config` as an object or as JSON text.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from envfactory.formats.base import Parcel, no_twins
from envfactory.formats.recipes import BASE, arguments
from envfactory.formats.rows import read_rows, write_rows
from envfactory.formats.swebench import container, from_row, misread, missing, to_row

__all__ = ["misread", "missing", "name", "read", "summary", "write"]

name = "swe-rebench"
summary = "SWE-rebench rows (version 2; version 1 is read too): a .jsonl, .json or .parquet file"


def read(path: Path) -> Iterator[Parcel]:
    """The tasks of a file of rows. Raises FormatError."""

    def parcels() -> Iterator[Parcel]:
        for row in read_rows(path):
            parcel = from_row(row, name)
            said = parcel.fields(name)
            image = said.get("image_name") or said.get("docker_image") or ""
            yield replace(parcel, image=str(image)) if image else parcel

    return no_twins(parcels(), str(path))


def write(parcels: Iterable[Parcel], path: Path) -> int:
    """Write a new file of rows. Raises FormatError."""
    return write_rows((_row(parcel) for parcel in no_twins(parcels, "the export")), path)


def _row(parcel: Parcel) -> dict[str, Any]:
    tests = " ".join(map(shlex.quote, arguments(parcel)))
    config: dict[str, Any] = {
        "test_cmd": f"python -m pytest -rA --tb=short -p no:cacheprovider {tests}",
        "log_parser": "parse_log_pytest_v2",
    }
    if parcel.setup is not None:
        config["install"] = [f"pip install --no-deps {' '.join(parcel.setup.requirements)}"]
        config["base_image_name"] = BASE.format(python=parcel.setup.python)
    changed = re.findall(rb"^[+-](?!\+\+ |-- )", parcel.gold, re.M)
    derived = {
        "image_name": parcel.image or container(parcel.fields(name).get("instance_id", parcel.id)),
        "language": "python",
        "install_config": config,
        "meta": {
            "num_modified_files": len(re.findall(rb"^diff --git ", parcel.gold, re.M)),
            "num_modified_lines": len(changed),
        },
    }
    before = parcel.fields(name)
    if "docker_image" in before:
        derived = {}  # a row of version 1 stays one
    return to_row(parcel, name, derived)
