"""The pool of teachers: found by name, loaded on demand, read once per sample.

A teacher's body is in memory only while it reads samples that the cache does not know; then it goes, and
of all teachers at most one body and (in `opd.order`) one head exist at a time. Heads are kept apart as
files of their own, so that rebuilding logits never loads a body. A teacher's version is the digest of its
weights: a retrained teacher under an old name gets new cache entries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.policy import Policy, load_policy
from model.targets import targets
from opd.cache import HiddenCache, Key, sample_digest
from opd.config import TeacherConfig
from opd.data import Piece, packed


class TeacherPool:
    """All teachers of a run.

    Args:
        teachers: their settings.
        student: whose vocabulary and tokenizer they must share.
        cache: hidden states.
        folder: where heads are kept.
        load: opens a policy; replaced in tests.
    """

    def __init__(
        self,
        teachers: Sequence[TeacherConfig],
        student: Policy,
        cache: HiddenCache,
        folder: Path,
        load: Callable[[str], Policy] = load_policy,
    ) -> None:
        self.cache = cache
        self.folder = folder
        self.bodies_loaded = 0
        self.tokens_read = 0
        self._load = load
        self._student = student
        self._configs = {teacher.name: teacher for teacher in teachers}
        self._versions: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def prepare(self) -> None:
        """Open each teacher once, check that it speaks the student's tokens, note version and head."""
        for name in self._configs:
            if name not in self._versions:
                self._open(name)

    def version(self, name: str) -> str:
        """Digest of the teacher's weights."""
        if name not in self._versions:
            self._open(name)
        return self._versions[name]

    def head(self, name: str) -> Tensor:
        """The teacher's head [V, E], read from its own file."""
        return load_file(self._head_path(self.version(name)))["head"]

    def hidden(self, name: str, pieces: Sequence[Piece], micro_tokens: int) -> dict[str, Tensor]:
        """Final hidden states at the loss-bearing positions of each sample, by sample id; [targets, E].

        Known ones come from the cache; for the others the teacher's body is loaded, once.
        """
        keys = {item.id: self._key(name, item) for item in pieces}
        found = {item.id: self.cache.get(keys[item.id]) for item in pieces}
        missing = [item for item in pieces if found[item.id] is None]
        if missing:
            policy = self._open(name)
            for item, hidden_NE in read(policy, missing, micro_tokens):
                found[item.id] = self.cache.put(keys[item.id], hidden_NE)
                self.tokens_read += len(item.tokens)
        return {id: hidden for id, hidden in found.items() if hidden is not None}

    def _key(self, name: str, item: Piece) -> Key:
        sample = sample_digest(list(item.tokens), item.start, list(item.targets))
        return Key(sample, name, self.version(name))

    def _open(self, name: str) -> Policy:
        policy = self._load(self._configs[name].policy)
        self.bodies_loaded += 1
        check_vocabulary(name, policy, self._student)
        policy.module.eval()
        version = weights_digest(policy)
        self._versions[name] = version
        path = self._head_path(version)
        if not path.exists():
            partial = path.with_suffix(".partial")
            save_file({"head": policy.head().detach().cpu().contiguous().clone()}, partial)
            partial.replace(path)
        return policy

    def _head_path(self, version: str) -> Path:
        return self.folder / f"{version[:32]}.safetensors"


@torch.no_grad()
def read(policy: Policy, pieces: Sequence[Piece], micro_tokens: int) -> list[tuple[Piece, Tensor]]:
    """Final hidden states of a network at the loss-bearing positions, piece by piece."""
    states: list[tuple[Piece, Tensor]] = []
    for batch in packed(pieces, policy, micro_tokens):
        wanted = targets(batch, [item.targets for item in pieces])
        parts = wanted.hidden(policy.hidden(batch)).split([count for _, count in wanted.owners])
        states += [(pieces[index], part) for (index, _), part in zip(wanted.owners, parts, strict=True)]
    return states


def weights_digest(policy: Policy) -> str:
    """SHA-256 of a policy's parameters and buffers, names and types included."""
    digest = hashlib.sha256()
    for name, value in sorted(policy.module.state_dict().items()):
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_vocabulary(name: str, teacher: Policy, student: Policy) -> None:
    """Refuse a teacher that would score other tokens than the student samples.

    Raises:
        ValueError: vocabularies of different size, or a probe text that is encoded differently.
    """
    if teacher.vocab != student.vocab:
        raise ValueError(
            f"teacher {name} has {teacher.vocab} tokens and the student {student.vocab}: full-vocabulary "
            "distillation needs one tokenizer"
        )
    probe = "def f(x):\n    return x[1:-1] == 'añ' or None  # 42\n"
    if teacher.tokenizer.encode(probe) != student.tokenizer.encode(probe):
        raise ValueError(f"teacher {name} has another tokenizer than the student, though of the same size")
