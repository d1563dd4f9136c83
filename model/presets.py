"""Named shapes. Weights of the first two lie in `model/assets`, together under 8 MB in bfloat16."""

from __future__ import annotations

from model.config import NetworkConfig

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
}
"""`flash-nano` (the student) and `flash-slim` (a narrower teacher) are trained and share a tokenizer;
`flash-tiny` is for tests."""


def preset(name: str) -> NetworkConfig:
    """The shape of that name, or ValueError with the names that exist."""
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; there are {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
