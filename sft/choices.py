"""Choice documents for pretraining: one function, one synthetic bug, eight candidate edits, the right pick.

The same operators and the same prompt as in the `repair-choice` game, on functions of other packages. No
test is run: the right edit is the one that restores the function as its authors wrote it. In place of a
failing test stands the function's signature.
"""

from __future__ import annotations

import random
import textwrap
from typing import NamedTuple

from model.chat import FlashChat, Message
from model.tokenizer import Tokenizer
from rollout.agents.choice_prompt import render_choice
from verifiers.operators import Edit, FunctionSpan, edits, functions

CANDIDATES = 8


class Choice(NamedTuple):
    """Token ids of one document, and for each whether the answer says it."""

    tokens: list[int]
    said: list[bool]


class Shown(NamedTuple):
    """What the prompt shows of a candidate."""

    path: str
    line: int
    before: str
    after: str


def choices_of(source: str, *, seed: int, limit: int, path: str = "module.py") -> list[Choice]:
    """At most `limit` documents of one file, one a function; the same seed gives the same documents."""
    rng = random.Random(seed)
    spans = [span for span in functions(source) if span.top and 3 <= span.lines <= 60]
    rng.shuffle(spans)
    made = (choice_of(source, span, rng, path) for span in spans[:limit])
    return [choice for choice in made if choice is not None]


def choice_of(source: str, span: FunctionSpan, rng: random.Random, path: str) -> Choice | None:
    """A document about one function; None where no bug of it has enough candidates."""
    text = textwrap.dedent(source[span.start : span.end])  # alone it parses a hundred times faster
    name = span.qualname.rpartition(".")[2]
    bug = pick(edits(text, functions={name}), rng)
    if bug is None:
        return None
    pool = edits(bug.source, functions={name})
    right = next((edit for edit in pool if edit.source == text), None)
    others = {(edit.line, edit.before, edit.after): edit for edit in pool if edit.source != text}
    if right is None or len(others) < CANDIDATES - 1:
        return None
    chosen = [right]
    left = list(others.values())
    while len(chosen) < CANDIDATES:
        edit = pick(left, rng)
        assert edit is not None
        left.remove(edit)
        chosen.append(edit)
    rng.shuffle(chosen)
    tokenizer = Tokenizer()
    lines = source.splitlines()[span.def_line - 1 : span.def_line]
    messages = [
        Message(role, text)  # pyright: ignore[reportArgumentType]
        for role, text in render_choice(
            effort=rng.choice([25, 50, 75, 100]),
            test_source="\n".join(line.strip() for line in lines),
            failure="failed",
            candidates=[
                Shown(path, edit.line + span.start_line - 1, edit.before, edit.after) for edit in chosen
            ],
            count=lambda text: len(tokenizer.encode(text)),
        )
    ]
    answer = Message("assistant", f"try {chosen.index(right) + 1}")
    rendered = FlashChat(tokenizer).render_said([*messages, answer])
    return Choice(rendered.ids, rendered.said)


def pick(pool: list[Edit], rng: random.Random) -> Edit | None:
    """An edit whose operator is drawn first, so that frequent operators do not crowd out the rest."""
    if not pool:
        return None
    operators = sorted({edit.operator for edit in pool})
    operator = rng.choice(operators)
    return rng.choice([edit for edit in pool if edit.operator == operator])
