"""Settings that all trainers share. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class OptimizerConfig(Settings):
    """AdamW (Loshchilov and Hutter 2019) with warm-up, decay and a bound on the gradient's norm."""

    lr: float = Field(1e-3, ge=0)
    """Peak learning rate; 0 changes no weight, which makes a canary."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled; matrices only, not norms and biases."""
    clip_norm: float = Field(1.0, gt=0)
    """Global gradient norm is scaled down to this."""
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay over the run's progress, be that steps or seconds."""
    final_fraction: float = Field(0.1, ge=0, le=1)
    """Share of the peak that is left at the end of a decay."""
    max_skipped: int = Field(5, ge=1)
    """So many consecutive steps with gradients that are not finite end the run with an error."""


class CheckpointConfig(Settings):
    """When state is written so that a killed run goes on exactly where it was."""

    every: int = Field(1, ge=1)
    """Optimizer steps between checkpoints. The last step always writes one."""
    keep: int = Field(2, ge=1)
    """Older ones are deleted."""
