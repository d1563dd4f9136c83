"""Settings of optimizer, schedule and checkpoints that all trainers share. Imports no torch."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat


class Settings(BaseModel):
    """Frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ScheduleConfig(Settings):
    """Factor on the learning rate by step: linear warm-up, constant, then cosine down to a floor."""

    warmup: int = Field(default=0, ge=0)
    """Steps of linear warm-up; step 0 already moves."""
    decay_from: int | None = None
    """Step at which the cosine begins; None keeps the rate constant."""
    decay_to: int | None = None
    """Step at which the floor is reached and held."""
    floor: float = Field(default=0.1, ge=0, le=1)

    def factor(self, step: int) -> float:
        """Factor at `step`, from 0."""
        warm = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if self.decay_from is None or self.decay_to is None or step <= self.decay_from:
            return warm
        done = min(1.0, (step - self.decay_from) / max(1, self.decay_to - self.decay_from))
        return warm * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


class OptimizerConfig(Settings):
    """Constants of the release where it has them."""

    kind: Literal["muon", "adamw"] = "muon"
    """`adamw` uses it for every parameter (large networks on a CPU)."""
    lr: float = Field(default=2.6e-4, ge=0)
    """Muon's rate, and AdamW's for what has no own rate. 0 changes no weight, which makes a canary."""
    adamw_lr: float | None = None
    """AdamW's rate; `lr` by default."""
    embeddings: Literal["adamw", "sinkhorn"] = "adamw"
    """What trains embedding and head. `sinkhorn`, the release's choice, balances rows and columns of the
    momentum, keeps one buffer instead of two and takes `lr`."""
    embedding_lr_scale: NonNegativeFloat = 1.0
    weight_decay: NonNegativeFloat = 0.1
    momentum: NonNegativeFloat = 0.95
    gamma: NonNegativeFloat = 0.18
    """Root mean square of the update of Muon and of balanced momentum before the rate."""
    sinkhorn_steps: int = Field(default=11, ge=1)
    """Of balancing; odd numbers end with rows."""
    sinkhorn_floor: float = Field(default=1e-3, ge=0)
    """Rows of the momentum below this part of the mean row norm are left alone."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: PositiveFloat = 1e-20
    schedule: ScheduleConfig = ScheduleConfig()


class CheckpointConfig(Settings):
    """When state is written so that a killed run goes on exactly where it was."""

    every: int = Field(default=1, ge=1)
    """Steps between checkpoints. The last step always writes one."""
    keep: int = Field(default=2, ge=1)
    """Older ones are deleted."""
