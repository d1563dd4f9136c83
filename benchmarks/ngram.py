"""A 5-gram model of Python tokens, the control that says how much plain naturalness finds.

An edit that undoes a bug often makes code more usual. The model is trained on the sources of other
packages and scores a candidate by how much likelier its lines are than those that they replace, in their
context. Interpolated absolute discounting (Ney, Essen, Kneser 1994), pure Python.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from catalog.models import Candidate

_TOKEN = re.compile(
    r"""#[^\n]*|[rbfuRBFU]{0,2}(?:\"\"\".*?\"\"\"|'''.*?'''|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
    r"""|\n|[^\W\d]\w*|\d[\w.]*|\*\*=?|//=?|<<=?|>>=?|[-+*/%&|^=!<>:]=|->|\S""",
    re.S,
)


def tokens(text: str) -> list[str]:
    """Tokens of a piece of Python, whole or not; comments go, long strings become one token."""
    found: list[str] = []
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token.startswith("#") or (token == "\n" and found[-1:] == ["\n"]):
            continue
        is_string = token[-1] in "\"'" and len(token) > 1
        found.append("<string>" if is_string and len(token) > 12 else token)
    return found


class NGram:
    """Counts of all orders up to `order`."""

    def __init__(self, order: int = 5, discount: float = 0.75) -> None:
        self.order = order
        self.discount = discount
        self.total = 0
        self._grams: list[Counter[tuple[str, ...]]] = [Counter() for _ in range(order)]
        self._contexts: list[Counter[tuple[str, ...]]] = [Counter() for _ in range(order)]
        self._kinds: list[Counter[tuple[str, ...]]] = [Counter() for _ in range(order)]

    def train(self, texts: Iterable[str]) -> None:
        """Add sources."""
        for text in texts:
            stream = ["\n"] * (self.order - 1) + tokens(text)
            self.total += len(stream) - self.order + 1
            for n in range(self.order):
                grams = zip(*(stream[i:] for i in range(n + 1)), strict=False)
                for gram in grams:
                    if not self._grams[n][gram]:
                        self._kinds[n][gram[:-1]] += 1
                    self._grams[n][gram] += 1
                    self._contexts[n][gram[:-1]] += 1

    def probability(self, history: Sequence[str], token: str) -> float:
        """Of a token after others; never 0."""
        p = 1.0 / (len(self._grams[0]) + 1)
        for n in range(self.order):
            context = tuple(history[len(history) - n :]) if n else ()
            seen = self._contexts[n][context]
            if not seen:
                break
            count = self._grams[n][(*context, token)]
            left = self.discount * self._kinds[n][context] / seen
            p = max(count - self.discount, 0.0) / seen + left * p
        return p

    def logarithm(self, before: Sequence[str], middle: Sequence[str], after: Sequence[str]) -> float:
        """Log-probability (nats) of `middle` and the first tokens of `after` behind `before`."""
        keep = self.order - 1
        stream = ["\n"] * keep + list(before[-keep:]) + list(middle) + list(after[:keep])
        start = keep + len(before[-keep:])
        return sum(
            math.log(self.probability(stream[i - keep : i], stream[i])) for i in range(start, len(stream))
        )

    def gain(self, candidate: Candidate, content: str) -> float:
        """How much likelier the candidate's lines are than those that they replace. `content`: the whole
        file after the edit. Token counts are evened out by the mean log-probability of a token."""
        lines = content.split("\n")
        first = candidate.line - 1
        last = first + candidate.after.count("\n") + 1
        before = tokens("\n".join(lines[max(0, first - 6) : first]) + "\n")
        after = tokens("\n" + "\n".join(lines[last : last + 4]))
        new, old = tokens(candidate.after), tokens(candidate.before)
        usual = 2.0  # nats a token, so that a longer text is not worse for its length alone
        return (self.logarithm(before, new, after) + usual * len(new)) - (
            self.logarithm(before, old, after) + usual * len(old)
        )
