"""Settings of on-policy distillation. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from model.train_config import CheckpointConfig, OptimizerConfig, Settings


class TeacherConfig(Settings):
    """One teacher: a policy of any width over the student's vocabulary."""

    name: str
    policy: str
    """A built-in network, a folder, or `hf:PATH`."""
    domains: tuple[str, ...] = ()
    """Samples of these domains learn from it; empty: of every domain."""
    weight: float = Field(default=1.0, gt=0)
    """w_i, relative to the other teachers of the same sample: their weights are scaled to sum to 1."""


class OpdConfig(Settings):
    """One distillation run; `opd.train` reads it."""

    policy: str = "flash-nano"
    """The student: a built-in network, a folder, or `hf:PATH`."""
    teachers: tuple[TeacherConfig, ...] = Field(min_length=1)
    steps: int = Field(default=20, ge=1)
    """Batches of samples, each followed by a publication of weights."""
    max_seconds: float | None = Field(default=None, gt=0)
    """Time at most, over all restarts; whichever of the two ends first."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimizer steps on one batch: its samples are split so often."""
    micro_tokens: int = Field(default=8192, ge=1)
    """Tokens, padding included, computed at one time; changes memory and speed, not the gradient."""
    chunk_tokens: int = Field(default=1024, ge=1)
    """Loss-bearing tokens whose logits exist at one time."""
    cache_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of cached hidden states."""
    cache_max_mb: int = Field(default=2048, ge=1)
    """The oldest cached states beyond this are deleted."""
    seed: int = 0
    optimizer: OptimizerConfig = OptimizerConfig(kind="adamw", lr=5e-4, weight_decay=0.0)
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient."""
    bias_speed: float = Field(default=0.0, ge=0)
    """Step of the experts' balancing biases after each update. 0: moving them changes routing
    without any gradient asking for it."""
    checkpoint: CheckpointConfig = CheckpointConfig(every=1)

    @model_validator(mode="after")
    def _names_differ(self) -> OpdConfig:
        names = [teacher.name for teacher in self.teachers]
        if len(set(names)) != len(names):
            raise ValueError(f"teachers need different names, got {names}")
        return self
