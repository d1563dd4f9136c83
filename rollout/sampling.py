"""From logits to tokens, with the probability of the distribution that was really drawn from.

A token's random number comes from (seed, position), not from a generator with a state: the same request
draws the same numbers in whatever batch it runs and wherever it was interrupted. The token is found by
inverting the cumulative distribution, so two computations of the same logits that differ in their last
bits choose differently only when the number falls into the gap between them, as narrow as their rounding.

Axes: N rows (one a session), V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draw:
    """One sampled id; `logprob` is None where the logits were not finite and nothing could be drawn."""

    id: int
    logprob: float | None
    kept: tuple[int, ...] | None = None


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of its arguments."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def processed_logprobs(logits_NV: Tensor, temperature: float, top_p: float) -> Tensor:
    """Log-probabilities [N, V] (float32) after temperature and top-p; -inf for what top-p cut.

    The kept set is the smallest one of likeliest tokens whose probability reaches `top_p` (Holtzman et
    al. 2020), the token that crosses the line included; its probabilities are renormalised.
    """
    assert temperature > 0
    logprobs_NV = torch.log_softmax(logits_NV.float() / temperature, dim=-1)
    if top_p >= 1:
        return logprobs_NV
    sorted_NV, order_NV = logprobs_NV.sort(dim=-1, descending=True, stable=True)
    before_NV = sorted_NV.exp().cumsum(dim=-1) - sorted_NV.exp()
    cut_NV = torch.zeros_like(before_NV, dtype=torch.bool).scatter(-1, order_NV, before_NV >= top_p)
    return torch.log_softmax(logprobs_NV.masked_fill(cut_NV, float("-inf")), dim=-1)


def draw(
    logits_NV: Tensor,
    temperatures: Sequence[float],
    top_ps: Sequence[float],
    uniforms: Sequence[float],
) -> list[Draw]:
    """One token a row, each row with its own temperature, top-p and random number."""
    finite_N = torch.isfinite(logits_NV).all(dim=-1).tolist()
    draws = [Draw(id=-1, logprob=None)] * len(finite_N)
    rows_by_setting: dict[tuple[float, float], list[int]] = {}
    for row, setting in enumerate(zip(temperatures, top_ps, strict=True)):
        if finite_N[row]:
            rows_by_setting.setdefault(setting, []).append(row)
    for (temperature, top_p), rows in rows_by_setting.items():
        chosen = logits_NV[rows]
        if temperature == 0:
            for row, best in zip(rows, chosen.argmax(dim=-1).tolist(), strict=True):
                draws[row] = Draw(id=best, logprob=0.0)
            continue
        logprobs = processed_logprobs(chosen, temperature, top_p)
        for i, row in enumerate(rows):
            draws[row] = _invert(logprobs[i], uniforms[row], truncated=top_p < 1)
    return draws


def _invert(logprobs_V: Tensor, number: float, *, truncated: bool) -> Draw:
    """The first id at which the cumulative probability passes `number`."""
    cumulative_V = logprobs_V.double().exp().cumsum(dim=-1)
    target = number * float(cumulative_V[-1])
    index = int(torch.searchsorted(cumulative_V, torch.tensor(target, dtype=torch.float64), right=True))
    possible_V = torch.isfinite(logprobs_V)
    if index >= len(cumulative_V) or not possible_V[index]:
        index = int(possible_V.nonzero()[-1])
    kept = None
    if truncated and not bool(possible_V.all()):
        kept = tuple(possible_V.nonzero().flatten().tolist())
    return Draw(id=index, logprob=float(logprobs_V[index]), kept=kept)
