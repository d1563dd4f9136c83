"""What jobs work with: the catalog's tasks, sandboxes, a grader, agents, and a policy in an engine."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from catalog.errors import UserError

if TYPE_CHECKING:
    from catalog.models import CandidateSet, Task
    from catalog.store import Catalog
    from console.session import Session
    from rollout.agents.base import Agent
    from rollout.agents.bash import BashConfig
    from rollout.config import EngineConfig
    from rollout.samples import Speaker
    from sandbox.base import SandboxProvider
    from sandbox.images import ImageStore
    from verifiers.grading import Grader

AgentName = Literal["repair-choice", "bash"]


@dataclass(frozen=True)
class Workshop:
    """Everything that acting on tasks needs, except a policy."""

    catalog: Catalog
    provider: SandboxProvider
    grader: Grader

    def agent(self, name: AgentName, *, fresh: bool, bash: BashConfig) -> Agent:
        """A scaffold. `fresh` makes every verdict anew, as an evaluation must; `bash` is for that agent.

        In training `repair-choice` shows a task's candidates in another order each time, in evaluation
        always in their own.
        """
        if name == "bash":
            from rollout.agents.bash import BashAgent

            return BashAgent(self.provider, self.grader, bash, fresh=fresh)
        from rollout.agents.repair_choice import RepairChoice
        from rollout.visible import GraderVisibleTests

        visible = GraderVisibleTests(self.grader, cache=not fresh)
        return RepairChoice(
            self._candidates, self.catalog.blobs, visible, self.grader, fresh=fresh, reshuffle=not fresh
        )

    def tasks(
        self, agent: AgentName, *, split: str | None, source: str | None = None, limit: int | None = None
    ) -> list[Task]:
        """Accepted tasks that the agent can work on, ordered by id. Raises UserError if there are none."""
        found = self.catalog.list_tasks(status="accepted", split=split, source=source)
        if agent == "repair-choice":
            offered = {one.task_id for one in self.catalog.list_candidates()}
            found = [task for task in found if task.id in offered]
        if not found:
            which = f" in split {split}" if split else ""
            raise UserError(
                f"There is no accepted task{which} for the agent {agent}: "
                "make some with `posttrain tasks synth pypi:boltons`."
            )
        return found[:limit]

    def _candidates(self, task_id: str) -> CandidateSet:
        found = self.catalog.find_candidates(task_id)
        if found is None:
            raise KeyError(task_id)
        return found


@asynccontextmanager
async def open_workshop(session: Session, *, jobs: int = 2) -> AsyncGenerator[Workshop]:
    """Open the catalog and start the sandboxes; `jobs` jails run at once."""
    from sandbox.base import provider
    from sandbox.images import ImageStore

    store = session.store()
    sandboxes = provider(store=store)
    with session.catalog() as catalog:
        try:
            async with furnish(catalog, sandboxes, ImageStore(store), jobs=jobs) as workshop:
                yield workshop
        finally:
            await sandboxes.close()


@asynccontextmanager
async def furnish(
    catalog: Catalog, provider: SandboxProvider, images: ImageStore, *, jobs: int
) -> AsyncGenerator[Workshop]:
    """A workshop on what is open already: its grader, with the catalog's verdict cache."""
    from verifiers.cache import VerdictCache
    from verifiers.grading import Grader

    cache = VerdictCache(catalog.verdicts)
    async with Grader(provider, images, catalog.blobs, cache, jobs=jobs) as grader:
        yield Workshop(catalog, provider, grader)


@asynccontextmanager
async def open_speaker(
    policy: str, engine: EngineConfig, *, name: str | None = None
) -> AsyncGenerator[Speaker]:
    """Load a policy into the native engine (this imports torch). `name`: what trajectories call it."""
    from model.policy import load_policy
    from rollout.native import NativeEngine
    from rollout.samples import Speaker

    loaded = load_policy(policy)
    running = NativeEngine(loaded, engine)
    try:
        yield Speaker(running, loaded.chat, loaded.tokenizer, name or loaded.name)
    finally:
        await running.close()


def epochs(tasks: Sequence[Task], seed: int) -> Callable[[int], Task]:
    """Task of prompt number i: all tasks in a new order each epoch, the same in every process."""

    def order(prompt: int) -> Task:
        epoch, place = divmod(prompt, len(tasks))
        shuffled = list(tasks)
        random.Random(f"{seed} {epoch}").shuffle(shuffled)
        return shuffled[place]

    return order
