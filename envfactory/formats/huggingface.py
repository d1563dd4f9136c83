"""A Hugging Face dataset: a folder with a card and a parquet file a split, as `datasets.load_dataset` wants.

    README.md   data/train-00000-of-00001.parquet   data/test-00000-of-00001.parquet

The columns are SWE-bench's, with the tests as lists, and `workspace`: the files that the agent finds, as a
gzipped tar. Any dataset with those columns is read; a downloaded one is such a folder.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from envfactory.formats.archives import pack_tree, unpack_tree
from envfactory.formats.base import Parcel, no_twins
from envfactory.formats.base import nothing_misread as misread
from envfactory.formats.fields import Fields, FormatError, decode_base64
from envfactory.formats.recipes import fresh_folder, write_files
from envfactory.formats.rows import encode_rows, read_rows
from envfactory.formats.swebench import from_row, missing, to_row
from envfactory.formats.swebench_v5 import dump_yaml
from envfactory.trees import File

__all__ = ["misread", "missing", "name", "read", "summary", "write"]

name = "huggingface"
summary = "Hugging Face dataset: a folder with a README.md card and a parquet file for each split"
WORKSPACE = "workspace"
CARD = """\
---
{config}---
# {count} coding tasks

Made and audited by posttrain. Columns are those of SWE-bench, with the lists of tests as lists;
`workspace` is what an agent finds (a gzipped tar), `posttrain` what other programs need not know.
`patch` is the solution, and `test_patch` has the hidden tests: keep both away from agents.
"""


def read(path: Path) -> Iterator[Parcel]:
    """The tasks of a dataset's folder, or of one of its parquet files. Raises FormatError."""
    if not path.is_dir() and path.suffix != ".parquet":
        raise FormatError(f"{path} is neither a dataset's folder nor a parquet file")
    return no_twins(map(_parcel, read_rows(path)), str(path))


def write(parcels: Iterable[Parcel], path: Path) -> int:
    """Write a new folder. Raises FormatError."""
    splits: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for parcel in no_twins(parcels, "the export"):
        splits[(parcel.task.split if parcel.task else None) or "train"].append(_row(parcel))
    with fresh_folder(path) as folder:
        files = {
            f"data/{split}-00000-of-00001.parquet": File(encode_rows(rows, ".parquet"))
            for split, rows in sorted(splits.items())
        }
        data = [{"split": split, "path": f"data/{split}-*"} for split in sorted(splits)]
        config = {"configs": [{"config_name": "default", "data_files": data}], "tags": ["code", "swe-bench"]}
        count = sum(map(len, splits.values()))
        files["README.md"] = File(CARD.format(config=dump_yaml(config), count=count).encode())
        write_files(files, folder / ".")
    return count


def _row(parcel: Parcel) -> dict[str, Any]:
    row = to_row(parcel, name, workspace=False)
    if parcel.workspace is not None:
        row[WORKSPACE] = pack_tree(parcel.workspace)
    return row


def _parcel(row: Fields) -> Parcel:
    packed = row.get(WORKSPACE)
    parcel = from_row(row, name)
    if packed is None:
        return parcel
    if not isinstance(packed, str) or not re.match(r"H4sI", packed):
        raise FormatError(f"{row.place}: {WORKSPACE} is no gzipped tar")
    return replace(parcel, workspace=unpack_tree(decode_base64(packed, row.place), row.place))
