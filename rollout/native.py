"""The native engine: continuous batching over a policy's own key-value cache.

The loop is `schedule -> compute -> postprocess`. A step first computes waiting contexts (new prompts,
tool results) up to a token budget, then advances every running session by one token, all in as few calls
of `Cache.extend` as the settings allow. A session keeps its slot across turns; samples of one prompt fork
it; a session that lost its slot is computed again from its exact ids.

The event loop owns all state. The compute of a step runs in one worker thread on a plan that nobody else
touches until it returns, so that sandboxes work meanwhile; updates of weights go through the same thread.

Limits: with `exact=False` the logits of a session may differ in their last bits with the batch that it
runs in. One process, one device; contexts end at `max_tokens`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from rollout.config import EngineConfig
from rollout.engine import (
    Completion,
    EngineError,
    EngineStats,
    FinishReason,
    PauseMode,
    Request,
    RequestError,
    Sink,
    Token,
)
from rollout.sampling import Draw, draw, uniform
from rollout.slots import Job, SlotTable

Item = TypeVar("Item")


class NativeEngine:
    """An `Engine` over a `model.policy.Policy`. Make it inside a running event loop; close it.

    `policy` belongs to the engine from here on: `update_weights` writes into its module.
    """

    def __init__(self, policy: Any, config: EngineConfig, *, version: int = 0) -> None:
        self.policy = policy
        self.config = config
        self._version = version
        policy.module.eval()
        self._cache = policy.open_cache(config.slots + config.prefix_slots, config.max_tokens)
        self._table = SlotTable(config)
        self._jobs: list[Job] = []
        self._prefix_logits: dict[int, torch.Tensor] = {}
        self._stats = EngineStats(slots=config.slots)
        self._finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0}
        self._paused = False
        self._broken: BaseException | None = None
        self._clock: float | None = None
        self._wake = asyncio.Event()
        self._step_lock = asyncio.Lock()
        self._drained = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._loop_task = asyncio.create_task(self._loop(), name="engine loop")
        self._loop_task.add_done_callback(self._loop_ended)

    # --- the seam -------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_tokens(self) -> int:
        return self.config.max_tokens

    @property
    def exact(self) -> bool:
        return self.config.exact

    async def generate(self, request: Request, sink: Sink | None = None) -> Completion:
        if self._broken:
            raise EngineError(f"the engine has stopped: {self._broken}") from self._broken
        if len(request.ids) >= self.config.max_tokens:
            raise RequestError(
                "context", f"{len(request.ids)} tokens leave no room in a context of {self.config.max_tokens}"
            )
        if not request.ids or request.max_tokens < 1:
            raise ValueError("a request needs at least one id and one token to sample")
        job = Job(request, sink, asyncio.get_running_loop().create_future(), self._table.session(request))
        self._tick(start=True)
        self._jobs.append(job)
        self._wake.set()
        try:
            return await job.future
        finally:
            self._tick()
            if job in self._jobs:  # cancelled: the step under way ignores it, its slot's state is unsure
                self._jobs.remove(job)
                job.cancelled = True
                self._table.forget(job.session)
            if request.session is None:
                self.release(job.session.key)
            self._drained.set()

    def release(self, session: str) -> None:
        self._table.release(session)

    async def pause(self, mode: PauseMode = "keep") -> None:
        if mode == "drain":
            self._table.admitting = False
            while any(job.slot is not None for job in self._jobs):
                self._drained.clear()
                await self._drained.wait()
            self._table.admitting = True
        self._tick()
        self._paused = True
        async with self._step_lock:
            self._stats.pauses += 1
            for job in self._jobs:
                job.close_decode(interrupted=True)
            if mode == "abort":
                for job in list(self._jobs):
                    self._finish(job, "abort")

    async def resume(self) -> None:
        self._tick()
        self._paused = False
        self._wake.set()

    async def update_weights(
        self, weights: Any, version: int, *, cache: Literal["keep", "replay"] = "keep"
    ) -> None:
        if version < self._version:
            raise ValueError(f"version {version} is older than the loaded one, {self._version}")
        async with self._step_lock:
            for job in self._jobs:
                job.close_decode(interrupted=True)
            await self._run(lambda: self._load(weights))
            self._version = version
            self._table.drop_prefixes()  # a new prompt must never read key-values of old weights
            if cache == "replay":
                self._table.drop_caches()

    def stats(self) -> EngineStats:
        self._tick()
        self._stats.finished = dict(self._finished)
        return self._stats

    async def close(self) -> None:
        self._loop_task.cancel()
        await asyncio.wait([self._loop_task])
        self._thread.shutdown(wait=True)

    # --- the loop -------------------------------------------------------------------------------------

    async def _loop(self) -> None:
        while True:
            await self._wake.wait()
            async with self._step_lock:
                jobs: list[Job] = []
                if not self._paused:
                    self._tick()
                    jobs = self._table.schedule(self._jobs)
                if jobs:
                    dirty = self._table.take_dirty()
                    draws = await self._run(partial(self._compute, jobs, dirty))
                    self._postprocess(jobs, draws)
            if not jobs:
                self._wake.clear()
            await asyncio.sleep(0)  # let cancelled and finished callers run before the next schedule

    async def _run(self, work: Callable[[], Any]) -> Any:
        started = time.monotonic()
        if self.config.compute == "inline":
            result = work()
        else:
            # Shielded by waiting for it: a cancelled loop must not leave the thread inside the cache.
            future = asyncio.get_running_loop().run_in_executor(self._thread, work)
            await asyncio.wait([future])
            result = future.result()
        self._stats.compute_s += time.monotonic() - started
        return result

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        """Whoever waits hears that the engine is gone; nobody polls a dead one."""
        self._broken = EngineError("closed") if task.cancelled() else task.exception()
        for job in self._jobs:
            if not job.future.done():
                error = EngineError(f"the engine has stopped: {self._broken}")
                error.__cause__ = self._broken
                job.future.set_exception(error)

    # --- one step, in the worker thread ---------------------------------------------------------------

    @torch.no_grad()
    def _compute(self, jobs: list[Job], dirty: list[int]) -> list[Draw]:
        """Free the dirty slots, feed each job what its cache lacks, and draw one token for each."""
        for slot in dirty:
            self._cache.free(slot)
            self._prefix_logits.pop(slot, None)
        self._compute_prefixes(jobs)
        logits_by_job: dict[int, torch.Tensor] = {}
        for job in jobs:
            if job.fork_from is not None:
                self._cache.fork(job.fork_from, job.place)
                if not job.pieces:
                    logits_by_job[id(job)] = self._prefix_logits[job.fork_from]
        for rounds in range(max((len(job.pieces) for job in jobs), default=0)):
            feeding = [job for job in jobs if rounds < len(job.pieces)]
            for group in self._calls(feeding, [len(job.pieces[rounds]) for job in feeding]):
                rows = self._cache.extend(
                    [job.place for job in group], [list(job.pieces[rounds]) for job in group]
                )
                logits_by_job.update({id(job): rows[i] for i, job in enumerate(group)})
        requests = [job.request for job in jobs]
        return draw(
            torch.stack([logits_by_job[id(job)] for job in jobs]),
            [request.temperature for request in requests],
            [request.top_p for request in requests],
            [uniform(job.request.seed, len(job.context)) for job in jobs],
        )

    def _compute_prefixes(self, jobs: list[Job]) -> None:
        """Compute each shared prompt of this step that no prefix slot holds yet."""
        missing = {
            job.fork_from: job.request.ids[: job.request.prefix]
            for job in jobs
            if job.fork_from is not None and job.fork_from not in self._prefix_logits
        }
        for group in self._calls(list(missing), [len(ids) for ids in missing.values()]):
            rows = self._cache.extend(group, [list(missing[slot]) for slot in group])
            for i, slot in enumerate(group):
                self._prefix_logits[slot] = rows[i].clone()
                self._stats.prefill_tokens += len(missing[slot])

    def _calls(self, items: list[Item], lengths: list[int]) -> list[list[Item]]:
        """Split into calls of `extend`, each padded to at most twice its shortest piece."""
        if self.config.exact:
            return [[item] for item in items]
        calls: list[list[Item]] = []
        shortest = 0
        for length, item in sorted(zip(lengths, items, strict=True), key=lambda pair: pair[0]):
            if calls and length <= 2 * shortest - (shortest == 1):
                calls[-1].append(item)
            else:
                calls.append([item])
                shortest = length
        return calls

    # --- after a step ---------------------------------------------------------------------------------

    def _postprocess(self, jobs: list[Job], draws: list[Draw]) -> None:
        self._stats.steps += 1
        for job, drawn in zip(jobs, draws, strict=True):
            if job.cancelled:
                continue
            counted = job.computed(self._version)
            self._stats.prefill_tokens += counted.prefill
            self._stats.replayed_tokens += counted.replay
            self._stats.forked_tokens += counted.forked
            if drawn.logprob is None:
                self._tick()
                self._jobs.remove(job)
                self._table.forget(job.session)
                message = f"logits after {len(job.context)} tokens are not finite (version {self._version})"
                job.future.set_exception(RequestError("not_finite", message))
                continue
            self._stats.sampled_tokens += 1
            job.sampled(Token(drawn.id, drawn.logprob, self._version, drawn.kept))
            if drawn.id in job.request.stop_ids:
                self._finish(job, "stop")
            elif len(job.tokens) >= job.request.max_tokens or len(job.context) >= self.config.max_tokens:
                self._finish(job, "length")

    def _finish(self, job: Job, reason: FinishReason) -> None:
        self._tick()
        self._jobs.remove(job)
        job.close_decode(interrupted=reason == "abort")
        job.session.busy = False
        self._finished[reason] += 1
        if not job.future.done():
            job.future.set_result(Completion(tuple(job.tokens), tuple(job.segments), reason))

    def _load(self, weights: Any) -> None:
        if isinstance(weights, (str, Path)):
            self.policy.load(Path(weights))
        else:
            self.policy.module.load_state_dict(weights)

    def _tick(self, *, start: bool = False) -> None:
        """Add the time since the last event to the counters, before anything changes."""
        now = time.monotonic()
        if self._clock is None:
            self._clock = now if start else None
            return
        elapsed, self._clock = now - self._clock, now
        self._stats.available_s += elapsed * self.config.slots
        if self._paused:
            self._stats.paused_s += elapsed * self.config.slots
        else:
            self._stats.busy_s += elapsed * sum(1 for job in self._jobs if job.slot is not None)
