"""Hidden states of teachers on disk, so that a teacher reads a sample once.

Only the last layer's hidden states at loss-bearing positions are kept: at width 5,120 and a vocabulary of
129,280 that is 25 times smaller than the logits in the same format; logits are rebuilt through the teacher's
head at training time. An entry is found by what it is: the digest of (sample's tokens and positions, teacher,
teacher's weights, precision). So nothing needs to be invalidated, two runs may share a folder, and a
retrained teacher under its old name is not mistaken for the former one. Entries appear by rename: a
killed writer leaves no half file behind, and two writers of one entry write the same thing.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from catalog.models import digest_json

FORMAT = 1


@dataclass(frozen=True)
class Key:
    """What makes hidden states be the ones one wants."""

    sample: str
    """Digest of the token ids, decoder start and loss positions (`sample_digest`)."""
    teacher: str
    version: str
    """Digest of the teacher's weights."""


def sample_digest(tokens: list[int], start: int, positions: list[int]) -> str:
    """Identity of a piece of a sample: what the network reads, and where its states are wanted."""
    return digest_json([FORMAT, tokens, start, positions])


class HiddenCache:
    """A folder of hidden states [positions, width], one file an entry.

    Args:
        root: made when missing.
        dtype: precision on disk. bfloat16 halves the folder; what is read back has this precision, whether
            it was found or just computed, so that a resumed run sees the same numbers as an unbroken one.
    """

    def __init__(self, root: Path, dtype: torch.dtype = torch.float32) -> None:
        self.root = root
        self.dtype = dtype
        self.hits = 0
        self.misses = 0
        root.mkdir(parents=True, exist_ok=True)

    def path(self, key: Key) -> Path:
        name = digest_json([FORMAT, key.sample, key.teacher, key.version, str(self.dtype)])[7:]
        return self.root / name[:2] / f"{name}.safetensors"

    def get(self, key: Key) -> Tensor | None:
        """The states, or None when nobody computed them yet."""
        path = self.path(key)
        if not path.exists():
            self.misses += 1
            return None
        self.hits += 1
        with safe_open(path, framework="pt") as file:
            return file.get_tensor("hidden")

    def put(self, key: Key, hidden_NE: Tensor) -> Tensor:
        """Keep the states; returns them as `get` will."""
        stored_NE = hidden_NE.detach().to("cpu", self.dtype).contiguous()
        path = self.path(key)
        path.parent.mkdir(exist_ok=True)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        note = {"format": str(FORMAT), "teacher": key.teacher, "version": key.version, "sample": key.sample}
        save_file({"hidden": stored_NE}, partial, metadata=note)
        os.replace(partial, path)
        return stored_NE

    def prune(self, max_bytes: int) -> int:
        """Delete the entries read or written longest ago until the folder fits; returns how many went."""
        files = sorted(self.root.glob("??/*.safetensors"), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in files)
        removed = 0
        while total > max_bytes and files:
            oldest = files.pop(0)
            total -= oldest.stat().st_size
            oldest.unlink()
            removed += 1
        return removed
