"""Choice games for pretraining: one function, one synthetic bug, eight candidate edits, the right pick.

    python -m sft.choices --corpus corpus.jsonl.xz --out choices.jsonl.xz [--minutes 5]

The same operators and the same text as in the `repair-choice` game, on functions of other packages. No
test is run: the right edit is the one that restores the function as its authors wrote it. In place of a
failing test stands code of the same file that calls the function, or its signature; error messages are
drawn. A `Game` is made once (parsing takes 25 ms); `played` makes documents of it, each with another order
and another course of the game, in a millisecond.
"""

from __future__ import annotations

import argparse
import json
import lzma
import multiprocessing
import os
import random
import re
import signal
import textwrap
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from model.chat import ChatFormat, Message
from rollout.agents.choice_prompt import MAX_TRIES, render_choice, render_try
from sft.data import Example
from sft.demonstrations import taught
from verifiers.operators import Edit, FunctionSpan, edits, functions

CANDIDATES = 8
FUNCTIONS = 8
"""Of one file."""
BUGS = 2
"""Of one function."""
SECONDS = 30
"""Of one file."""


class Shown(NamedTuple):
    """What the prompt shows of a candidate."""

    path: str
    line: int
    before: str
    after: str


class Game(NamedTuple):
    """One function with one bug. The first candidate is right."""

    caller: str
    candidates: tuple[Shown, ...]


def games_of(source: str, *, seed: int, path: str = "module.py") -> Iterator[Game]:
    """Games of one file; the same arguments give the same games."""
    rng = random.Random(seed)
    spans = [span for span in functions(source) if span.top and 3 <= span.lines <= 60]
    rng.shuffle(spans)
    for span in spans[:FUNCTIONS]:
        yield from games_in(source, span, rng, path)


def games_in(source: str, span: FunctionSpan, rng: random.Random, path: str) -> Iterator[Game]:
    """Games about one function; none where its bugs have too few candidates."""
    text = textwrap.dedent(source[span.start : span.end])  # alone it parses a hundred times faster
    name = span.qualname.rpartition(".")[2]
    bugs = edits(text, functions={name})
    for _ in range(BUGS):
        bug = pick(bugs, rng)
        if bug is None:
            return
        bugs.remove(bug)
        pool = edits(bug.source, functions={name})
        right = next((edit for edit in pool if edit.source == text), None)
        others = {(edit.line, edit.before, edit.after): edit for edit in pool if edit.source != text}
        if right is None or len(others) < CANDIDATES - 1:
            continue
        chosen, left = [right], list(others.values())
        while len(chosen) < CANDIDATES:
            edit = pick(left, rng)
            assert edit is not None
            left.remove(edit)
            chosen.append(edit)
        first = span.start_line - 1
        yield Game(
            caller_of(source, span, name),
            tuple(Shown(path, edit.line + first, edit.before, edit.after) for edit in chosen),
        )


def pick(pool: list[Edit], rng: random.Random) -> Edit | None:
    """An edit whose operator is drawn first, so that frequent operators do not crowd out the rest."""
    if not pool:
        return None
    operators = sorted({edit.operator for edit in pool})
    operator = rng.choice(operators)
    return rng.choice([edit for edit in pool if edit.operator == operator])


def caller_of(source: str, span: FunctionSpan, name: str) -> str:
    """Lines around a call of the function elsewhere in its file; its signature where there is none."""
    lines = source.splitlines()
    called = re.compile(rf"\b{re.escape(name)}\(")
    for at, line in enumerate(lines):
        outside = not span.start_line <= at + 1 <= span.start_line + span.lines
        if outside and called.search(line) and not line.lstrip().startswith(("def ", "class ", "#")):
            return textwrap.dedent("\n".join(lines[max(0, at - 8) : at + 3]))
    return lines[span.def_line - 1].strip()


