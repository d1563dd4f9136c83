"""Running one sample exactly once in the life of a run folder.

The folder holds `trajectories.jsonl` and `journal/ID.jsonl` for each sample in flight. Running a sample
that is finished gives its trajectory back; one that was under way goes on where its journal ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from catalog.models import Failure, Task
from catalog.trajectory import Trajectory
from rollout.agents.base import Agent, attempt
from rollout.config import SamplingConfig
from rollout.engine import Engine
from rollout.journal import Journal, SyncPolicy, TrajectoryLog
from rollout.session import ChatFormat, SampleSpec, Session, TextCodec


def sample_seed(seed: int, prompt: int, sample: int) -> int:
    """63 random bits that depend on the run's seed and the sample's place alone."""
    digest = hashlib.blake2b(f"{seed}:{prompt}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True, slots=True)
class Speaker:
    """Who acts: an engine, how its policy writes turns, and its name for the records."""

    engine: Engine
    chat: ChatFormat
    tokenizer: TextCodec
    name: str


class Overdue(Exception):
    """Given as the reason when a sample is cancelled for taking too long."""


class SampleRunner:
    """Runs samples of one agent into one folder; one process at a time may use it."""

    def __init__(
        self,
        folder: Path,
        speaker: Speaker,
        agent: Agent,
        *,
        sampling: SamplingConfig | None = None,
        sync: SyncPolicy = "never",
        progress: Callable[[], None] | None = None,
    ) -> None:
        self.log = TrajectoryLog(folder / "trajectories.jsonl")
        self._journals = folder / "journal"
        self._speaker, self._agent = speaker, agent
        self._sampling, self._progress = sampling, progress
        self._sync: SyncPolicy = sync
        self._overdue: set[str] = set()
        self._running: dict[str, asyncio.Task[Trajectory]] = {}
        self._remove_finished()

    def _remove_finished(self) -> None:
        """Journals whose trajectory was logged just before the process died."""
        for path in self._journals.glob("*.jsonl"):
            if path.stem in self.log:
                path.unlink()

    async def run(self, spec: SampleSpec, task: Task) -> Trajectory:
        """The sample's trajectory. Raises what is no failure of one sample: EngineError, faults of code."""
        if not re.fullmatch(r"[\w.-]+", spec.id):
            raise ValueError(f"run id {spec.run_id!r} must consist of letters, digits, '.', '_' and '-'")
        if spec.id in self.log:
            return self.log[spec.id]
        journal = Journal(self._journals / f"{spec.id}.jsonl", spec.header(), sync=self._sync)
        try:
            session = Session(
                spec,
                self._speaker.engine,
                self._speaker.chat,
                self._speaker.tokenizer,
                sampling=self._sampling,
                journal=journal,
                progress=self._progress,
            )
            trajectory = await self._attempt(spec, task, session)
            self.log.append(trajectory)
            journal.remove()
            return trajectory
        finally:
            journal.close()
            self._speaker.engine.release(spec.id)

    async def _attempt(self, spec: SampleSpec, task: Task, session: Session) -> Trajectory:
        current = asyncio.current_task()
        assert current is not None
        self._running[spec.id] = current
        try:
            return await attempt(self._agent, task, session, policy=self._speaker.name)
        except asyncio.CancelledError:
            if spec.id not in self._overdue:
                raise
            current.uncancel()
            failure = Failure(boundary="budget", kind="deadline", message="the sample took too long")
            return session.trajectory(agent=self._agent.name, policy=self._speaker.name, failure=failure)
        finally:
            self._overdue.discard(spec.id)
            self._running.pop(spec.id, None)

    def expire(self, sample: str) -> None:
        """End a running sample as a failure of boundary `budget`."""
        if sample in self._running and sample not in self._overdue:
            self._overdue.add(sample)
            self._running[sample].cancel()

    def close(self) -> None:
        self.log.close()
