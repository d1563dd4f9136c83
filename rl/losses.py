"""The policy-gradient loss: token-level, off-policy corrected, with one denominator for the whole step.

Tensors are flat over the N loss-bearing tokens of a micro-batch; nothing here knows of rows, padding or
packing, which is how a loss becomes invariant to them. Natural logarithms throughout.

    now_N      log pi(token) under the weights being trained (gradient)
    old_N      log pi(token) under the weights at the start of the step (constant)
    rollout_N  log mu(token) as the engine recorded it when it sampled
    A_N        advantage, the same for all tokens of a sample

The correction has two factors: w = min(exp(old - rollout), C), truncated importance sampling between
trainer and rollout (stale weights, different kernels; IMPALA, arXiv 1802.01561), and r = exp(now - old),
which is 1 with one update a batch. `anchor = "rollout"` merges them: r = exp(now - rollout), w = 1, so
that the clip range itself bounds staleness (AReaL calls the split form decoupled PPO).

    pg      -sg(w r) A now                                REINFORCE with truncated weights (w r is cut at C)
    ppo     -w min(r A, clip(r, 1 - lo, 1 + hi) A)        hi > lo: DAPO's clip-higher, arXiv 2503.14476
    cispo   -w sg(min(r, cap)) A now                      arXiv 2506.13585; the cap is absolute, not 1 + eps

Tokens that are too stale are masked. The denominator counts them all the same, so that masking some does
not make the others louder.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl.config import LossConfig

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut here before exp, so that one broken token cannot make an infinity."""


@dataclass(frozen=True)
class TokenData:
    """What the loss needs to know of N sampled tokens, besides the trainer's own log-probabilities."""

    rollout_N: Tensor
    advantage_N: Tensor
    staleness_N: Tensor
    """Publications between the token's version and the trainer's, int64."""
    bears_N: Tensor
    """bool; False masks a token from the loss (too stale) without making the others louder."""
    same_N: Tensor
    """bool; the trainer's very weights sampled the token and wrote all key-values that it read."""


def denominator(config: LossConfig, loss_tokens: int, samples: int) -> float:
    """D of the whole optimizer step: loss-bearing tokens, or a constant per sample.

    The token count gives long samples, hence high efforts, more weight in a step; the constant does not.
    """
    if config.denominator == "tokens":
        return float(max(1, loss_tokens))
    return float(max(1, samples)) * config.tokens_per_sample


def policy_loss(config: LossConfig, now_N: Tensor, old_N: Tensor, data: TokenData) -> Tensor:
    """Sum over tokens of the loss; add it over micro-batches and divide by the step's `denominator`.

    Args:
        now_N: log-probabilities with gradient.
        old_N: the same under the weights at the start of the step; `now_N.detach()` when there is one update.
    """
    old_N = old_N.detach()
    advantage_N = data.advantage_N.to(now_N.dtype) * data.bears_N
    if config.anchor == "rollout":
        ratio_N = _ratio(now_N, data.rollout_N)
        weight_N = torch.ones_like(ratio_N)
    else:
        ratio_N = _ratio(now_N, old_N)
        weight_N = _ratio(old_N, data.rollout_N).clamp(max=config.tis_cap)
    if config.kind == "pg":
        coefficient_N = (weight_N * ratio_N).detach().clamp(max=config.tis_cap)
        loss_N = -coefficient_N * advantage_N * now_N
    elif config.kind == "ppo":
        clipped_N = ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
        loss_N = -weight_N * torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)
    else:
        loss_N = -weight_N * ratio_N.detach().clamp(max=config.cispo_cap) * advantage_N * now_N
    # Masked and zero-advantage tokens: exactly no gradient, whatever the ratio did.
    loss_N = torch.where(advantage_N != 0, loss_N, torch.zeros_like(loss_N))
    return loss_N.sum()


def _ratio(upper_N: Tensor, lower_N: Tensor) -> Tensor:
    return (upper_N - lower_N.to(upper_N.dtype)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@dataclass
class TokenStats:
    """Sums over the tokens of a step, from which the metrics are formed. Add micro-batches with `update`."""

    tokens: int = 0
    masked_tokens: int = 0
    off_policy_tokens: int = 0
    max_staleness: int = 0
    ratio_sum: float = 0.0
    ratio_square_sum: float = 0.0
    ratio_max: float = 0.0
    clipped: int = 0
    kl_sum: float = 0.0
    entropy_sum: float = 0.0
    same_tokens: int = 0
    mismatch_sum: float = 0.0
    mismatch_max: float = 0.0

    @torch.no_grad()
    def update(self, config: LossConfig, now_N: Tensor, entropy_N: Tensor, data: TokenData) -> None:
        if now_N.numel() == 0:
            return
        now_N, rollout_N = now_N.double(), data.rollout_N.double()
        ratio_N = _ratio(now_N, rollout_N)
        staleness_N = data.staleness_N * data.bears_N  # masked tokens have left the batch
        self.tokens += now_N.numel()
        self.masked_tokens += int((~data.bears_N).sum())
        self.off_policy_tokens += int((staleness_N >= 1).sum())
        self.max_staleness = max(self.max_staleness, int(staleness_N.max()))
        self.ratio_sum += float(ratio_N.sum())
        self.ratio_square_sum += float(ratio_N.square().sum())
        self.ratio_max = max(self.ratio_max, float(ratio_N.max()))
        outside_N = (ratio_N > 1 + config.clip_high) | (ratio_N < 1 - config.clip_low)
        self.clipped += int(outside_N.sum())
        # k3 of KL(mu || pi): exp(d) - 1 - d with d = now - rollout; never negative.
        self.kl_sum += float((ratio_N - 1 - ratio_N.log()).sum())
        self.entropy_sum += float(entropy_N.double().sum())
        if bool(data.same_N.any()):
            gap_N = (now_N - rollout_N)[data.same_N].abs()
            self.same_tokens += int(data.same_N.sum())
            self.mismatch_sum += float(gap_N.sum())
            self.mismatch_max = max(self.mismatch_max, float(gap_N.max()))

    def metrics(self) -> dict[str, float]:
        """Means over tokens. `ess`, (sum w)^2 / (n sum w^2), is the effective share: 1 when on-policy."""
        n = max(1, self.tokens)
        square = self.ratio_square_sum
        return {
            "loss_tokens": float(self.tokens),
            "masked_ratio": self.masked_tokens / n,
            "off_policy_ratio": self.off_policy_tokens / n,
            "max_staleness": float(self.max_staleness),
            "ratio_mean": self.ratio_sum / n,
            "ratio_max": self.ratio_max,
            "ess": self.ratio_sum**2 / (n * square) if square > 0 else 0.0,
            "clip_fraction": self.clipped / n,
            "kl": self.kl_sum / n,
            "entropy": self.entropy_sum / n,
            "same_tokens": float(self.same_tokens),
            "mismatch_mean": self.mismatch_sum / max(1, self.same_tokens),
            "mismatch_max": self.mismatch_max,
        }
