"""Which task teaches what: SFT and RL share no function, held-out tasks share no file with either."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from catalog.models import CandidateSet, Task


@dataclass(frozen=True)
class Parts:
    """Tasks with a candidate set, by what they are for; each in a fixed order."""

    sft: tuple[Task, ...]
    rl: tuple[Task, ...]
    dev: tuple[Task, ...]
    test: tuple[Task, ...]


def function_of(task: Task) -> str:
    """`path::function`: what tasks must share to resemble each other."""
    return f"{task.origin.path}::{task.origin.function}"


def divide(tasks: Iterable[Task], sets: Mapping[str, CandidateSet], *, sft_share: float, seed: int) -> Parts:
    """Deal the training functions out: at most `sft_share` of them to SFT, the rest to RL."""
    usable = sorted((task for task in tasks if task.id in sets), key=lambda task: task.id)
    train = [task for task in usable if task.split == "train"]
    functions = sorted({function_of(task) for task in train})
    random.Random(f"sft {seed}").shuffle(functions)
    chosen = set(functions[: int(sft_share * len(functions))])
    return Parts(
        sft=tuple(task for task in train if function_of(task) in chosen),
        rl=tuple(task for task in train if function_of(task) not in chosen),
        dev=tuple(task for task in usable if task.split == "dev"),
        test=tuple(task for task in usable if task.split == "test"),
    )
