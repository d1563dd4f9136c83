"""When the next prompt may start: a pure rule, per sample.

A prompt is dispatched as soon as the number of newly finished samples reaches its group's size, whichever
groups they belong to. Per batch, the load would swing between full and empty; per finished group, one long
sample would hold a whole group's places. Starting with `in_flight` credits fills the engine at once, and
keeps the bound on samples in flight ever after.

A second condition keeps data from growing old: samples that are ready or in flight beyond the batch being
collected will be trained on after at least one more publication, so there may be only so many of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollout.config import ServiceConfig


@dataclass(slots=True)
class Dispatcher:
    """Credits of one service."""

    config: ServiceConfig
    credit: int = 0
    waited: int = 0
    """Times that the off-policy bound held a prompt back that had its credits."""

    def __post_init__(self) -> None:
        self.credit = self.config.in_flight

    def finished(self, samples: int = 1) -> None:
        self.credit += samples

    def take(self, group: int, outstanding: int) -> bool:
        """Whether a prompt of `group` samples starts now; it then has its places.

        Args:
            outstanding: samples in flight, or finished and not yet in a batch.
        """
        if self.credit < group:
            return False
        if outstanding and outstanding + group > self.limit():
            self.waited += 1
            return False
        self.credit -= group
        return True

    def occupy(self, samples: int) -> None:
        """Places of samples that a resumed run brings along."""
        self.credit -= samples

    def limit(self) -> int:
        """Most samples that may be outstanding.

        One batch is being collected. What lies beyond it waits for the next ones: with staleness bound S,
        at most S further batches; and at most a share r of one batch if the off-policy ratio r is below 1.
        """
        batch, ratio = self.config.batch_samples, self.config.off_policy_ratio
        ahead = self.config.max_staleness * batch
        if ratio < 1:
            ahead = min(ahead, int(ratio * batch))
        return batch + ahead
