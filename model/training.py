"""The optimizer around a policy that all trainers share: accumulate, check, step, save, restore.

A loop calls `backward` for each micro-batch and `step` once; the loss it passes is already divided by the
denominator of the whole step, so that any split into micro-batches gives the same gradient. What is saved is
all that the next step depends on: a run of k steps, a restart and k more equals 2k steps bit for bit on one
machine with one number of threads. Left out until the network needs them: several devices, master weights,
other optimizers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.policy import Policy
from model.train_config import OptimizerConfig


class TrainingError(RuntimeError):
    """The run cannot go on: gradients that are not finite, step after step."""


class TrainEngine:
    """A policy with its optimizer.

    Args:
        policy: its module is put in training mode and updated in place.
        config: learning rate, clipping and schedule.
    """

    def __init__(self, policy: Policy, config: OptimizerConfig) -> None:
        self.policy = policy
        self.config = config
        self.steps = 0
        self.skipped = 0
        policy.module.train()
        trained = [p for p in policy.module.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps
        )

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's share of the loss."""
        loss.backward()

    def step(self, progress: float = 0.0) -> dict[str, float]:
        """Update the weights from what was accumulated and forget it.

        A gradient that is not finite changes nothing: the step is skipped and counted. So is one without any
        gradient (every group of a batch was dropped), which must not move the weights by stale momentum.

        Args:
            progress: share of the run that is done, in [0, 1], for the schedule.

        Returns:
            `grad_norm` before clipping, `lr`, `skipped` (0 or 1).

        Raises:
            TrainingError: `max_skipped` consecutive steps were not finite.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        lr = self.lr(progress)
        self.steps += 1
        if not math.isfinite(norm):
            self.skipped += 1
            self.optimizer.zero_grad(set_to_none=True)
            if self.skipped >= self.config.max_skipped:
                raise TrainingError(
                    f"{self.skipped} steps in a row had a gradient that is not finite; lower the lr"
                )
            return {"grad_norm": norm, "lr": lr, "skipped": 1.0}
        self.skipped = 0
        if norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.clip_norm, torch.tensor(norm))
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "lr": lr, "skipped": 0.0}

    def lr(self, progress: float) -> float:
        """Learning rate of the step that comes next."""
        config, done = self.config, min(1.0, max(0.0, progress))
        decayed = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
        factor = decayed[config.schedule]
        if config.schedule != "constant":
            factor = config.final_fraction + (1 - config.final_fraction) * factor
        warm = min(1.0, (self.steps + 1) / config.warmup_steps) if config.warmup_steps else 1.0
        return config.lr * factor * warm

    def save(self, folder: Path) -> None:
        """Policy and optimizer into an existing, empty folder."""
        self.policy.save(folder / "policy")
        torch.save(self.state(), folder / "engine.pt")

    def restore(self, folder: Path) -> None:
        """Take everything over from a folder that `save` filled."""
        self.policy.module.load_state_dict(load_weights(folder / "policy"))
        state = torch.load(folder / "engine.pt", weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.skipped = state["steps"], state["skipped"]
        torch.set_rng_state(state["rng"])

    def state(self) -> dict[str, Any]:
        return {
            "format": 1,
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "skipped": self.skipped,
            "rng": torch.get_rng_state(),
        }


def load_weights(folder: Path) -> dict[str, Tensor]:
    """State dict of a policy folder."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
