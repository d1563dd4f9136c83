"""The chunked reverse KL against naive autograd in float64."""

import pytest
import torch

from opd.loss import reverse_kl


def problem(n=37, vocab=101, width=24, teacher=40, dtype=torch.float64, seed=0):
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=rng, dtype=torch.float64)).to(dtype)

    hidden = normal(n, width).requires_grad_()
    head = normal(vocab, width, scale=0.4).requires_grad_()
    weight = torch.rand(n, generator=rng, dtype=torch.float64).to(dtype)
    return hidden, head, normal(n, teacher), normal(vocab, teacher, scale=0.3), weight


def naive(hidden, head, teacher, teacher_head, weight, denominator):
    """float64 autograd over full logits; returns the loss, the KLs and both gradients."""
    hidden = hidden.detach().double().requires_grad_()
    head = head.detach().double().requires_grad_()
    log_s = torch.log_softmax(hidden @ head.T, -1)
    log_t = torch.log_softmax(teacher.double() @ teacher_head.double().T, -1)
    kl = (log_s.exp() * (log_s - log_t)).sum(-1)
    loss = (kl * weight.double()).sum() / denominator
    loss.backward()
    return loss.detach(), kl.detach(), hidden.grad, head.grad


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
@pytest.mark.parametrize("teacher", [8, 24, 40])
def test_equals_naive_autograd_in_float64(chunk, teacher):
    hidden, head, t_hidden, t_head, weight = problem(teacher=teacher)
    loss, kl = reverse_kl(hidden, head, t_hidden, t_head, weight, chunk=chunk)
    loss.backward()
    want_loss, want_kl, want_hidden, want_head = naive(hidden, head, t_hidden, t_head, weight, 1.0)
    assert torch.allclose(loss, want_loss, rtol=1e-13)
    assert torch.allclose(kl, want_kl, rtol=1e-12)
    assert torch.allclose(hidden.grad, want_hidden, rtol=1e-11, atol=1e-15)
    assert torch.allclose(head.grad, want_head, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_lower_precision_stays_close(dtype, bound):
    hidden, head, t_hidden, t_head, weight = problem(n=64, vocab=500, dtype=dtype)
    loss, _ = reverse_kl(hidden, head, t_hidden, t_head, weight, chunk=16)
    loss.backward()
    _, _, want_hidden, want_head = naive(hidden, head, t_hidden, t_head, weight, 1.0)
    for got, want in ((hidden.grad, want_hidden), (head.grad, want_head)):
        assert float((got.double() - want).norm() / want.norm()) < bound


def test_upstream_gradient_is_applied():
    hidden, head, *rest = problem()
    loss, _ = reverse_kl(hidden, head, *rest)
    (loss / 3.0).backward()
    _, _, want_hidden, want_head = naive(hidden, head, *rest, 3.0)
    assert torch.allclose(hidden.grad, want_hidden)
    assert torch.allclose(head.grad, want_head)


def test_micro_batches_and_order_add_up_to_the_whole():
    hidden, head, t_hidden, t_head, weight = problem()
    loss, _ = reverse_kl(hidden, head, t_hidden, t_head, weight)
    loss.backward()
    whole_hidden, whole_head = hidden.grad.clone(), head.grad.clone()
    hidden.grad = head.grad = None
    order = torch.randperm(37, generator=torch.Generator().manual_seed(1))
    for part in order.split(10):
        loss, _ = reverse_kl(hidden[part], head, t_hidden[part], t_head, weight[part])
        loss.backward()
    assert torch.allclose(hidden.grad, whole_hidden)
    assert torch.allclose(head.grad, whole_head)


def test_a_weight_of_zero_contributes_exactly_nothing():
    hidden, head, t_hidden, t_head, weight = problem()
    weight[5] = 0.0
    loss, _ = reverse_kl(hidden, head, t_hidden, t_head, weight)
    loss.backward()
    assert torch.equal(hidden.grad[5], torch.zeros_like(hidden.grad[5]))


def test_identical_networks_have_no_divergence_and_no_gradient():
    hidden, head, *_ = problem()
    loss, kl = reverse_kl(hidden, head, hidden.detach(), head.detach(), torch.ones(37).double())
    loss.backward()
    assert float(kl.abs().max()) == 0.0
    assert float(hidden.grad.abs().max()) == 0.0


def test_frozen_head_and_no_tokens():
    hidden, head, t_hidden, t_head, weight = problem()
    loss, _ = reverse_kl(hidden, head.detach(), t_hidden, t_head, weight)
    loss.backward()
    assert torch.allclose(hidden.grad, naive(hidden, head, t_hidden, t_head, weight, 1.0)[2])
    empty, kl = reverse_kl(hidden[:0], head, t_hidden[:0], t_head, weight[:0])
    empty.backward()
    assert float(empty.detach()) == 0.0
    assert kl.numel() == 0


def test_gradients_are_handed_out_once():
    hidden, head, *rest = problem()
    loss, _ = reverse_kl(hidden, head, *rest)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call it again"):
        loss.backward()


def test_other_vocabulary_is_refused_with_a_remedy():
    hidden, head, t_hidden, t_head, weight = problem()
    with pytest.raises(ValueError, match="padded rows"):
        reverse_kl(hidden, head[:90], t_hidden, t_head, weight)
    with pytest.raises(ValueError, match="tokens"):
        reverse_kl(hidden, head, t_hidden[:5], t_head, weight)
