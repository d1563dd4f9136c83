"""Named shapes. Weights of the first two lie in `model/assets`, together under 8 MB in bfloat16."""

from __future__ import annotations

from model.config import EngramConfig, NetworkConfig, YarnConfig

PRESETS: dict[str, NetworkConfig] = {
    "flash-slim": NetworkConfig(name="flash-slim"),
    "flash-nano": NetworkConfig(
        name="flash-nano",
        width=160,
        head_dim=32,
        heads=4,
        query_rank=80,
        output_rank=48,
        experts=8,
        expert_width=32,
        shared_width=64,
    ),
    "flash-tiny": NetworkConfig(
        name="flash-tiny",
        vocab=128,
        width=32,
        heads=2,
        head_dim=16,
        rope_dim=8,
        query_rank=16,
        output_groups=2,
        output_rank=8,
        window=8,
        compress_ratios=(0, 2, 2, 1, 1, 1),
        kv_source=(1, 3),
        index_source=(1, 3, 4),
        index_heads=2,
        index_dim=16,
        index_topk=4,
        experts=4,
        expert_width=16,
        shared_width=16,
    ),
    "flash": NetworkConfig(
        name="flash",
        vocab=129_280,
        width=5120,
        heads=64,
        head_dim=512,
        rope_dim=64,
        query_rank=1280,
        output_groups=8,
        output_rank=1024,
        window=128,
        compress_ratios=(0, 0, *[2] * 18, *[1] * 20),
        kv_source=(2, 8, 14, 20),
        index_source=(2, 8, 14, 20, 24, 28, 32, 36),
        index_heads=32,
        index_dim=128,
        index_rope_dim=64,
        index_topk=512,
        yarn=YarnConfig(),
        window_format="fp8",
        experts=384,
        expert_width=2304,
        experts_per_token=6,
        shared_width=2304,
        norm_eps=1e-20,
        streams=4,
        engram=EngramConfig(layers=(1, 14), table_rows=16_000_000, compressed_vocab=99_092, pad_token=2),
        tie_embeddings=False,
    ),
}
"""`flash-nano` (the student) and `flash-slim` (a narrower teacher) are trained and share a tokenizer;
`flash-tiny` is for tests. `flash` is the release, 748 billion parameters: `model.release.meta_network`."""


def preset(name: str) -> NetworkConfig:
    """The shape of that name, or ValueError with the names that exist."""
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; there are {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
