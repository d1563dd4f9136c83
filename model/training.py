"""The part of a training step that sft, rl and opd share: accumulate, check, clip, step, save, resume.

    engine = TrainEngine(policy.module, OptimizerConfig(lr=1e-3), folder=run / "checkpoints")
    data = engine.resume() or {"position": 0}
    while ...:
        report = engine.step(batches, loss, denominator=tokens_in_all_batches)
        engine.save({"position": ...})

A loss function gives sums, never means: the caller counts what bears loss over the whole step and hands the
count over as `denominator`, so that the split into microbatches changes nothing.
"""

from __future__ import annotations

import errno
import json
import math
import pickle
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from model.checkpoint import replacing
from model.moe import MoE
from model.optimizers import build_optimizer
from model.train_config import OptimizerConfig

Micro = TypeVar("Micro")

_torch: Any = torch
"""Type stubs leave the foreach operations out."""
_STATE, _DATA = "state.pt", "data.json"


class NonFiniteError(RuntimeError):
    """A loss or gradient was NaN or infinite. Parameters and optimizer are as before the step."""


class LossSum(NamedTuple):
    """What a loss function returns of one microbatch."""

    total: Tensor
    """Scalar, summed over its tokens."""
    metrics: Mapping[str, Tensor | float] = {}
    """Numbers to add up over microbatches; the caller divides."""


@dataclass(frozen=True)
class StepReport:
    """One optimizer step."""

    step: int
    """Steps taken, this one included."""
    loss: float
    grad_norm: float
    """Before clipping."""
    lr: float
    """Of the first role, schedule included."""
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainState:
    """Everything beside weights and optimizer that a step leaves behind: the `data` of a checkpoint."""

    step: int = 0
    """Steps done. Where weights are published, the number of the last publication."""
    seconds: float = 0.0
    """Spent in steps, over all restarts."""
    finished: bool = False
    last: dict[str, float] = field(default_factory=dict)
    """Metrics of the step."""

    def after(self, seconds: float, *, steps: int, max_seconds: float | None) -> TrainState:
        """The state after one more step; it finishes the run when either limit is reached. No metrics yet."""
        step, total = self.step + 1, self.seconds + seconds
        return TrainState(step, total, step >= steps or total >= (max_seconds or math.inf))


@dataclass(frozen=True)
class TrainResult:
    """What a finished run leaves."""

    policy: Path
    """Folder of the trained policy."""
    steps: int
    """Steps done, restarts included."""
    seconds: float
    last: dict[str, float]
    """Metrics of the last step."""


