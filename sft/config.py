"""Settings of supervised fine-tuning. Imports no torch."""

from __future__ import annotations

from pydantic import Field

from model.train_config import CheckpointConfig, OptimizerConfig, ScheduleConfig, Settings


class SftConfig(Settings):
    """One supervised run; `sft.train` reads it."""

    policy: str = "flash-nano"
    """What to start from: a built-in network, a folder, or `hf:PATH`."""
    steps: int = Field(default=200, ge=1)
    """Optimizer steps at most."""
    max_seconds: float | None = Field(default=None, gt=0)
    """Training time at most, over all restarts; whichever of the two ends first. With it, the number of steps
    depends on the machine: leave it out where runs must repeat exactly."""
    batch_samples: int = Field(default=32, ge=1)
    """Samples of one optimizer step."""
    micro_tokens: int = Field(default=8192, ge=1)
    """Tokens, padding included, computed at one time; changes memory and speed, not the gradient."""
    max_tokens: int = Field(default=1024, ge=2)
    """Longer samples are left out and counted."""
    eval_every: int = Field(default=20, ge=1)
    """Steps between losses on the dev samples, when there are any."""
    seed: int = 0
    """Of the order of samples."""
    optimizer: OptimizerConfig = OptimizerConfig(
        kind="adamw",
        lr=2e-3,
        weight_decay=0.01,
        schedule=ScheduleConfig(warmup=5, decay_from=0, decay_to=200),
    )
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient."""
    bias_speed: float = Field(default=0.001, ge=0)
    """Step of the experts' balancing biases after each update."""
    checkpoint: CheckpointConfig = CheckpointConfig(every=10)
