"""Choice games for pretraining: one function, one synthetic bug, eight candidate edits, the right pick.

    python -m sft.choices --corpus corpus.jsonl.xz --out choices.jsonl.xz [--minutes 5]

The same operators and the same text as in the `repair-choice` game, on functions of other packages. No
test is run: the right edit is the one that restores the function as its authors wrote it. The others are
drawn as for tasks (`envfactory.candidates`): from neighbouring lines, under weights of operators that make
the right one look like any other, so what tells it from them is the code. In place of a failing test stands
code of the same file that calls the function, or its signature; error messages are drawn. A `Game` is made
once (parsing takes 25 ms); `played` makes documents of it, each with another order and another course of
the game, in two milliseconds.
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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from model.chat import ChatFormat, Message
from rollout.agents.choice_prompt import MAX_TRIES, render_choice, render_try
from sft.data import Example
from sft.demonstrations import taught
from verifiers.operators import Edit, FunctionSpan, edits, even_weights, functions, window

CANDIDATES = 8
WINDOW = 48
"""Edits that the candidates of a game are drawn from."""
FUNCTIONS = 8
"""Of one file."""
BUGS = 2
"""Of one function."""
SECONDS = 30
"""Of one file."""
FITTED = 400
"""Files that the weights of operators are fitted to."""


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


class Bug(NamedTuple):
    """A bug in a function, and the edits of neighbouring lines that its repair must be told from."""

    caller: str
    first_line: int
    """Of the file, of the function's first line."""
    right: Edit
    others: list[Edit]


def bugs_of(source: str, rng: random.Random) -> Iterator[Bug]:
    """Bugs of one file, at most `BUGS` a function, that leave enough candidates."""
    spans = [span for span in functions(source) if span.top and 3 <= span.lines <= 60]
    rng.shuffle(spans)
    for span in spans[:FUNCTIONS]:
        text = textwrap.dedent(source[span.start : span.end])  # alone it parses a hundred times faster
        name = span.qualname.rpartition(".")[2]
        pool = edits(text, functions={name})
        for _ in range(min(BUGS, len(pool))):
            bug = pick(pool, rng)
            pool.remove(bug)
            repairs = {(e.line, e.before, e.after): e for e in edits(bug.source, functions={name})}
            right = next((edit for edit in repairs.values() if edit.source == text), None)
            others = [edit for edit in repairs.values() if edit.source != text]
            if right is not None and len(others) >= CANDIDATES - 1:
                caller = caller_of(source, span, name)
                yield Bug(caller, span.start_line, right, nearby(others, right, rng))


def pick(pool: list[Edit], rng: random.Random) -> Edit:
    """An edit whose operator is drawn first, so that frequent operators do not crowd out the rest."""
    operator = rng.choice(sorted({edit.operator for edit in pool}))
    return rng.choice([edit for edit in pool if edit.operator == operator])


def nearby(others: list[Edit], right: Edit, rng: random.Random) -> list[Edit]:
    """Edits of neighbouring lines, among which the right one's rank is random, as in candidate sets of tasks.

    Drawn from the whole function, the right edit would stand out by its line.
    """
    jitter = {id(edit): rng.random() for edit in (*others, right)}
    ranked = sorted((*others, right), key=lambda edit: (edit.line, jitter[id(edit)]))
    return [edit for edit in window(ranked, right, WINDOW, rng) if edit is not right]


def games_of(
    source: str, *, seed: int, weights: Mapping[str, float], path: str = "module.py"
) -> Iterator[Game]:
    """Games of one file; the same arguments give the same games.

    Args:
        weights: of one wrong edit of each operator (`even_weights`).
    """
    rng = random.Random(seed)
    for bug in bugs_of(source, rng):
        chosen, left = [bug.right], list(bug.others)
        while len(chosen) < CANDIDATES and left:
            odds = [weights.get(edit.operator, 0.0) for edit in left]
            index = rng.choices(range(len(left)), odds if any(odds) else None)[0]
            chosen.append(left.pop(index))
        if len(chosen) == CANDIDATES:
            first = bug.first_line - 1
            shown = (Shown(path, edit.line + first, edit.before, edit.after) for edit in chosen)
            yield Game(bug.caller, tuple(shown))


