"""Settings of reinforcement learning. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from model.train_config import CheckpointConfig, OptimizerConfig, Settings


class EffortConfig(Settings):
    """Efforts that prompts ask for, and what reasoning costs at each. Open in the reports; see
    `rl.effort`."""

    efforts: tuple[int, ...] = (50, 75, 100)
    """B: efforts that each prompt is sampled at (the tiers low, high and max)."""
    k0: float = Field(default=0.1, ge=0)
    """Reward lost per `length_norm` tokens at the smallest effort; 0 turns the penalty off."""
    spread: float = Field(default=1.0, gt=0)
    """lambda: tau = lambda * mean spacing of `efforts`."""
    cap: float = Field(default=0.5, gt=0)
    """C_max: no sample loses more than this."""
    length_norm: float = Field(default=1024.0, gt=0)
    """L_norm, in reasoning tokens."""
    only_success: bool = False
    """Charge successful samples only. The report charges all; then, in a mixed subgroup, a short failure is
    preferred to a long one."""

    @model_validator(mode="after")
    def _efforts_are_usable(self) -> EffortConfig:
        if not self.efforts or len(set(self.efforts)) != len(self.efforts):
            raise ValueError(f"efforts must be distinct and at least one, got {self.efforts}")
        if min(self.efforts) < 1 or max(self.efforts) > 100:
            raise ValueError(f"efforts lie in 1..100, got {self.efforts}")
        return self

    @property
    def tau(self) -> float:
        """Points of effort over which the price falls by e."""
        if len(self.efforts) == 1:
            return self.spread
        return self.spread * (max(self.efforts) - min(self.efforts)) / (len(self.efforts) - 1)


class LossConfig(Settings):
    """The policy-gradient loss; formulas in `rl.losses`."""

    kind: Literal["pg", "ppo", "cispo"] = "ppo"
    """pg: truncated importance weights alone. ppo: clipped ratio. cispo: capped weights, no token dropped."""
    anchor: Literal["start", "rollout"] = "rollout"
    """What the ratio is taken against: the weights at the start of the step (then truncated importance
    sampling corrects the rest), or the rollout's log-probabilities themselves."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    clip_high: float = Field(default=0.28, ge=0)
    """Larger than `clip_low`: DAPO's clip-higher."""
    tis_cap: float = Field(default=2.0, gt=0)
    """C of the truncated importance weight."""
    cispo_cap: float = Field(default=5.0, gt=0)
    """Absolute ceiling of CISPO's weight."""
    denominator: Literal["tokens", "constant"] = "tokens"
    """tokens: loss-bearing tokens of the step. constant: samples times `tokens_per_sample`, which gives all
    efforts the same weight."""
    tokens_per_sample: float = Field(default=32.0, gt=0)


class RlConfig(Settings):
    """One reinforcement-learning run; `rl.train` reads it. How samples are dispatched is the service's
    business."""

    policy: str = "flash-nano"
    """What to start from: a built-in network, a folder, or `hf:PATH`."""
    steps: int = Field(default=20, ge=1)
    """Batches of samples, each followed by a publication of weights."""
    max_seconds: float | None = Field(default=None, gt=0)
    """Time at most, over all restarts; whichever of the two ends first."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimizer steps on one batch: its samples are split so often, by group."""
    micro_tokens: int = Field(default=8192, ge=1)
    """Tokens, padding included, computed at one time; changes memory and speed, not the gradient."""
    failed_at: float = 0.0
    """A task reward of at most this is a failure: a subgroup of failures alone is dropped."""
    call_tokens: dict[str, float] = {}
    """Reasoning tokens that each call of a tool counts as, by name: what the effort prices beside tokens."""
    mismatch_alarm: float = Field(default=1e-3, gt=0)
    """Nats. Where trainer and engine hold the same weights, a larger gap between their log-
    probabilities of one token raises an alarm: one of the two computes another network."""
    mismatch_fatal: bool = False
    """End the run on that alarm."""
    seed: int = 0
    effort: EffortConfig = EffortConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig(kind="adamw", lr=3e-4, weight_decay=0.0)
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient."""
    bias_speed: float = Field(default=0.0, ge=0)
    """Step of the experts' balancing biases after each update. 0: moving them changes routing
    without any gradient asking for it."""
    checkpoint: CheckpointConfig = CheckpointConfig(every=1)
