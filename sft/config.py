"""Settings of supervised fine-tuning. Imports no torch."""

from __future__ import annotations

from pydantic import Field

from model.train_config import CheckpointConfig, OptimizerConfig, ScheduleConfig, Settings


class SftConfig(Settings):
    """One supervised run; `sft.train` reads it."""

    policy: str = "flash-nano"
    """What to start from: a built-in network, a folder, or `hf:PATH`."""
    steps: int = Field(200, ge=1)
    """Optimizer steps at most."""
    max_seconds: float | None = Field(None, gt=0)
    """Training time at most, over all restarts; whichever of the two ends first. With it, the number of steps
    depends on the machine: leave it out where runs must repeat exactly."""
    batch_samples: int = Field(32, ge=1)
    """Samples of one optimizer step."""
    micro_tokens: int = Field(8192, ge=1)
    """Tokens, padding included, computed at one time; changes memory and speed, not the gradient."""
    max_tokens: int = Field(1024, ge=2)
    """Longer samples are left out and counted."""
    eval_every: int = Field(20, ge=1)
    """Steps between losses on the dev samples, when there are any."""
    seed: int = 0
    """Of the order of samples."""
    optimizer: OptimizerConfig = OptimizerConfig(
        kind="adamw",
        lr=2e-3,
        weight_decay=0.01,
        schedule=ScheduleConfig(warmup=5, decay_from=0, decay_to=200),
    )
    clip_norm: float = Field(1.0, gt=0)
    """Largest norm of the gradient."""
    checkpoint: CheckpointConfig = CheckpointConfig(every=10)