MESSAGES = (
    "AssertionError: assert {a} == {b}",
    "assert {a} == {b}",
    "assert not {a}",
    "AssertionError",
    "TypeError: unsupported operand type(s) for +: 'int' and 'str'",
    "TypeError: 'NoneType' object is not iterable",
    "AttributeError: 'NoneType' object has no attribute '{w}'",
    "NameError: name '{w}' is not defined",
    "UnboundLocalError: cannot access local variable '{w}'",
    "IndexError: list index out of range",
    "KeyError: '{w}'",
    "ValueError: not enough values to unpack (expected 2, got {a})",
    "Failed: DID NOT RAISE <class 'ValueError'>",
    "RecursionError: maximum recursion depth exceeded",
    "timed out",
)


def message(game: Game, rng: random.Random) -> str:
    """A failure's text, with a word of the code."""
    words = re.findall(r"[A-Za-z_]{3,}", " ".join(edit.before for edit in game.candidates)) or ["value"]
    return rng.choice(MESSAGES).format(a=rng.randrange(20), b=rng.randrange(20), w=rng.choice(words))


def played(game: Game, chat: ChatFormat, rng: random.Random, *, window: int | None, count: Any) -> Example:
    """One document: candidates in some order, tries of wrong ones first, then the right one, submitted.

    Loss falls on the right try, where there is one left, and on the submission.
    """
    shown = list(range(len(game.candidates)))
    rng.shuffle(shown)
    wrong = rng.sample(range(1, len(shown)), rng.choices(range(MAX_TRIES + 1), (50, 25, 20, 5))[0])
    error = message(game, rng)
    opening = render_choice(
        effort=rng.choice([25, 50, 75, 100]),
        test_source=game.caller,
        failure=error,
        candidates=[game.candidates[i] for i in shown],
        count=count,
    )
    messages = [Message(role, text) for role, text in opening]  # pyright: ignore[reportArgumentType]
    teaches = [False] * len(messages)
    for done, index in enumerate([*wrong, 0][:MAX_TRIES], start=1):
        said = error if rng.random() < 0.6 else message(game, rng)
        number = shown.index(index) + 1
        reply = render_try(number, index == 0, said, MAX_TRIES - done)
        messages += [Message("assistant", f"try {number}"), Message("tool", reply)]
        teaches += [index == 0, False]
    messages.append(Message("assistant", f"submit {shown.index(0) + 1}"))
    return taught("", messages, [*teaches, True], chat, window)


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of a compressed JSON Lines file."""
    with lzma.open(path, "rt", encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)


def is_dev(row: dict[str, Any]) -> bool:
    """One file in a hundred, chosen by its path, is kept out of training."""
    return zlib.crc32(f"{row['package']}/{row['path']}".encode()) % 100 == 0


def row_of(file: dict[str, str]) -> dict[str, Any]:
    """The games of one file, in JSON's terms; a file that takes too long gives those made so far."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    games: list[Game] = []
    try:
        for game in games_of(file["text"], seed=zlib.crc32(file["path"].encode()), path=file["path"]):
            games.append(game)
    except TimeoutError:
        pass
    finally:
        signal.alarm(0)
    return {"package": file["package"], "path": file["path"], "games": games}


def _too_long(*_: object) -> None:
    raise TimeoutError


def games_in_row(row: dict[str, Any]) -> Iterator[Game]:
    """The games of a line that `write` wrote."""
    for caller, candidates in row["games"]:
        yield Game(caller, tuple(Shown(*candidate) for candidate in candidates))


def write(files: Iterable[dict[str, str]], out: Path, *, minutes: float) -> int:
    """Make games in all processors, for at most so many minutes; returns how many."""
    made, until = 0, time.monotonic() + 60 * minutes
    processes = max(1, (os.cpu_count() or 2) - 1)
    with (
        multiprocessing.get_context("fork").Pool(processes) as pool,
        lzma.open(out, "wt", encoding="utf-8", preset=6) as stream,
    ):
        for row in pool.imap_unordered(row_of, files, chunksize=4):
            made += len(row["games"])
            if row["games"]:
                stream.write(json.dumps(row) + "\n")
            if time.monotonic() > until:
                break
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="made by sft.corpus")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60.0)
    args = parser.parse_args()
    files = list(rows(args.corpus))
    random.Random(0).shuffle(files)
    print(json.dumps({"games": write(files, args.out, minutes=args.minutes)}))


if __name__ == "__main__":
    main()
