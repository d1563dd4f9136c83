"""From verified trajectories to supervised samples: what is read, what is learned, in which order.

A sample is one conversation in the chat format of the policy. Loss falls on what the assistant says (its
content and its stop token) and on nothing else: not on prompts, not on tool results. `start` is where the
decoder's bounded replay begins at inference: the first turn's prompt is read in one piece, of which the
decoder sees the last `window` tokens. Training rebuilds that, or it would fit a network that is never
run.

Nothing here touches torch or files; rendering and verification come from the caller.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from model.chat import ChatFormat, Message


@dataclass(frozen=True)
class Example:
    """One supervised sample."""

    id: str
    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    """Ascending positions of the tokens that bear loss."""
    start: int = 0
    """Position at which the decoder begins."""


@dataclass(frozen=True)
class Selection:
    """Samples of a run, and how many could not be used."""

    examples: tuple[Example, ...]
    too_long: int = 0
    nothing_said: int = 0


def example(id: str, messages: Sequence[Message], chat: ChatFormat, *, window: int | None = None) -> Example:
    """Render one conversation.

    Args:
        id: of the trajectory.
        messages: whole conversation, the assistant's turns verified.
        chat: format of the policy.
        window: tokens of the decoder's bounded replay; None for networks without one.
    """
    ids, said = chat.render_said(messages)
    targets = tuple(at for at, mine in enumerate(said) if mine)
    start = max(0, targets[0] - window) if targets and window is not None else 0
    return Example(id, tuple(ids[: targets[-1] + 1]) if targets else tuple(ids), targets, start)


def select(examples: Iterable[Example], *, max_tokens: int) -> Selection:
    """Keep what fits the context and has something to learn; ids must be unique.

    Raises:
        ValueError: nothing is left, or an id occurs twice.
    """
    kept: list[Example] = []
    too_long = nothing_said = 0
    for candidate in examples:
        if not candidate.targets:
            nothing_said += 1
        elif len(candidate.tokens) > max_tokens:
            too_long += 1
        else:
            kept.append(candidate)
    if len({candidate.id for candidate in kept}) != len(kept):
        raise ValueError("two supervised samples share an id")
    if not kept:
        raise ValueError(
            f"no supervised sample is left: {too_long} exceed {max_tokens} tokens (raise max_tokens), "
            f"{nothing_said} have no assistant turn"
        )
    return Selection(tuple(kept), too_long, nothing_said)


def minibatch(examples: Sequence[Example], step: int, size: int, seed: int) -> list[Example]:
    """The samples of step `step` (from 0): a new permutation each epoch, a pure function of the arguments.

    An epoch's end may fall inside a minibatch, which then begins the next epoch; no sample is left out or
    seen twice within an epoch.
    """
    chosen: list[Example] = []
    for at in range(step * size, (step + 1) * size):
        epoch, place = divmod(at, len(examples))
        if place == 0 or not chosen:
            order = list(range(len(examples)))
            random.Random(f"{seed}:{epoch}").shuffle(order)
        chosen.append(examples[order[place]])
    return chosen
