"""Parameters of a network, counted from its modules: in all, and those that one token uses."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from model.moe import MoE
from model.network import Layer, Network


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters."""

    backbone: int
    """Everything but Engram tables."""
    engram: int
    """Rows of all Engram tables."""
    active_prefill: int
    """Used for a token of a long prompt: the encoder and what makes the decoder's memory."""
    active_decode: int
    """Used for a sampled token: all layers and the head."""


def count(network: Network) -> Counts:
    """Count them, also on the meta device.

    Active are weights that are multiplied: neither embedding rows nor Engram rows, which are looked up, nor
    experts that were not picked.
    """
    encoder = decoder = tables = memory = 0
    for index, layer in enumerate(network.layers):
        assert isinstance(layer, Layer)
        own = _active(layer)
        if layer.engram is not None:
            rows = layer.engram.table.weight.numel()
            tables, own = tables + rows, own - rows
        if index < network.config.encoder_layers:
            encoder += own
        else:
            decoder += own
            memory += 0 if layer.source is None else _size(layer.source)
    return Counts(
        backbone=_size(network) - tables,
        engram=tables,
        active_prefill=encoder + memory,
        active_decode=encoder + decoder + network.head_Vd.numel(),
    )


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _active(layer: Layer) -> int:
    """Parameters of a layer without the routed experts that a token does not use."""
    moe: MoE = layer.moe
    routed = sum(stack.numel() for stack in (moe.gate, moe.up, moe.down))
    return _size(layer) - routed + routed * moe.picks // moe.gate.shape[0]
