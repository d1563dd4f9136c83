"""What jobs work with: agents as training and evaluation need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from catalog.store import Catalog
from console.workshop import Workshop
from rollout.agents.base import attempt
from rollout.agents.bash import BashConfig
from tests.rollout.fakes import FakeGrader, make_choices, make_task
from tests.rollout.test_agents import session_of


async def test_training_shows_each_prompt_another_order_and_evaluation_always_the_set_s(
    tmp_path: Path,
) -> None:
    task, grader = make_task(), FakeGrader()
    choices, blobs = make_choices(task)
    nobody: Any = None  # this agent opens no sandbox of its own
    with Catalog.open(tmp_path) as catalog:
        refs = {one.content: catalog.blobs.put(blobs[one.content]) for one in choices.candidates}
        own = [one.model_copy(update={"content": refs[one.content]}) for one in choices.candidates]
        catalog.put_task(task)
        catalog.put_candidates(choices.model_copy(update={"candidates": tuple(own)}))
        workshop = Workshop(catalog, nobody, grader)  # type: ignore[arg-type]
        texts: dict[bool, set[str]] = {}
        for fresh in (False, True):
            agent = workshop.agent("repair-choice", fresh=fresh, bash=BashConfig())
            for prompt in range(6):
                done = await attempt(agent, task, session_of(task, ["submit 3"], prompt=prompt), policy="p")
                texts.setdefault(fresh, set()).add(done.turns[1].text)
                assert not fresh or done.reward == 1.0, "the third of the set is right"
    assert len(texts[False]) > 1
    assert len(texts[True]) == 1
    assert grader.fresh == [False] * 6 + [True] * 6
