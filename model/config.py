"""Shape of a flash network, without torch, so that any room may read and check it.

Field names follow the release's `config.json` where it has the field. What the small nets leave to a later
issue (DSpark, vision) has no field here, so that no setting is silently ignored.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class LayerKind(StrEnum):
    """What a layer does with the shared latent memory."""

    WINDOW = "window"
    """Sliding window only (compress ratio 0)."""
    FULL = "full"
    """Makes a new latent memory and selects from it."""
    REINDEX = "reindex"
    """Selects anew from the memory of an earlier layer."""
    REUSE = "reuse"
    """Takes memory and selection of an earlier layer."""


class EngramConfig(BaseModel):
    """N-gram tables of some encoder layers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: tuple[int, ...]
    table_rows: int = Field(ge=2)
    """Tables have at least so many rows: their sizes are the primes from here on."""
    max_ngram: int = Field(default=4, ge=2)
    heads: int = 8
    """Tables for each n-gram order."""
    head_dim: int = 256
    """Channels of a row."""
    compressed_vocab: int
    """Number of compressed tokens; hash factors are drawn by it."""
    pad_token: int = 0
    """Token whose compressed id stands for what an n-gram may not reach."""
    row_format: Literal["fp8", "none"] = "fp8"
    """Rows: FP8 with one power-of-two scale for 32 channels, or as they are."""


class YarnConfig(BaseModel):
    """Longer contexts by slower rotation: YaRN, without its change of attention temperature."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    factor: float = Field(default=16.0, ge=1)
    """How much slower the channels rotate that turn less than `beta_slow` times."""
    beta_fast: float = 32.0
    """Turns within `original` from which on a channel keeps its speed."""
    beta_slow: float = 1.0
    original: int = 65_536
    """Tokens of the context that the network was first trained on."""


class NetworkConfig(BaseModel):
    """Everything that determines the function that a network computes, besides its weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["posttrain.network/1"] = "posttrain.network/1"
    name: str
    vocab: int = 4096
    width: int = Field(default=128, multiple_of=8)
    """d, channels of the residual stream."""
    heads: int = 4
    head_dim: int = Field(default=32, multiple_of=16)
    """D, channels of one head and of the single shared key-value head."""
    rope_dim: int = Field(default=8, multiple_of=2)
    """Trailing channels of a head that rotate, as interleaved pairs."""
    query_rank: int = 64
    """Rank of the query projection; the indexer reads the same low-rank query."""
    output_groups: int = 2
    output_rank: int = 32
    """Channels that each group of heads is projected to before the common output projection."""
    window: int = 128
    """W, keys of the sliding window, and tokens of the decoder's bounded replay."""
    compress_ratios: tuple[int, ...] = (0, 2, 2, 2, 1, 1, 1, 1)
    """Tokens in one latent of the memory that a layer reads; 0 reads none. First half: the encoder."""
    kv_source: tuple[int, ...] = (1, 4)
    """Layers that make a latent memory; the layers after one read it until the next one."""
    index_source: tuple[int, ...] = (1, 4, 6)
    """Layers that select latents; the layers after one reuse its selection until the next one."""
    index_heads: int = 4
    index_dim: int = Field(default=16, multiple_of=8)
    index_rope_dim: int = Field(default=8, multiple_of=2)
    index_topk: int = 64
    rope_theta: float = 10_000.0
    """Rotation base of layers that read no memory."""
    compress_rope_theta: float = 160_000.0
    """Rotation base of layers that do, for query, window, latent and indexer alike."""
    yarn: YarnConfig | None = None
    """Of those layers too, if any."""
    memory_format: Literal["fp4", "none"] = "fp4"
    """Main cache: FP4 with one e4m3 scale per 16 channels, or as computed."""
    index_format: Literal["mxfp4", "none"] = "mxfp4"
    """Indexer queries and keys: FP4 with one power-of-two scale per 32 channels (per head if fewer)."""
    window_format: Literal["fp8", "none"] = "none"
    """Window cache: FP8 with one power-of-two scale per 32 channels, or as computed."""
    experts: int = 8
    expert_width: int = 24
    experts_per_token: int = 2
    shared_width: int = 64
    routed_scaling: float = 1.5
    swiglu_limit: float = 10.0
    norm_eps: float = 1e-6
    streams: int = Field(default=1, ge=1)
    """n, residual streams (manifold-constrained hyper-connections); 1 is the plain residual."""
    sinkhorn_steps: int = Field(default=20, ge=1)
    """Row and column normalisations of the streams' mixing."""
    stream_eps: float = 1e-6
    engram: EngramConfig | None = None
    """N-gram tables, if any."""
    tie_embeddings: bool = True
    """Whether the head is the embedding matrix. The release keeps two matrices."""

    @model_validator(mode="after")
    def _consistent(self) -> NetworkConfig:
        layers = len(self.compress_ratios)
        if layers % 2:
            raise ValueError("compress_ratios needs an even number of layers: half encoder, half decoder")
        if self.heads % self.output_groups:
            raise ValueError("output_groups must divide heads")
        if self.rope_dim > self.head_dim or self.index_rope_dim > self.index_dim:
            raise ValueError("rope_dim must not exceed head_dim, nor index_rope_dim index_dim")
        if self.experts_per_token > self.experts:
            raise ValueError("experts_per_token must not exceed experts")
        if not set(self.kv_source) <= set(self.index_source):
            raise ValueError(
                "every kv_source layer must be an index_source layer: a new memory needs a selection"
            )
        if self.engram is not None and not all(0 <= at < layers // 2 for at in self.engram.layers):
            raise ValueError("engram layers must be encoder layers: the decoder does not run on every token")
        ratio = 0
        for layer in range(layers):
            if layer in self.kv_source:
                ratio = self.compress_ratios[layer]
            if self.compress_ratios[layer] not in (0, 1, 2):
                raise ValueError(f"layer {layer}: compress ratio must be 0, 1 or 2")
            if self.compress_ratios[layer] not in (0, ratio):
                raise ValueError(f"layer {layer}: compress ratio differs from that of its memory")
            if layer in self.index_source and self.compress_ratios[layer] == 0:
                raise ValueError(f"layer {layer}: an index source needs a compress ratio of 1 or 2")
        if any(self.compress_ratios[self.encoder_layers :]) and self.encoder_layers not in self.kv_source:
            raise ValueError(f"the decoder's memory must be made by its first layer, {self.encoder_layers}")
        if any(layer > self.encoder_layers for layer in self.kv_source):
            raise ValueError(
                "only the decoder's first layer may make a memory: the others see no whole prompt"
            )
        return self

    @property
    def layers(self) -> int:
        """Number of layers, encoder and decoder."""
        return len(self.compress_ratios)

    @property
    def encoder_layers(self) -> int:
        """Number of encoder layers: the first half."""
        return self.layers // 2

    def kind(self, layer: int) -> LayerKind:
        """What this layer does with the latent memory."""
        if self.compress_ratios[layer] == 0:
            return LayerKind.WINDOW
        if layer in self.kv_source:
            return LayerKind.FULL
        return LayerKind.REINDEX if layer in self.index_source else LayerKind.REUSE
