"""Supervised samples from the repair solver: verified trajectories through a task's candidate set.

The solver tries candidates until the visible test passes, and submits. Of its recorded results (each was
measured by running the tests) this makes several trajectories a task: candidates shown in another order,
another order of tries, another effort. Only trajectories whose submission passes the hidden tests are
kept, and loss falls on what worked alone: the try that passed and the submission. A failed try is context,
not an example to follow.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from catalog.models import CandidateSet
from model.chat import ChatFormat, Message
from rollout.agents.choice_prompt import MAX_TRIES, render_choice, render_try
from sft.data import Example


def demonstrations(
    sets: Iterable[CandidateSet],
    chat: ChatFormat,
    *,
    variants: int,
    efforts: Sequence[int],
    seed: int,
    window: int | None,
    count: Callable[[str], int] | None = None,
) -> list[Example]:
    """At most `variants` samples a set, in a fixed order; the same arguments give the same samples.

    Args:
        efforts: one is drawn for each sample.
        window: tokens of the decoder's bounded replay (`sft.data.example`).
        count: tokens of a text, which keep the prompt within its budget as in a rollout.
    """
    made = (
        demonstration(
            choices,
            chat,
            seed=seed,
            variant=variant,
            efforts=efforts,
            window=window,
            count=count,
        )
        for choices in sets
        for variant in range(variants)
    )
    return [example for example in made if example is not None]


def demonstration(
    choices: CandidateSet,
    chat: ChatFormat,
    *,
    seed: int,
    variant: int,
    efforts: Sequence[int],
    window: int | None,
    count: Callable[[str], int] | None = None,
) -> Example | None:
    """One way through a set; None when no submission of it would pass."""
    rng = random.Random(f"{seed} {choices.task_id} {variant}")
    shown = list(range(len(choices.candidates)))
    rng.shuffle(shown)
    right = [i for i in shown if choices.passes_visible[i] and choices.passes[i]]
    wrong = [i for i in shown if not choices.passes_visible[i]]
    if not right:
        return None
    tries = [*rng.sample(wrong, min(len(wrong), rng.randrange(MAX_TRIES))), rng.choice(right)]
    opening = render_choice(
        effort=rng.choice(list(efforts)),
        test_source=choices.test_source,
        failure=choices.failure,
        candidates=[choices.candidates[i] for i in shown],
        count=count,
    )
    messages = [Message(role, text) for role, text in opening]  # pyright: ignore[reportArgumentType]
    teaches = [False] * len(messages)
    for done, index in enumerate(tries, start=1):
        number, passed = shown.index(index) + 1, choices.passes_visible[index]
        reply = render_try(number, passed, choices.messages[index], MAX_TRIES - done)
        messages += [Message("assistant", f"try {number}"), Message("tool", reply)]
        teaches += [passed, False]
    messages.append(Message("assistant", f"submit {shown.index(tries[-1]) + 1}"))
    teaches.append(True)
    return taught(f"{choices.task_id}/{variant}", messages, teaches, chat, window)


def taught(
    id: str, messages: list[Message], teaches: list[bool], chat: ChatFormat, window: int | None
) -> Example:
    """Like `sft.data.example`, with loss on the assistant's turns that `teaches` marks alone."""
    ids, said = chat.render_said(messages)
    targets: list[int] = []
    turn = -1
    spoken = [teach for message, teach in zip(messages, teaches, strict=True) if message.role == "assistant"]
    for at, mine in enumerate(said):
        if mine:
            turn += at == 0 or not said[at - 1]
            if spoken[turn]:
                targets.append(at)
    first = said.index(True)
    start = max(0, first - window) if window is not None else 0
    return Example(id, tuple(ids[: targets[-1] + 1]), tuple(targets), start)
