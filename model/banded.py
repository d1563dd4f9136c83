"""`model.attention.attend` for CPUs: block by block, heads folded into rows, only latents that a block sees.

One product of [heads * queries, D] with [D, keys] for each block of queries and few rows at a time, so that
scores stay in cache; the backward pass computes them again. Gradients are written out below: with
P = softmax weights, O the output and s the sink's weight,
dS = P * (dO K' - rowsum(dO * O)), dsink = -sum(s * rowsum(dO * O)).
The reference is `attend`; tests hold both together.

Axes: B rows, N blocks, H heads, Q queries of a block, D channels, S keys, M latents.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS_AT_ONCE = 4
HIDDEN = -1e30
"""Added to the score of a key that must not be seen."""
NOTHING = -50.0
"""exp of it, 2e-22, is nothing beside a sum of 1 or more; exp is slow at infinity and for subnormals."""


def _weights(scores: Tensor) -> Tensor:
    """exp in place, and exactly zero where it is nothing: small numbers times small gradients are subnormal,
    over which processors take a hundred times longer, and a hidden key must get no gradient at all."""
    return torch.threshold_(scores.clamp_min_(NOTHING).exp_(), 1e-21, 0.0)


class _Banded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BNHQD: Tensor,
        keys_BSD: Tensor,
        latents_BMD: Tensor,
        mask_BNQS: Tensor,
        seen_BNQM: Tensor,
        sink_H: Tensor,
    ) -> Tensor:
        B, N, H, Q, D = q_BNHQD.shape
        out_BNHQD = torch.empty_like(q_BNHQD)
        logsum_BNHQ = q_BNHQD.new_empty(B, N, H, Q)
        spans = _spans(seen_BNQM)
        sink = sink_H.view(1, H, 1)
        for rows, n, keys, hidden in _blocks(keys_BSD, latents_BMD, mask_BNQS, seen_BNQM, spans):
            q = q_BNHQD[rows, n].flatten(1, 2)
            scores = torch.bmm(q, keys.mT).view(-1, H, Q, keys.shape[1]).add_(hidden)
            top = torch.maximum(scores.amax(-1), sink)
            weights = _weights(scores.sub_(top.unsqueeze(-1)))
            total = weights.sum(-1) + (sink - top).exp()
            out = torch.bmm(weights.view(len(q), H * Q, -1), keys).view(-1, H, Q, D)
            out_BNHQD[rows, n] = out.div_(total.unsqueeze(-1))
            logsum_BNHQ[rows, n] = total.log_().add_(top)
        ctx.save_for_backward(
            q_BNHQD, keys_BSD, latents_BMD, mask_BNQS, seen_BNQM, sink_H, out_BNHQD, logsum_BNHQ
        )
        ctx.spans = spans
        return out_BNHQD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BNHQD, keys_BSD, latents_BMD, mask_BNQS, seen_BNQM, sink_H, out_BNHQD, logsum_BNHQ = (
            ctx.saved_tensors
        )
        (grad_BNHQD,) = grads
        _, _, H, Q, _ = q_BNHQD.shape
        dots_BNHQ = (grad_BNHQD * out_BNHQD).sum(-1)
        d_q, d_keys, d_latents = (torch.zeros_like(x) for x in (q_BNHQD, keys_BSD, latents_BMD))
        for rows, n, keys, hidden in _blocks(keys_BSD, latents_BMD, mask_BNQS, seen_BNQM, ctx.spans):
            q, grad = q_BNHQD[rows, n].flatten(1, 2), grad_BNHQD[rows, n].flatten(1, 2)
            weights = torch.bmm(q, keys.mT).view(-1, H, Q, keys.shape[1]).add_(hidden)
            weights = _weights(weights.sub_(logsum_BNHQ[rows, n].unsqueeze(-1))).view(len(q), H * Q, -1)
            d_scores = torch.bmm(grad, keys.mT).sub_(dots_BNHQ[rows, n].view(len(q), -1, 1)).mul_(weights)
            d_q[rows, n] = torch.bmm(d_scores, keys).view_as(d_q[rows, n])
            d_kv = torch.bmm(d_scores.mT, q).baddbmm_(weights.mT, grad)
            low, high = ctx.spans[n]
            window = mask_BNQS.shape[3]
            d_keys[rows, n * Q : n * Q + window] += d_kv[:, :window]
            d_latents[rows, low:high] += d_kv[:, window:]
        sink_weight = (sink_H.view(1, 1, H, 1) - logsum_BNHQ).exp_()
        d_sink = -(sink_weight * dots_BNHQ).sum((0, 1, 3))
        return d_q, d_keys, d_latents, None, None, d_sink


def _spans(seen_BNQM: Tensor) -> list[tuple[int, int]]:
    """First and last+1 latent that any query of each block sees."""
    any_NM = seen_BNQM.any(2).any(0)
    spans = []
    for row in any_NM:
        found = row.nonzero()
        spans.append((int(found[0]), int(found[-1]) + 1) if len(found) else (0, 0))
    return spans


def _blocks(
    keys_BSD: Tensor,
    latents_BMD: Tensor,
    mask_BNQS: Tensor,
    seen_BNQM: Tensor,
    spans: list[tuple[int, int]],
) -> Any:
    """(rows, block, its keys and values [b, S, D], their bias [b, 1, Q, S])."""
    _, N, Q, window = mask_BNQS.shape
    for n in range(N):
        low, high = spans[n]
        for at in range(0, len(keys_BSD), ROWS_AT_ONCE):
            rows = slice(at, at + ROWS_AT_ONCE)
            keys = torch.cat((keys_BSD[rows, n * Q : n * Q + window], latents_BMD[rows, low:high]), 1)
            mask = torch.cat((mask_BNQS[rows, n], seen_BNQM[rows, n, :, low:high]), 2)
            yield rows, n, keys, torch.where(mask, 0.0, HIDDEN).unsqueeze(1)


def attend_banded(
    q_BNHQD: Tensor,
    keys_BSD: Tensor,
    latents_BMD: Tensor,
    mask_BNQS: Tensor,
    seen_BNQM: Tensor,
    sink_H: Tensor,
) -> Tensor:
    """Sliding-window attention with selected latents and sink, in one softmax: [B, N, H, Q, D].

    Args:
        q_BNHQD: queries in blocks, already divided by sqrt(D).
        keys_BSD: window keys; block n sees columns n*Q .. n*Q+S-1, S the last axis of the mask.
        latents_BMD: the memory; M may be 0.
        mask_BNQS: which of its span each query sees.
        seen_BNQM: which latents.
        sink_H: logits that take part in the denominator alone.
    """
    result = _Banded.apply(q_BNHQD, keys_BSD, latents_BMD, mask_BNQS, seen_BNQM, sink_H)
    assert isinstance(result, Tensor)
    return result
