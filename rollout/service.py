"""The asynchronous rollout service: it keeps samples in flight and hands out batches to train on.

    async with RolloutService(speaker, agent, order, folder=..., run_id=..., config=...) as service:
        while step < steps:
            batch = await service.next_batch()        # preempts generation at a token boundary
            ... one optimizer step on batch.trajectories under batch.masks ...
            await service.publish(weights, version)   # samples in flight go on under the new weights

Dispatch is per sample (`rollout.dispatch`), staleness is bounded there and by masks (`rollout.batch`), and
every sample runs exactly once (`rollout.samples`). The ledger records which prompts were dispatched and
which made up which batch, so that a killed run hands out again the batches that were not trained on, the
same ones, and goes on.

One bad sample is a failure on its trajectory. A fault of the engine or of code, too many failures, or
no progress, stops `next_batch` with an error: nobody waits for a dead service.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from catalog.models import Task
from catalog.trajectory import Trajectory
from rollout.agents.base import Agent
from rollout.batch import RolloutBatch, compose
from rollout.config import ServiceConfig
from rollout.dispatch import Dispatcher
from rollout.journal import Journal, SyncPolicy
from rollout.samples import SampleRunner, Speaker, sample_seed
from rollout.session import SampleSpec


class RolloutError(Exception):
    """The service cannot go on; the message says why."""


class RolloutStalled(RolloutError):
    """Nothing happened for too long."""


class RolloutUnhealthy(RolloutError):
    """Too many samples failed for reasons that are not the policy's."""


class PromptsExhausted(RolloutError):
    """The order of tasks ended before a batch was full."""


@dataclass(slots=True)
class _Group:
    task: Task
    size: int
    done: dict[int, Trajectory] = field(default_factory=dict[int, Trajectory])


@dataclass(slots=True)
class _Flight:
    task: asyncio.Task[Trajectory]
    started: float
    paused_before: float


