"""The optimizer around a policy that all trainers share: accumulate, check, step, checkpoint, resume.

A loop calls `backward` for each micro-batch and `step` once; the loss it passes is already divided by the
denominator of the whole step, so that any split into micro-batches gives the same gradient. A checkpoint
holds all that the next step depends on: k steps, a kill, a restart and k more equal 2k steps bit for bit
on one machine with one number of threads.

    ROOT/00000012/policy/       what `Policy.save` writes
    ROOT/00000012/engine.pt     optimizer, random state
    ROOT/00000012/state.json    what the loop wants to remember

Left out until the network needs them: several devices, master weights, other optimizers.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.checkpoint import replacing
from model.policy import Policy
from model.train_config import OptimizerConfig

FORMAT = 1


class TrainingError(RuntimeError):
    """The run cannot go on: gradients that are not finite step after step, or two parts that disagree."""


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
        """Optimizer steps so far, skipped ones included."""
        self._skipped = 0
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
        """Update the weights from what was accumulated, and forget it.

        A gradient that is not finite changes nothing: the step is skipped and counted. Nor does one of
        exactly zero (every group of a batch was dropped): stale momentum must not move the weights.

        Args:
            progress: share of the run that is done, in [0, 1], for the schedule.

        Returns:
            `grad_norm` before clipping, `lr`, `skipped` (0 or 1).

        Raises:
            TrainingError: `max_skipped` consecutive steps were not finite.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm_ = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
        norm, lr = float(norm_), self.lr(progress)
        self.steps += 1
        self._skipped = 0 if math.isfinite(norm) else self._skipped + 1
        if self._skipped >= self.config.max_skipped:
            raise TrainingError(
                f"the gradient was not finite in {self._skipped} consecutive steps: lower optimizer.lr"
            )
        if math.isfinite(norm) and norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.clip_norm, norm_)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "lr": lr, "skipped": float(not math.isfinite(norm))}

    def lr(self, progress: float) -> float:
        """Learning rate of the step that comes next."""
        config, done = self.config, min(1.0, max(0.0, progress))
        left = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
        factor = left[config.schedule]
        if config.schedule != "constant":
            factor = config.final_fraction + (1 - config.final_fraction) * factor
        warm = min(1.0, (self.steps + 1) / config.warmup_steps) if config.warmup_steps else 1.0
        return config.lr * factor * warm

    def checkpoint(self, root: Path, step: int, state: Mapping[str, Any], *, keep: int) -> Path:
        """Write checkpoint `step` under `root`; it appears complete, by rename, or not at all.

        Args:
            state: JSON values that `resume` returns.
            keep: newest checkpoints that stay, this one included.
        """
        folder = root / f"{step:08d}"
        with replacing(folder) as fresh:
            self.policy.save(fresh / "policy")
            torch.save(self._state(), fresh / "engine.pt")
            (fresh / "state.json").write_text(json.dumps({"format": FORMAT, "step": step, **state}) + "\n")
        for old in checkpoint_steps(root)[:-keep]:
            # Out of sight first: a kill in the middle of a deletion must not leave half a checkpoint.
            doomed = root / f".{old:08d}.old"
            (root / f"{old:08d}").replace(doomed)
            shutil.rmtree(doomed)
        return folder

    def resume(self, root: Path) -> dict[str, Any] | None:
        """Take over the newest checkpoint and return its state; None when there is none."""
        for leftover in root.glob(".*"):
            shutil.rmtree(leftover)
        steps = checkpoint_steps(root)
        if not steps:
            return None
        folder = root / f"{steps[-1]:08d}"
        self.policy.load(folder / "policy")
        saved = torch.load(folder / "engine.pt", weights_only=True)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.steps, self._skipped = saved["steps"], saved["skipped"]
        torch.set_rng_state(saved["rng"])
        return json.loads((folder / "state.json").read_text())

    def _state(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "skipped": self._skipped,
            "rng": torch.get_rng_state(),
        }


def checkpoint_steps(root: Path) -> list[int]:
    """Steps of the complete checkpoints under `root`, ascending."""
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdigit()) if root.exists() else []
