"""The 4,096-token byte-level BPE that all our networks share; torch-free.

Lossless on any text: pieces are cut by one regular expression, spelt in bytes, then merged. Digits stand
alone (` 1` with its space is one piece), a line break and the indentation after it are one piece, and
identifiers are cut at underscores. The eight special tokens never come out of text: `encode("<|end|>")` is
ordinary bytes, so that a tool result cannot forge a turn.

Retrain only together with the weights: `python -m model.tokenizer OUT.json FILE...`.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

_PROTOCOL = """\
Reasoning Effort: 50 (range 1-100; higher values request more thorough reasoning)
try 1
try 2
try 3
try 4
submit 5
submit 6
submit 7
submit 8
The test failed: AssertionError: assert 1 == 2
E       AssertionError: assert
>       assert result == expected
- before
+ after
PASSED
FAILED
"""
"""Phrases of the agents' prompts, so that they are short; seen `_PROTOCOL_TIMES` in training."""
_PROTOCOL_TIMES = 2000
ASSET = Path(__file__).parent / "assets" / "tokenizer.json"
SPECIALS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
"""Ids 0 to 7, in this order."""

_PIECES = (
    r"(?:\r?\n)+[ \t]*"  # line breaks and the indentation that follows
    r"| ?\p{Nd}"  # digits one by one
    r"| ?_*\p{L}+"  # words, cut before underscores
    r"| ?[^\s\p{L}\p{Nd}]+"  # operators, brackets, marks
    r"|\s+(?!\S)|\s+"
)


class Tokenizer:
    """Text to ids and back.

    Args:
        path: a tokenizer file in the format of the `tokenizers` package; the shipped one by default.
    """

    def __init__(self, path: Path | str = ASSET) -> None:
        self._inner = tokenizers.Tokenizer.from_file(str(path))
        self.vocab: int = self._inner.get_vocab_size()
        self.pad, self.bos, self.eos, self.system, self.user, self.assistant, self.tool, self.end = (
            self.special(name) for name in SPECIALS
        )

    def special(self, name: str) -> int:
        """Id of a special token, for example `<|end|>`; ValueError if there is none of that name."""
        found = self._inner.token_to_id(name)
        if name not in SPECIALS or found is None:
            raise ValueError(f"no special token {name!r}; there are {', '.join(SPECIALS)}")
        return found

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; never a special id. Lone surrogates become U+FFFD."""
        return self._inner.encode(_scalar(text), add_special_tokens=False).ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, in parallel."""
        return [
            e.ids for e in self._inner.encode_batch([_scalar(t) for t in texts], add_special_tokens=False)
        ]

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        """Text of these ids; bytes that are no UTF-8 become U+FFFD.

        Args:
            specials: write special tokens by name instead of leaving them out.
        """
        return self.decode_bytes(ids, specials=specials).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int], *, specials: bool = False) -> bytes:
        """The bytes of these ids: pieces of a token stream joined later decode without loss."""
        count = len(SPECIALS)
        return b"".join(self._bytes[i] for i in ids if specials or i >= count)

    @cached_property
    def _bytes(self) -> list[bytes]:
        table = _byte_alphabet()
        names = [self._inner.id_to_token(i) or "" for i in range(self.vocab)]
        return [name.encode() if name in SPECIALS else bytes(table[char] for char in name) for name in names]


def train_tokenizer(texts: Iterator[str] | Iterable[str], *, vocab: int = 4096) -> tokenizers.Tokenizer:
    """Train a BPE of `vocab` ids (specials and 256 bytes among them) on these texts.

    Save the result with `.save(path)`; `Tokenizer(path)` reads it.
    """
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(itertools.chain(itertools.repeat(_PROTOCOL, _PROTOCOL_TIMES), texts), trainer)
    # Special tokens stay in the vocabulary, but text must not match them.
    state = json.loads(trained.to_str())
    state["added_tokens"] = []
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _scalar(text: str) -> str:
    return text.encode("utf-8", errors="surrogatepass").decode("utf-8", errors="replace")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in kept}
    moved = (byte for byte in range(256) if byte not in kept)
    table.update({chr(256 + n): byte for n, byte in enumerate(moved)})
    return table


if __name__ == "__main__":
    out, *files = sys.argv[1:]
    train_tokenizer(Path(f).read_text("utf-8", errors="replace") for f in sorted(files)).save(out)
