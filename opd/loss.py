"""Exact reverse KL over the whole vocabulary, from hidden states, without keeping any logits.

    L = sum_n w_n KL_n        KL_n = sum_v p_s(v) (log p_s(v) - log p_t(v))
    dL/ds_v = w_n p_s(v) (log p_s(v) - log p_t(v) - KL_n)        s: the student's logits

Student and teacher meet only through the two heads, so a teacher may have any width; the vocabulary must
be the same. Tokens are worked through in chunks; a chunk holds two [C, V] float32 buffers, and the
gradients are formed in the forward pass in the same buffers: four matrix products a token (student
logits, teacher logits, dH, dW) where recomputing in backward takes six. Weights go into the
gradient before those products; the denominator of the whole step arrives as the upstream gradient and
scales the results in place, so that one call is right for a micro-batch of a larger batch. What is left
out: temperature, top-k approximations, sampled-token estimates (high variance; the report rejected them).

Axes: N tokens, C tokens of a chunk, V vocabulary, D width of the student, E width of the teacher.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_TOKENS = 1024


class _ReverseKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        teacher_NE: Tensor,
        teacher_head_VE: Tensor,
        weight_N: Tensor,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        work = torch.promote_types(hidden_ND.dtype, torch.float32)
        tokens, vocab = hidden_ND.shape[0], head_VD.shape[0]
        kl_N = hidden_ND.new_zeros(tokens, dtype=work)
        need_hidden, need_head = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        grad_ND = torch.empty_like(hidden_ND) if need_hidden else None
        grad_VD = torch.zeros(head_VD.shape, dtype=work, device=head_VD.device) if need_head else None
        size = min(chunk, tokens)
        student_CV = hidden_ND.new_empty((size, vocab), dtype=work)
        teacher_CV = hidden_ND.new_empty((size, vocab), dtype=work)
        for low in range(0, tokens, chunk):
            part = slice(low, min(low + chunk, tokens))
            count = part.stop - part.start
            p_CV = _log_softmax(hidden_ND[part], head_VD, student_CV[:count])
            d_CV = _log_softmax(teacher_NE[part], teacher_head_VE, teacher_CV[:count])
            torch.sub(p_CV, d_CV, out=d_CV)  # log p_s - log p_t
            p_CV.exp_()
            kl_C = torch.linalg.vecdot(p_CV, d_CV)
            kl_N[part] = kl_C
            if not (need_hidden or need_head):
                continue
            d_CV.sub_(kl_C.unsqueeze(1)).mul_(p_CV).mul_(weight_N[part].to(work).unsqueeze(1))
            gradient_CV = d_CV.to(head_VD.dtype)
            if grad_ND is not None:
                torch.mm(gradient_CV, head_VD, out=grad_ND[part])
            if grad_VD is not None:
                grad_VD += (gradient_CV.T @ hidden_ND[part]).to(work)
        ctx.grads = (grad_ND, None if grad_VD is None else grad_VD.to(head_VD.dtype))
        ctx.mark_non_differentiable(kl_N)
        return (kl_N * weight_N.to(work)).sum(), kl_N

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("the gradients of reverse_kl were handed out already; call it again")
        grad_ND, grad_VD = ctx.grads
        ctx.grads = None
        scale = upstream[0]
        if grad_ND is not None:
            grad_ND.mul_(scale.to(grad_ND.dtype))
        if grad_VD is not None:
            grad_VD.mul_(scale.to(grad_VD.dtype))
        return grad_ND, grad_VD, None, None, None, None


def _log_softmax(hidden_CX: Tensor, head_VX: Tensor, out_CV: Tensor) -> Tensor:
    """log softmax(hidden @ head.T) in `out_CV`, accumulated in its dtype (float32, or float64 in tests)."""
    if hidden_CX.dtype == out_CV.dtype == head_VX.dtype:
        torch.mm(hidden_CX, head_VX.T, out=out_CV)
    elif hidden_CX.is_cuda and hidden_CX.dtype == head_VX.dtype:
        # Half-precision inputs with float32 results: rounding the logits would cost a factor of ten in
        # accuracy.
        torch.mm(hidden_CX, head_VX.T, out_dtype=out_CV.dtype, out=out_CV)
    else:
        torch.mm(hidden_CX.to(out_CV.dtype), head_VX.T.to(out_CV.dtype), out=out_CV)
    out_CV.sub_(torch.logsumexp(out_CV, dim=1, keepdim=True))
    return out_CV


def reverse_kl(
    hidden_ND: Tensor,
    head_VD: Tensor,
    teacher_NE: Tensor,
    teacher_head_VE: Tensor,
    weight_N: Tensor,
    *,
    chunk: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of exact reverse KLs, and the KL of each token.

    Args:
        hidden_ND: student's final hidden states at the loss-bearing positions; gets a gradient.
        head_VD: student's head; gets a gradient unless it is frozen (then three products instead of four).
        teacher_NE: the teacher's final hidden states at the same positions.
        teacher_head_VE: the teacher's head over the same vocabulary.
        weight_N: w_i of the teacher, per token; 0 excludes a token.
        chunk: tokens whose logits exist at one time; memory is 2 * chunk * V * 4 bytes.

    Returns:
        The sum (a scalar, nats) and kl_N (nats, without gradient, for the metrics). Backward
        may be called once: it hands out the gradients that forward computed.

    Raises:
        ValueError: shapes that do not belong together, among them vocabularies of different size.
    """
    if head_VD.shape[0] != teacher_head_VE.shape[0]:
        raise ValueError(
            f"vocabularies differ (student {head_VD.shape[0]} tokens, teacher {teacher_head_VE.shape[0]}): "
            "full-vocabulary distillation needs one tokenizer; cut padded rows off the larger head"
        )
    if not (hidden_ND.shape[0] == teacher_NE.shape[0] == weight_N.shape[0]):
        raise ValueError(
            f"tokens differ: student {hidden_ND.shape[0]}, teacher {teacher_NE.shape[0]}, "
            f"weights {weight_N.shape[0]}"
        )
    if chunk <= 0:
        raise ValueError(f"chunk must be positive, got {chunk}")
    if hidden_ND.shape[0] == 0:
        return (hidden_ND.sum() + 0.0 * head_VD.sum()), hidden_ND.new_zeros(0)
    return _ReverseKL.apply(hidden_ND, head_VD, teacher_NE, teacher_head_VE, weight_N, chunk)  # type: ignore[return-value]
