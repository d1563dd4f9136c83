"""A network on disk: `config.json` and `model.safetensors` in a folder that appears at once or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import nn

from model.config import NetworkConfig

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def write_network(
    folder: Path, config: NetworkConfig, module: nn.Module, *, dtype: torch.dtype | None = None
) -> None:
    """Write configuration and weights, floating-point ones as `dtype` (buffers stay float32)."""
    buffers = {name for name, _ in module.named_buffers()}
    state = {}
    for name, tensor in module.state_dict().items():
        tensor = tensor.detach().cpu().contiguous()
        state[name] = tensor.to(dtype) if dtype is not None and name not in buffers else tensor
    with replacing(folder) as fresh:
        (fresh / CONFIG).write_text(config.model_dump_json(indent=1) + "\n", encoding="utf-8")
        save_file(state, fresh / WEIGHTS, metadata={"format": "pt"})


def read_config(folder: Path) -> NetworkConfig:
    """The shape of the network in `folder`; ValueError when there is none or it is not ours."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} holds no {CONFIG}: give a folder that Policy.save wrote")
    try:
        return NetworkConfig.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path} is no network configuration of this version: {error}") from error


@torch.no_grad()
def read_weights(folder: Path, module: nn.Module) -> None:
    """Copy the weights of `folder` into `module`, on its device and in its type."""
    state = load_file(folder / WEIGHTS)
    own = module.state_dict()
    wrong = sorted(
        set(own) ^ set(state) | {n for n in set(own) & set(state) if own[n].shape != state[n].shape}
    )
    if wrong:
        raise ValueError(f"{folder / WEIGHTS} does not fit this network, for example at {wrong[0]}")
    for name, tensor in own.items():
        tensor.copy_(state[name])


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A temporary sibling folder that takes the place of `folder`, synced, when the block succeeds."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f".{folder.name}.new-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        yield fresh
        for path in fresh.iterdir():
            _sync(path)
        _sync(fresh)
        old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        _sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
