"""Single-pass hyper-connections against the formula written out, transformers' map, the plain residual."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from model.batch import Sequence, batch_of
from model.config import NetworkConfig
from model.flash import FlashPolicy
from model.network import Network
from model.presets import preset
from model.streams import StreamSite, collapse, sinkhorn, spread, update


def config(**changes: object) -> NetworkConfig:
    tiny = preset("flash-tiny").model_dump()
    return NetworkConfig.model_validate(tiny | {"name": "streams", "streams": 4} | changes)


def site(seed: int = 0, width: int = 32) -> StreamSite:
    """A site whose coefficients depend on the streams."""
    made = StreamSite(config(width=width)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return made


def streams(seed: int = 1) -> Tensor:
    return torch.randn(2, 3, 4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def written_out(made: StreamSite, x_nd: Tensor, y_d: Tensor) -> tuple[list[float], list[list[float]]]:
    """One token in plain Python: pre, and streams after the site."""
    n, eps = 4, made.eps
    flat = [float(v) for v in x_nd.flatten()]
    rms = math.sqrt(sum(v * v for v in flat) / len(flat) + made.norm_eps)
    f = [sum(w * v / rms for w, v in zip(row, flat, strict=True)) for row in made.fn.tolist()]
    s, b = made.scale.tolist(), made.base.tolist()
    pre = [1 / (1 + math.exp(-(f[k] * s[0] + b[k]))) + eps for k in range(n)]
    post = [2 / (1 + math.exp(-(f[n + k] * s[1] + b[n + k]))) for k in range(n)]
    rows = [[f[2 * n + j * n + k] * s[2] + b[2 * n + j * n + k] for k in range(n)] for j in range(n)]
    comb = [[math.exp(v) / sum(map(math.exp, row)) + eps for v in row] for row in rows]
    for step in range(2 * made.steps - 1):
        if step % 2:
            comb = [[v / (sum(row) + eps) for v in row] for row in comb]
        else:
            sums = [sum(comb[j][k] for j in range(n)) + eps for k in range(n)]
            comb = [[comb[j][k] / sums[k] for k in range(n)] for j in range(n)]
    x, y = x_nd.tolist(), y_d.tolist()
    out = [
        [post[k] * y[c] + sum(comb[j][k] * x[j][c] for j in range(n)) for c in range(len(y))]
        for k in range(n)
    ]
    return pre, out


def test_a_site_is_the_formula():
    made, x = site(), streams()
    y = streams(2)[:, :, 0]
    with torch.no_grad():
        after, pre = update(made, x, y)
    assert pre is not None
    for b, t in ((0, 0), (1, 2)):
        want_pre, want = written_out(made, x[b, t], y[b, t])
        torch.testing.assert_close(pre[b, t], torch.tensor(want_pre, dtype=torch.float64))
        torch.testing.assert_close(after[b, t], torch.tensor(want, dtype=torch.float64))


def test_the_map_is_that_of_transformers():
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

    made = site().float()
    peer = DeepseekV4HyperConnection(
        DeepseekV4Config(
            hidden_size=32, hc_mult=4, hc_sinkhorn_iters=made.steps, hc_eps=made.eps, rms_norm_eps=1e-6
        )
    )
    with torch.no_grad():
        for name in ("fn", "base", "scale"):
            getattr(peer, name).copy_(getattr(made, name))
        x = streams().float()
        post, comb, collapsed = peer(x)
        mix = made(x)
    torch.testing.assert_close(mix.post_BTn, post)
    torch.testing.assert_close(mix.comb_BTnn, comb)
    torch.testing.assert_close(collapse(x, mix.pre_BTn), collapsed)


def test_sinkhorn_ends_on_columns():
    logits = 3.0 * torch.randn(500, 4, 4, generator=torch.Generator().manual_seed(3))
    mix = sinkhorn(logits, 20, 1e-6)
    assert (mix > 0).all()
    assert float((mix.sum(-2) - 1).abs().max()) < 1e-5
    # Rows only converge: the release stops after 20 rounds too.
    assert 1e-4 < float((mix.sum(-1) - 1).abs().max()) < 0.2
    assert float((sinkhorn(logits, 400, 1e-6).sum(-1) - 1).abs().max()) < 5e-3


def test_a_fresh_site_is_nearly_the_residual():
    made = StreamSite(config())
    x, first = spread(torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(4)), 4)
    y = torch.zeros(1, 2, 32)
    torch.testing.assert_close(collapse(x, first), x[:, :, 0])
    mix = made(x)
    torch.testing.assert_close(mix.pre_BTn, torch.full((1, 2, 4), 0.25), atol=2e-3, rtol=0)
    torch.testing.assert_close(mix.post_BTn, torch.ones(1, 2, 4), atol=2e-3, rtol=0)
    torch.testing.assert_close(mix.comb_BTnn[0, 0].diagonal(), torch.full((4,), 0.980), atol=2e-3, rtol=0)
    after, _ = update(made, x, y)
    torch.testing.assert_close(after, x, atol=1e-4, rtol=1e-4)  # equal streams mix into themselves


def test_gradients_are_those_of_differences():
    made = site(width=8)
    x = streams()[:1, :1, :, :8].clone().requires_grad_()
    y = streams(5)[:1, :1, 0, :8].clone().requires_grad_()
    parameters = list(made.parameters())

    def through(*_: Tensor) -> Tensor:
        after, pre = update(made, x, y)
        return collapse(after, pre)

    assert torch.autograd.gradcheck(through, (x, y, *parameters))


def test_one_stream_is_the_plain_residual_without_parameters():
    names = {name for name, _ in Network(preset("flash-tiny")).named_parameters()}
    assert not any("site" in name for name in names)
    x, y = torch.ones(1, 1, 2), torch.full((1, 1, 2), 3.0)
    assert spread(x, 1) == (x, None)
    after, pre = update(None, x, y)
    assert pre is None
    assert torch.equal(collapse(after, pre), x + y)


def test_sampling_equals_training_and_every_site_learns():
    c = config()
    torch.manual_seed(0)
    policy = FlashPolicy(c, Network(c).double())
    tokens = [8 + i * 7 % 113 for i in range(40)]
    cache = policy.open_cache(1, 40)
    cache.extend([0], [tokens[:25]])
    got = [cache.extend([0], [tokens[25:31]])[0], *(cache.extend([0], [[t]])[0] for t in tokens[31:])]
    hidden = policy.hidden(batch_of([Sequence(tokens, cache.starts(0))]))[0, :40]
    want = hidden @ policy.head().T
    torch.testing.assert_close(torch.stack(got).double(), want[30:].detach(), atol=1e-5, rtol=0)
    want[:-1].log_softmax(-1)[range(39), tokens[1:]].sum().backward()
    sites = [p for n, p in policy.module.named_parameters() if "_site" in n]
    assert len(sites) == 6 * 2 * 3
    # The last site's mixing and all collapses but the last one's still reach the loss.
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in sites)
