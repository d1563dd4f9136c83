"""Settings of the engine, of sampling and of the service. No torch here."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Settings(BaseModel):
    """Base of every settings model: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineConfig(Settings):
    """How the native engine batches."""

    slots: int = Field(default=32, ge=1)
    """Sessions whose key-values are kept at one time. With more sessions the longest idle one is computed
    again from its exact ids when it goes on."""
    prefix_slots: int = Field(default=4, ge=1)
    """Prompts kept for forking to the samples of their group."""
    max_tokens: int = Field(default=1024, ge=2)
    """Longest context of a session."""
    prefill_tokens: int = Field(default=4096, ge=1)
    """Prompt tokens computed between two decode steps; one request always fits."""
    compute: Literal["thread", "inline"] = "thread"
    """`thread` lets tools run while the network computes; `inline` blocks the event loop."""
    exact: bool = False
    """One session a call, and lost caches computed again in the very pieces of the first time. Then a
    token depends on nothing but its own session, bit for bit; it costs the batching."""


class SamplingConfig(Settings):
    """How an agent's turns are sampled."""

    temperature: float = Field(default=1.0, ge=0)
    """0 takes the likeliest token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Below 1 the trajectory records the kept ids, which the trainer needs to rebuild probabilities."""


class ServiceConfig(Settings):
    """How samples are dispatched, collected and bounded."""

    in_flight: int = Field(default=64, ge=1)
    """Samples dispatched and not yet finished; held throughout the job."""
    batch_prompts: int = Field(default=8, ge=1)
    """Prompts whose samples have all finished make one batch."""
    samples: int = Field(default=4, ge=1)
    """Samples of each (prompt, effort): M_b of the report."""
    efforts: tuple[int | None, ...] = (None,)
    """B of the report: each prompt is sampled at each of these. None sends no effort line."""
    max_staleness: int = Field(default=2, ge=0)
    """In publications. Staler tokens are masked from the loss; a sample with no other is dropped."""
    off_policy_ratio: float = Field(default=1.0, ge=0, le=1)
    """Largest share of loss-bearing tokens with staleness of 1 or more in a batch. 0 is synchronous."""
    share_device: bool = True
    """A full batch preempts the engine until the next publication. False leaves it generating."""
    cache_on_update: Literal["keep", "replay"] = "keep"
    """What becomes of running sessions' key-values under new weights."""
    sample_timeout_s: float = Field(default=300.0, gt=0)
    """A sample that takes longer, pauses not counted, becomes a failure (boundary `budget`)."""
    stall_s: float = Field(default=120.0, gt=0)
    """Without any token, tool result or finished sample for so long, the service gives up with an error."""
    max_failure_share: float = Field(default=0.5, gt=0, le=1)
    """More failures than this share of the last two batches (at least 20 samples) stop the job."""
    deterministic: bool = False
    """One batch after the other, each finished before training: staleness 0, and with an exact engine the
    same trajectories in every run, killed and resumed or not."""
    sampling: SamplingConfig = SamplingConfig()
    seed: int = 0

    @property
    def group_size(self) -> int:
        """Samples of one prompt."""
        return self.samples * len(self.efforts)

    @property
    def batch_samples(self) -> int:
        return self.batch_prompts * self.group_size

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.group_size > self.in_flight:
            raise ValueError(
                f"one prompt has {self.group_size} samples but in_flight is {self.in_flight}: "
                "raise in_flight or lower samples"
            )
        if len(set(self.efforts)) != len(self.efforts):
            raise ValueError("efforts must differ")
        return self
