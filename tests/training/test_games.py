"""Games for pretraining: what they show, what they teach."""

from __future__ import annotations

import random
import textwrap

from model.chat import FlashChat
from model.tokenizer import Tokenizer
from rollout.agents.choice_prompt import MAX_TRIES
from sft.choices import games_in_row, games_of, played, row_of

SOURCE = textwrap.dedent(
    '''
    def clamp(value, low, high):
        """Value within bounds."""
        if value < low:
            return low
        if value > high:
            return high
        items = [low, value, high]
        total = sum(items) - low - high
        return total


    def use(values):
        first = clamp(values[0], 0, 10)
        return [first, clamp(values[1], 0, 10)]
    '''
)


def test_the_first_candidate_restores_the_function() -> None:
    games = list(games_of(SOURCE, seed=1, weights={}))
    assert games
    lines = [line.strip() for line in SOURCE.splitlines()]
    for game in games:
        right = game.candidates[0]
        for line in right.after.splitlines():
            assert line.strip() in lines
        assert all((wrong.line, wrong.before, wrong.after) != right[1:] for wrong in game.candidates[1:])
        assert len(game.candidates) == 8


def test_the_same_seed_makes_the_same_games_and_a_row_keeps_them() -> None:
    games = list(games_of(SOURCE, seed=7, weights={}))
    assert games == list(games_of(SOURCE, seed=7, weights={}))
    row = row_of({"package": "p", "path": "m.py", "text": SOURCE}, {})
    assert row["games"]
    assert list(games_in_row(row)) == row["games"]


def test_only_the_right_try_and_the_submission_bear_loss() -> None:
    tokenizer = Tokenizer()
    chat = FlashChat(tokenizer)
    game = next(games_of(SOURCE, seed=1, weights={}))
    right = game.candidates[0]
    courses: set[int] = set()
    for seed in range(60):
        one = played(
            game, chat, random.Random(seed), window=128, count=lambda text: len(tokenizer.encode(text))
        ).example
        text = tokenizer.decode(one.tokens)
        learnt = tokenizer.decode([one.tokens[at] for at in one.targets])
        tries = text.count("try ")
        courses.add(tries)
        assert 1 <= tries <= MAX_TRIES
        answer = next(
            n
            for n in range(1, 9)
            if f"\n{n} module.py:{right.line}\n- {right.before.strip()}" in text
            and f"+ {right.after.strip()}" in text.partition(f"\n{n} module.py")[2].partition("module.py")[0]
        )
        assert f"submit {answer}" in learnt
        assert learnt.count("try") == (f"{answer} passes" in text)
        assert one.start == max(0, one.targets[0] - 128) or tries > 1
    assert courses == {1, 2, 3}


def test_each_candidate_s_end_and_the_right_one_are_known() -> None:
    tokenizer = Tokenizer()
    chat = FlashChat(tokenizer)
    for game in games_of(SOURCE, seed=3, weights={}):
        example, ends, right = played(
            game, chat, random.Random(5), window=128, count=lambda text: len(tokenizer.encode(text))
        )
        assert len(ends) == 8
        starts = [ends[0] - 20, *ends]
        for number, (start, end) in enumerate(zip(starts, ends, strict=False), start=1):
            shown = tokenizer.decode(example.tokens[start:end])
            assert number == 1 or shown.startswith(f"\n{number} module.py:")
            after = shown.rpartition("\n")[2].removeprefix("+ ")
            if number == right + 1 and len(game.candidates[0].after.splitlines()) == 1:
                assert after.strip("~") in game.candidates[0].after
        assert example.tokens[ends[-1]] == tokenizer.end
        assert f"submit {right + 1}" in tokenizer.decode(example.tokens[-8:])
