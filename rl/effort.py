"""Price of thinking: the exponential length penalty of the effort-conditioned RL.

    r_len = -min(C_max, k(b) * l / L_norm)
    k(b) = k0 * exp(-(b - b_min) / tau)        tau = lambda * mean spacing of B

`b` is the effort that the system prompt asked for, `l` the tokens that the sample spent on reasoning (for the
repair-choice agent: what its tries cost). Source: DeepSeek-V4.1-Flash report, reinforcement learning with
effort; k0, lambda, C_max and L_norm are open there, so they are settings here.

Pure functions, no torch. How success is found (`r_task`) and how rewards become advantages is in
`rl.advantages`.
"""

from __future__ import annotations

import math

from rl.config import EffortConfig


def coefficient(config: EffortConfig, effort: int) -> float:
    """k(b): reward lost per `length_norm` tokens at this effort; falls by e every tau points of effort."""
    return config.k0 * math.exp(-(effort - min(config.efforts)) / config.tau)


def length_reward(config: EffortConfig, effort: int | None, length: float, *, success: bool = True) -> float:
    """r_len in [-cap, 0] of a sample that spent `length` tokens.

    Samples without an effort (a run that does not condition on it) are not charged. With
    `only_success` a failed sample is not charged either: among failures a short one is not better.
    """
    if effort is None or config.k0 == 0.0 or (config.only_success and not success):
        return 0.0
    return -min(config.cap, coefficient(config, effort) * length / config.length_norm)


def preferred_length(config: EffortConfig, effort: int, *, gain: float, scale: float) -> float:
    """Length l*(b) at which more tokens stop paying if success rises as p'(l) = gain * exp(-l / scale).

    l*(b) = s log(a L_norm) - s log k0 + (s / tau)(b - b_min): affine in the effort with slope s / tau,
    as long as the penalty is neither capped nor gated on success. A prediction to test, not a promise.

    Args:
        gain: a, success probability per token at length 0.
        scale: s, tokens after which the return on thinking has fallen by e.
    """
    spread = effort - min(config.efforts)
    return scale * math.log(gain * config.length_norm / config.k0) + scale / config.tau * spread
