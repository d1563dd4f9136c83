"""Between a trainer and the rollout service: batches one way, weights the other.

A trainer needs three calls of a running service (`Samples`) and a way to start it at the place where its
own checkpoint stands (`OpenSamples`): with the weights of that step in the engine, and as many batches
marked as trained on. Publication number = optimizer batches done, so one number says both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from rollout.engine import Engine
from rollout.service import RolloutBatch, RolloutService


class Samples(Protocol):
    """A running service, as the trainer sees it; `RolloutService` is one."""

    async def next_batch(self) -> RolloutBatch:
        """What the next step trains on. A batch that was handed out and not trained on comes again."""
        ...

    async def publish(self, weights: Any, version: int) -> None:
        """Go on under these weights (a state dict)."""
        ...

    async def close(self) -> None: ...


OpenSamples = Callable[[Any, int], Awaitable[Samples]]
"""(weights, batches trained on) to a running service."""


def samples_from(engine: Engine, make: Callable[[int], RolloutService]) -> OpenSamples:
    """How a trainer starts the service on `engine`.

    Args:
        make: given the number of batches trained on, makes the service (not yet entered).
    """

    async def open_samples(weights: Any, trained: int) -> Samples:
        await engine.pause()
        await engine.update_weights(weights, trained)
        await engine.resume()
        return await make(trained).__aenter__()

    return open_samples
