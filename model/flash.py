"""The flash networks as policies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from model.batch import Batch
from model.cache import FlashCache
from model.chat import FlashChat
from model.checkpoint import read_config, read_weights, write_network
from model.config import NetworkConfig
from model.forks import hidden_of_tails
from model.network import Network
from model.presets import preset
from model.tokenizer import Tokenizer


class FlashPolicy:
    """A `Network` behind the `Policy` Protocol.

    Args:
        config: shape.
        module: its network.
    """

    def __init__(self, config: NetworkConfig, module: Network) -> None:
        self.config = config
        self.name = config.name
        self.module = module
        self.tokenizer = Tokenizer()
        self.chat = FlashChat(self.tokenizer)
        self.vocab = config.vocab
        self.width = config.width
        self.replay_window: int | None = config.window
        self.shares_prefixes = True

    @classmethod
    def fresh(cls, name: str, *, seed: int) -> FlashPolicy:
        """A preset with weights drawn from `seed`; the global random state is left as it was."""
        config = preset(name)
        if name == "flash":
            raise ValueError("flash is too large to build: take flash-nano, or model.release.meta_network")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(config, Network(config))

    @classmethod
    def open(cls, folder: Path | str) -> FlashPolicy:
        """What `save` wrote, in float32."""
        config = read_config(Path(folder))
        with torch.random.fork_rng(devices=[]):
            policy = cls(config, Network(config))
        policy.load(folder)
        return policy

    def hidden(self, batch: Batch) -> Tensor:
        """See `Policy.hidden`."""
        if batch.prefix is not None:
            return hidden_of_tails(self.module, batch)
        states, columns = self.module(
            batch.tokens_BT,
            batch.segments_BT,
            batch.positions_BT,
            batch.starts_BT,
            batch.decoder_columns_BU,
        )
        if columns is None:
            runs = (batch.segments_BT > 0) & (batch.positions_BT >= batch.starts_BT)
            return states * runs.unsqueeze(-1)
        states = states * (columns >= 0).unsqueeze(-1)
        index = columns.clamp_min(0).unsqueeze(-1).expand(-1, -1, states.shape[2])
        out = states.new_zeros(*batch.tokens_BT.shape, states.shape[2])
        return out.scatter_add(1, index, states)

    def head(self) -> Tensor:
        """See `Policy.head`."""
        return self.module.head_Vd

    def open_cache(self, slots: int, max_tokens: int) -> FlashCache:
        """See `Policy.open_cache`."""
        return FlashCache(self.module, slots, max_tokens)

    def save(self, folder: Path | str, *, dtype: torch.dtype | None = None) -> None:
        """See `Policy.save`."""
        write_network(Path(folder), self.config, self.module, dtype=dtype)

    def load(self, folder: Path | str) -> None:
        """See `Policy.load`."""
        read_weights(Path(folder), self.module)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[T, V] float32 of one sequence in one go, for evaluation and tests."""
        from model.batch import Sequence as Packed
        from model.batch import batch_of

        batch = batch_of([Packed(tokens)]).to(self.head().device)
        return (self.hidden(batch)[0, : len(tokens)].float() @ self.head().float().T).float()
