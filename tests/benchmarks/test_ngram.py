"""The n-gram control."""

from __future__ import annotations

import inspect
import shlex
import textwrap

import pytest

from benchmarks.ngram import NGram, tokens
from catalog.models import Candidate

REF = "sha256:" + "0" * 64


def test_tokens_of_broken_and_whole_text() -> None:
    assert tokens("if a<=b and 'k':  # why\n\n\n  x += 1.5") == [
        *("if", "a", "<=", "b", "and", "'k'", ":", "\n", "x", "+=", "1.5"),
    ]
    assert tokens('"""a long\ndocstring"""') == ["<string>"]
    assert tokens('"not closed') == ['"', "not", "closed"]


def test_probabilities_sum_to_one_over_the_vocabulary() -> None:
    model = NGram(order=3)
    model.train(["a = b + c\na = b - c\n"])
    words = {"a", "b", "c", "=", "+", "-", "\n"}
    for history in (["=", "b"], ["b", "+"], ["nope", "nope"]):
        # one share is kept for a token that was never seen
        total = sum(model.probability(history, word) for word in words) + model.probability(history, "unseen")
        assert total == pytest.approx(1.0)


def test_the_usual_line_wins() -> None:
    model = NGram()
    model.train([inspect.getsource(textwrap), "for i in range(len(xs) - 1):\n    pass\n" * 20])
    content = "def f(xs):\n    for i in range(len(xs) - 1):\n        print(i)\n"
    usual = Candidate(
        operator="offset_insert",
        path="m.py",
        line=2,
        before="for i in range(xs(len) - 1):",
        after="for i in range(len(xs) - 1):",
        content=REF,
    )
    odd = usual.model_copy(update={"before": usual.after, "after": usual.before})
    assert model.gain(usual, content) > 0 > model.gain(odd, content.replace("len(xs)", "xs(len)"))


def test_training_is_additive() -> None:
    once, twice = NGram(), NGram()
    text = inspect.getsource(shlex)
    once.train([text, text])
    twice.train([text])
    twice.train([text])
    history = ["self", ".", "state", "="]
    assert once.total == twice.total
    assert once.probability(history, "None") == twice.probability(history, "None")