def windows_of(file: dict[str, str]) -> list[tuple[Counter[str], str]]:
    """For `even_weights`: the edits of each bug's window by operator, and the right one's operator."""
    found: list[tuple[Counter[str], str]] = []
    with limited():
        for bug in bugs_of(file["text"], random.Random(seed_of(file))):
            counts = Counter(edit.operator for edit in (bug.right, *bug.others))
            found.append((counts, bug.right.operator))
    return found


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


class Played(NamedTuple):
    """A game as a document."""

    example: Example
    ends: tuple[int, ...]
    """Where each candidate's text ends: positions of tokens, in the order shown."""
    right: int
    """Which of them is right, from 0."""


def played(
    game: Game, chat: ChatFormat, rng: random.Random, *, window: int | None, count: Callable[[str], int]
) -> Played:
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
    before = len(chat.render(messages[:-1])) + 1  # and the mark of the user's turn
    ends = tuple(before + count(text) for text in until_each_end(opening[-1][1], len(shown)))
    teaches = [False] * len(messages)
    for done, index in enumerate([*wrong, 0][:MAX_TRIES], start=1):
        said = error if rng.random() < 0.6 else message(game, rng)
        number = shown.index(index) + 1
        reply = render_try(number, index == 0, said, MAX_TRIES - done)
        messages += [Message("assistant", f"try {number}"), Message("tool", reply)]
        teaches += [index == 0, False]
    messages.append(Message("assistant", f"submit {shown.index(0) + 1}"))
    return Played(taught("", messages, [*teaches, True], chat, window), ends, shown.index(0))


def until_each_end(text: str, candidates: int) -> Iterator[str]:
    """The prompt up to the end of each candidate. One number cannot be taken for another: they come in order,
    and what stands before the first is passed over from the end."""
    ends = [len(text)]
    for number in range(candidates, 1, -1):
        headers = [m.start() for m in re.finditer(rf"^{number} .+:\d+$", text[: ends[-1]], re.MULTILINE)]
        ends.append(headers[-1] - 1)
    return (text[:end] for end in reversed(ends))


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of a compressed JSON Lines file."""
    with lzma.open(path, "rt", encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)


def is_dev(row: dict[str, Any]) -> bool:
    """One file in a hundred, chosen by its path, is kept out of training."""
    return zlib.crc32(f"{row['package']}/{row['path']}".encode()) % 100 == 0


def seed_of(file: dict[str, str]) -> int:
    return zlib.crc32(file["path"].encode())


@contextmanager
def limited() -> Iterator[None]:
    """End what is inside, silently, after `SECONDS`."""

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    except TimeoutError:
        pass
    finally:
        signal.alarm(0)


def row_of(file: dict[str, str], weights: Mapping[str, float]) -> dict[str, Any]:
    """The games of one file, in JSON's terms; a file that takes too long gives those made so far."""
    games: list[Game] = []
    with limited():
        games.extend(games_of(file["text"], seed=seed_of(file), weights=weights, path=file["path"]))
    return {"package": file["package"], "path": file["path"], "games": games}


def games_in_row(row: dict[str, Any]) -> Iterator[Game]:
    """The games of a line that `write` wrote."""
    for caller, candidates in row["games"]:
        yield Game(caller, tuple(Shown(*candidate) for candidate in candidates))


def write(files: Sequence[dict[str, str]], out: Path, *, minutes: float) -> int:
    """Make games in all processors, for at most so many minutes; returns how many."""
    made, until = 0, time.monotonic() + 60 * minutes
    processes = max(1, (os.cpu_count() or 2) - 1)
    with (
        multiprocessing.get_context("fork").Pool(processes) as pool,
        lzma.open(out, "wt", encoding="utf-8", preset=6) as stream,
    ):
        windows = pool.map(windows_of, files[:FITTED], chunksize=4)
        weights = even_weights(window for found in windows for window in found)
        for row in pool.imap_unordered(partial(row_of, weights=weights), files, chunksize=4):
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