class RolloutService:
    """See the module.

    Args:
        order: the task of prompt number i, the same in every process; None ends the prompts.
        trained: batches that the trainer has finished (its optimizer steps), when it resumes.
        sync: whether journals of samples in flight survive a loss of power; a kill they always do.
    """

    def __init__(
        self,
        speaker: Speaker,
        agent: Agent,
        order: Callable[[int], Task | None],
        *,
        folder: Path,
        run_id: str,
        config: ServiceConfig,
        trained: int = 0,
        sync: SyncPolicy = "never",
    ) -> None:
        if config.deterministic and not speaker.engine.exact:
            raise ValueError("deterministic rollout needs an engine with exact=True")
        self.config, self.run_id = config, run_id
        self.version = speaker.engine.version
        self._engine, self._order = speaker.engine, order
        self._dispatcher = Dispatcher(config)
        self._groups: dict[int, _Group] = {}
        self._ready: list[int] = []
        self._flights: dict[str, _Flight] = {}
        self._next_prompt = 0
        self._exhausted = False
        self._batches = self._requested = trained
        self._again: list[dict[str, Any]] = []
        self._fatal: BaseException | None = None
        self._changed = asyncio.Event()
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self._progress_at = time.monotonic()
        self._recent: list[bool] = []
        self.counts: Counter[str] = Counter()
        """Since this process started: samples finished, failed by boundary, dropped; tokens masked."""
        self._runner = SampleRunner(
            folder, speaker, agent, sampling=config.sampling, sync=sync, progress=self._progressed
        )
        self._ledger = Journal(folder / "ledger.jsonl", {"run": run_id, "seed": config.seed}, sync="turn")
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._restore()
        self._watch = asyncio.create_task(self._watchdog(), name="rollout watchdog")
        self._dispatch()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # --- what the trainer calls -----------------------------------------------------------------------

    async def next_batch(self) -> RolloutBatch:
        """The next batch, once all samples of enough prompts have finished. Generation then pauses until
        `publish` (or the next call of this). Raises RolloutError, EngineError, or a fault of agent code."""
        self._requested += 1
        if self._again:
            if self.config.share_device:
                await self._pause()
            return self._compose(**self._again.pop(0))
        await self._resume()
        self._dispatch()
        while len(self._ready) < self.config.batch_prompts:
            self._raise_fatal()
            if self._exhausted and not self._flights:
                raise PromptsExhausted("no prompts are left to fill a batch; give more tasks or epochs")
            self._changed.clear()
            await self._changed.wait()
        self._raise_fatal()
        if self.config.share_device:
            await self._pause()
        if self.config.deterministic:
            self._ready.sort()
        chosen = self._ready[: self.config.batch_prompts]
        self._ready = self._ready[self.config.batch_prompts :]
        entry = {"batch": self._batches + 1, "version": self.version, "prompts": chosen}
        self._ledger.append(entry, turn=True)
        return self._compose(**entry)

    async def publish(self, weights: Any, version: int) -> None:
        """Load new weights (a state dict or a folder) as that publication, and go on generating."""
        await self._pause()
        await self._engine.update_weights(weights, version, cache=self.config.cache_on_update)
        self.version = version
        await self._resume()
        self._dispatch()

    async def close(self) -> None:
        """Stop. Samples in flight stay in their journals and go on in the next process."""
        tasks = [flight.task for flight in self._flights.values()]
        if self._watch:
            tasks.append(self._watch)  # pyright: ignore[reportArgumentType]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._runner.close()
        self._ledger.close()

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    # --- dispatch -------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Take up where the ledger ends: batches not trained on, prompts not in any batch."""
        dispatched: dict[int, str] = {}
        for entry in self._ledger.entries:
            if "dispatch" in entry:
                dispatched[entry["dispatch"]] = entry["task"]
            else:
                for prompt in entry["prompts"]:
                    if entry["batch"] <= self._batches:
                        dispatched.pop(prompt, None)
                if entry["batch"] > self._batches:
                    self._again.append(entry)
        self._next_prompt = 1 + max(
            (entry["dispatch"] for entry in self._ledger.entries if "dispatch" in entry), default=-1
        )
        again = {prompt for entry in self._again for prompt in entry["prompts"]}
        for prompt, task_id in dispatched.items():
            task = self._order(prompt)
            if task is None or task.id != task_id:
                raise RolloutError(
                    f"prompt {prompt} was task {task_id} and is now {task and task.id}: "
                    "the tasks changed; use a new run folder"
                )
            self._start(prompt, task, again=prompt in again)

    def _dispatch(self) -> None:
        """Start prompts while the rule allows."""
        if self._watch is None or self._fatal:
            return
        size = self.config.group_size
        while not self._exhausted:
            goal = self._requested * self.config.batch_prompts
            if self.config.deterministic and self._next_prompt >= goal:
                return
            outstanding = len(self._flights) + sum(len(group.done) for group in self._groups.values())
            if not self._dispatcher.take(size, outstanding):
                return
            task = self._order(self._next_prompt)
            if task is None:
                self._dispatcher.finished(size)
                self._exhausted = True
                self._changed.set()
                return
            self._ledger.append({"dispatch": self._next_prompt, "task": task.id})
            prompt, self._next_prompt = self._next_prompt, self._next_prompt + 1
            self._start(prompt, task, again=None)

    def _start(self, prompt: int, task: Task, *, again: bool | None) -> None:
        """Put a prompt's samples in flight. `again`: None is new; True belongs to a batch of the ledger."""
        group = self._groups[prompt] = _Group(task, self.config.group_size)
        for sample in range(group.size):
            spec = SampleSpec(
                run_id=self.run_id,
                prompt=prompt,
                sample=sample,
                task_id=task.id,
                effort=self.config.efforts[sample // self.config.samples],
                seed=sample_seed(self.config.seed, prompt, sample),
                group_size=self.config.samples,
            )
            if again is not None:
                if spec.id in self._runner.log:
                    group.done[sample] = self._runner.log[spec.id]
                    continue
                assert not again, f"{spec.id} is in a batch of the ledger but has no trajectory"
                self._dispatcher.occupy(1)
            flight = asyncio.create_task(self._runner.run(spec, task), name=spec.id)
            self._flights[spec.id] = _Flight(flight, time.monotonic(), self._paused_total())
            flight.add_done_callback(lambda done, spec=spec: self._finished(spec, done))
        if len(group.done) == group.size and not again:
            self._ready.append(prompt)

    def _finished(self, spec: SampleSpec, task: asyncio.Task[Trajectory]) -> None:
        self._flights.pop(spec.id, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._fail(error)
            return
        trajectory = task.result()
        self._dispatcher.finished()
        self._count(trajectory)
        group = self._groups[spec.prompt]
        group.done[spec.sample] = trajectory
        if len(group.done) == group.size:
            self._ready.append(spec.prompt)
        self._progressed()
        self._changed.set()
        self._dispatch()

    # --- batches --------------------------------------------------------------------------------------

    def _compose(self, batch: int, version: int, prompts: list[int]) -> RolloutBatch:
        """The batch of these prompts' samples; the service lets go of them."""
        groups = [self._groups.pop(prompt) for prompt in prompts]
        composed = compose(
            [group.done[sample] for group in groups for sample in range(group.size)],
            number=batch,
            version=version,
            max_staleness=self.config.max_staleness,
            ratio=self.config.off_policy_ratio,
            metrics=self._metrics(),
        )
        self._batches = batch
        self.counts["batches"] += 1
        for name in ("dropped_stale", "masked_tokens", "masked_for_ratio"):
            self.counts[name] += int(composed.metrics[name])
        return composed

    def _metrics(self) -> dict[str, float]:
        """Of the service and the engine, since this process started."""
        stats = self._engine.stats()
        return {
            "in_flight": len(self._flights),
            "dispatch_waits": self._dispatcher.waited,
            "utilisation": stats.utilisation,
            "utilisation_unpaused": stats.utilisation_unpaused,
            "engine_tokens": stats.sampled_tokens,
            "engine_prefill_tokens": stats.prefill_tokens,
            "engine_forked_tokens": stats.forked_tokens,
            "engine_replayed_tokens": stats.replayed_tokens,
        }

    def _count(self, trajectory: Trajectory) -> None:
        """Count a finished sample, and stop the job if failures are too many."""
        self.counts["finished"] += 1
        self._recent.append(trajectory.failure is not None)
        if trajectory.failure:
            self.counts["failed"] += 1
            self.counts[f"failed_{trajectory.failure.boundary}"] += 1
        size = max(20, 2 * self.config.batch_samples)  # failures are quick: judge no smaller window
        window = self._recent = self._recent[-size:]
        if len(window) == size and sum(window) > size * self.config.max_failure_share:
            last = trajectory.failure
            self._fail(
                RolloutUnhealthy(
                    f"{sum(window)} of the last {len(window)} samples failed, not by the policy's doing; "
                    f"the last: {last.boundary if last else ''} {last.kind if last else ''} "
                    f"{last.message if last else ''}".rstrip()
                )
            )

    # --- pausing, watching, failing -------------------------------------------------------------------

    async def _pause(self) -> None:
        if self._paused_at is None:
            self._paused_at = time.monotonic()
            await self._engine.pause("keep")

    async def _resume(self) -> None:
        if self._paused_at is not None:
            self._paused_s, self._paused_at = self._paused_total(), None
            self._progressed()
            await self._engine.resume()

    def _paused_total(self) -> float:
        running = time.monotonic() - self._paused_at if self._paused_at is not None else 0.0
        return self._paused_s + running

    def _progressed(self) -> None:
        self._progress_at = time.monotonic()

    async def _watchdog(self) -> None:
        """End overdue samples; stop the service when nothing happens."""
        interval = min(1.0, self.config.stall_s / 4, self.config.sample_timeout_s / 4)
        while True:
            await asyncio.sleep(interval)
            if self._paused_at is not None:
                continue
            now = time.monotonic()
            for sample, flight in list(self._flights.items()):
                used = now - flight.started - (self._paused_total() - flight.paused_before)
                if used > self.config.sample_timeout_s:
                    self._runner.expire(sample)
            if self._flights and now - self._progress_at > self.config.stall_s:
                waiting = ", ".join(sorted(self._flights)[:3])
                self._fail(
                    RolloutStalled(f"no token, tool result or sample for {self.config.stall_s} s: {waiting}")
                )

    def _fail(self, error: BaseException) -> None:
        self._fatal = self._fatal or error
        self._changed.set()

    def _raise_fatal(self) -> None:
        if self._fatal:
            raise self._fatal
