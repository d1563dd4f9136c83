"""Checkpoints of the release: their tensor names, one to one with the parts of a network here.

Weights that the release stores in FP8 or FP4 come with a second tensor, `.scale` for `.weight`, which reading
multiplies in. Image routing biases, the drafter, the vision tower and its projector have no part here; their
names are known and passed over (`ELSEWHERE`), any other unknown name is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import NetworkConfig
from model.network import Network
from model.presets import preset

ELSEWHERE = re.compile(r"mtp\.|vision\.|aligner\.|image_|layers\.\d+\.ffn\.gate\.bias_vl$")
"""Beginnings of names that the release has and this network has not."""

_LAYER = {
    "attention_norm.weight": "attn_norm.weight",
    "attention.query_down.weight": "attn.wq_a.weight",
    "attention.query_norm.weight": "attn.q_norm.weight",
    "attention.query_up.weight": "attn.wq_b.weight",
    "attention.kv.weight": "attn.wkv.weight",
    "attention.kv_norm.weight": "attn.kv_norm.weight",
    "attention.sink": "attn.attn_sink",
    "attention.output_down": "attn.wo_a.weight",
    "attention.output_up.weight": "attn.wo_b.weight",
    "source.compressor.project_kv.weight": "attn.compressor.wkv.weight",
    "source.compressor.project_gate.weight": "attn.compressor.wgate.weight",
    "source.compressor.norm.weight": "attn.compressor.norm.weight",
    "source.index_key.project.weight": "attn.indexer.wk.weight",
    "source.index_key.norm.weight": "attn.indexer.k_norm.weight",
    "indexer.query_up.weight": "attn.indexer.wq_b.weight",
    "indexer.weight.weight": "attn.indexer.weights_proj.weight",
    "attention_site.fn": "hc_attn_fn",
    "attention_site.scale": "hc_attn_scale",
    "attention_site.base": "hc_attn_base",
    "moe_site.fn": "hc_ffn_fn",
    "moe_site.scale": "hc_ffn_scale",
    "moe_site.base": "hc_ffn_base",
    "engram.table.weight": "engram.embed.weight",
    "engram.project.weight": "engram.wkv.weight",
    "engram.query_gain": "engram.q_weight",
    "engram.key_gain": "engram.k_weight",
    "moe_norm.weight": "ffn_norm.weight",
    "moe.router.weight": "ffn.gate.weight",
    "moe.bias_E": "ffn.gate.bias",
    "moe.shared_gate.weight": "ffn.shared_experts.w1.weight",
    "moe.shared_up.weight": "ffn.shared_experts.w3.weight",
    "moe.shared_down.weight": "ffn.shared_experts.w2.weight",
}
_EXPERTS = {"moe.gate": "w1", "moe.up": "w3", "moe.down": "w2"}
_TOP = {"embedding.weight": "embed.weight", "output": "head.weight", "norm.weight": "norm.weight"}
_OURS_ALONE = {"compressed_V"}
"""Derived from the tokenizer, which the release does when it starts."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK = 32


@dataclass(frozen=True)
class Entry:
    """One tensor of the release and where it lies here."""

    name: str
    own: str
    expert: int | None
    """Which of the stacked experts, None if it is a tensor of its own."""


def meta_network(name: str = "flash") -> Network:
    """A preset without memory for its weights, for shapes, names and counts."""
    with torch.device("meta"):
        return Network(preset(name))


def entries(network: Network) -> Iterator[Entry]:
    """Every tensor that a checkpoint of the release holds for this network, without scales."""
    for own, tensor in network.state_dict().items():
        if own in _OURS_ALONE:
            continue
        match = re.fullmatch(r"layers\.(\d+)\.(.+)", own)
        if match is None:
            yield Entry(_TOP[own], own, None)
        elif match[2] in _EXPERTS:
            for expert in range(tensor.shape[0]):
                name = f"layers.{match[1]}.ffn.experts.{expert}.{_EXPERTS[match[2]]}.weight"
                yield Entry(name, own, expert)
        else:
            yield Entry(f"layers.{match[1]}.{_LAYER[match[2]]}", own, None)


def to_release(network: Network) -> dict[str, Tensor]:
    """Views of the weights under the names and in the shapes of the release, in the network's types."""
    state = network.state_dict()
    return {entry.name: _released(network.config, entry, state[entry.own]) for entry in entries(network)}


def from_release(network: Network, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `network.load_state_dict(..., strict=False)` takes; `compressed_V` alone is left out.

    Raises:
        ValueError: a tensor is missing, has another shape, or is not known.
    """
    state = network.state_dict()
    stacks: dict[str, list[Tensor]] = {}
    used: set[str] = set()
    for entry in entries(network):
        if entry.name not in tensors:
            raise ValueError(f"the checkpoint has no {entry.name}: give all of its files")
        want = _released(network.config, entry, state[entry.own])
        got, scale = tensors[entry.name], entry.name.removesuffix("weight") + "scale"
        if scale in tensors and scale != entry.name:
            got = dequantize(got, tensors[scale], want.shape).to(want.dtype)
            used.add(scale)
        if got.shape != want.shape:
            raise ValueError(f"{entry.name} is {tuple(got.shape)}, this network has {tuple(want.shape)}")
        used.add(entry.name)
        stacks.setdefault(entry.own, []).append(got.T if entry.own.endswith("moe.down") else got)
    unknown = sorted(name for name in tensors if name not in used and not ELSEWHERE.match(name))
    if unknown:
        raise ValueError(f"the checkpoint has {unknown[0]}, which this network has no place for")
    return {
        own: torch.stack(parts) if own.endswith(tuple(_EXPERTS)) else parts[0].reshape(state[own].shape)
        for own, parts in stacks.items()
    }


def dequantize(weight: Tensor, scale: Tensor, shape: torch.Size) -> Tensor:
    """Float32 values of a stored weight.

    Args:
        weight: e4m3 in `shape`, or bytes of two e2m1 numbers each, the first in the low half.
        scale: exponent bytes (bias 127) of 32 columns and of 1 or 32 rows.
        shape: of the weight.
    """
    if weight.shape[-1] * 2 == shape[-1]:
        codes = weight.view(torch.uint8)
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
        table = torch.tensor([*_E2M1, *(-v for v in _E2M1)], device=weight.device)
        values = table[codes]
    else:
        values = weight.float()
    factors = torch.exp2(scale.view(torch.uint8).float() - 127.0)
    if scale.shape[0] != shape[0]:
        factors = factors.repeat_interleave(_BLOCK, 0)[: shape[0]]
    return values * factors.repeat_interleave(_BLOCK, 1)[:, : shape[1]]


def _released(config: NetworkConfig, entry: Entry, tensor: Tensor) -> Tensor:
    """The release's view of one of our tensors."""
    if entry.expert is not None:
        part = tensor[entry.expert]
        return part.T if entry.own.endswith("moe.down") else part
    if entry.own.endswith("attention.output_down"):
        return tensor.flatten(0, 1)
    if entry.own.endswith("_gain"):
        return tensor.view(config.streams, config.width)
    return tensor