class TrainEngine:
    """One network and its optimizer.

    Args:
        module: in the mode that it is to be trained in.
        config: optimizer and schedule.
        folder: where `save` puts checkpoints; None forbids saving.
        clip_norm: largest gradient norm over all parameters.
        keep: checkpoints that stay.
        autocast: type of matrix products on the module's device, for example torch.bfloat16.
        bias_speed: of the experts' balancing biases after each step; 0 freezes them.
    """

    def __init__(
        self,
        module: nn.Module,
        config: OptimizerConfig,
        *,
        folder: Path | None = None,
        clip_norm: float = 1.0,
        keep: int = 2,
        autocast: torch.dtype | None = None,
        bias_speed: float = 0.001,
    ) -> None:
        self.module = module
        self.optimizer = build_optimizer(module, config)
        self.folder = folder
        self.clip_norm = clip_norm
        self.keep = keep
        self.autocast = autocast
        self.bias_speed = bias_speed
        self.steps = 0

    def step(
        self, microbatches: Iterable[Micro], loss: Callable[[Micro], LossSum], *, denominator: float
    ) -> StepReport:
        """Accumulate gradients over the microbatches and take one step.

        Args:
            microbatches: whatever `loss` takes, each run forward and backward by itself.
            loss: its sum over one microbatch's tokens.
            denominator: what the sum over all microbatches is divided by.

        Raises:
            NonFiniteError: names the first microbatch or parameter; nothing was changed.
            ValueError: a denominator that is not positive.
        """
        if not denominator > 0:
            raise ValueError(f"denominator is {denominator}: no token bears loss, so skip the step")
        began = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        metrics: dict[str, list[Tensor | float]] = {}
        for microbatch in microbatches:
            with self._autocast():
                total, numbers = loss(microbatch)
            (total / denominator).backward()
            losses.append(total.detach())
            for name, value in numbers.items():
                metrics.setdefault(name, []).append(value.detach() if isinstance(value, Tensor) else value)
        norm, factor = self._clip(), self.optimizer.factor
        values = torch.stack([*losses, norm]).tolist()
        if not all(map(math.isfinite, values)):
            self._refuse(values[:-1])
        self.optimizer.step()
        self._balance()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return StepReport(
            self.steps,
            sum(values[:-1]) / denominator,
            values[-1],
            self.optimizer.param_groups[0]["lr"] * factor,
            time.perf_counter() - began,
            {name: float(sum(parts)) for name, parts in metrics.items()},
        )

    def save(self, data: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint that appears at once: weights, optimizer, random states, step, `data` (JSON).

        Older ones beyond `keep` are removed afterwards. Returns its folder.
        """
        if self.folder is None:
            raise ValueError("this engine was given no folder for checkpoints")
        target = self.folder / f"step-{self.steps:08d}"
        with replacing(target) as fresh:
            torch.save(
                {
                    "format": "posttrain.train/1",
                    "step": self.steps,
                    "module": self.module.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "random": _random_state(),
                },
                fresh / _STATE,
            )
            (fresh / _DATA).write_text(json.dumps(dict(data or {})) + "\n", encoding="utf-8")
        for old in self._checkpoints()[: -self.keep]:
            shutil.rmtree(old)
        return target

    def resume(self) -> dict[str, Any] | None:
        """Load the newest checkpoint, random states included; its `data`, or None if there is none."""
        found = self._checkpoints()
        if not found:
            return None
        newest = found[-1]
        device = next(self.module.parameters()).device
        try:
            state = torch.load(newest / _STATE, map_location=device, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError, OSError) as error:
            # A truncated archive is "invalid argument"; the disk's other errors are no fault of the file.
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            raise ValueError(f"{newest} is damaged: remove it, and the run goes on before it") from error
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["step"]
        _set_random_state(state["random"])
        return json.loads((newest / _DATA).read_text("utf-8"))

    def _checkpoints(self) -> list[Path]:
        if self.folder is None or not self.folder.is_dir():
            return []
        return sorted(p for p in self.folder.iterdir() if re.fullmatch(r"step-\d{8}", p.name))

    def _autocast(self) -> Any:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(next(self.module.parameters()).device.type, dtype=self.autocast)

    def _clip(self) -> Tensor:
        """Scale gradients down to `clip_norm`; returns the norm before, on the device."""
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        if not grads:
            raise ValueError("no parameter got a gradient: is the loss detached?")
        norm = torch.linalg.vector_norm(torch.stack(_torch._foreach_norm(grads)).float())
        _torch._foreach_mul_(grads, (self.clip_norm / (norm + 1e-6)).clamp_max(1.0))
        return norm

    def _refuse(self, losses: list[float]) -> None:
        culprit = next(
            (f"loss of microbatch {i}" for i, v in enumerate(losses) if not math.isfinite(v)), None
        )
        for name, parameter in self.module.named_parameters():
            if culprit is None and parameter.grad is not None and not parameter.grad.isfinite().all():
                culprit = f"gradient of {name}"
        self.optimizer.zero_grad(set_to_none=True)
        raise NonFiniteError(
            f"step {self.steps + 1}: {culprit or 'gradient norm'} is not finite; nothing changed"
        )

    def _balance(self) -> None:
        for part in self.module.modules():
            if isinstance(part, MoE):
                part.update_bias(self.bias_speed)


def _random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
