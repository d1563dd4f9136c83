"""Supervised fine-tuning: one page, in pipeline order.

    minibatch -> pack by best fit -> hidden states -> head on the assistant's tokens only -> step ->
    checkpoint

The loss is the mean negative log-likelihood over the loss-bearing tokens of the whole minibatch: one
denominator, however the samples are packed and split. A run goes on from its newest checkpoint, and the
order of samples is a function of the step, so k steps, a kill and a restart end in the same bits as an
unbroken run.

Run: `train(config, policy, examples, run=Path("runs/sft"))`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from catalog.models import RunKind
from catalog.runs import RunFolder
from model.batch import Sequence as PackedSequence
from model.batch import pack
from model.policy import Policy
from model.targets import targets
from model.training import TrainEngine
from sft.config import SftConfig
from sft.data import Example, minibatch, select


@dataclass(frozen=True)
class SftResult:
    """What a finished run leaves."""

    policy: Path
    """Folder of the trained policy."""
    steps: int
    seconds: float
    loss: float
    """Nats per loss-bearing token of the last minibatch."""
    dev_loss: float | None


def train(
    config: SftConfig, policy: Policy, examples: Sequence[Example], *, run: Path, dev: Sequence[Example] = ()
) -> SftResult:
    """Train, or go on training, in the folder `run`.

    Args:
        config: going on with other settings than those in `run/config.json` is an error.
        policy: the network to start from; its weights are replaced when `run` has a checkpoint.
        examples: all training samples, in any fixed order.
        dev: samples of which only the loss is measured.

    Raises:
        ValueError: no usable samples.
        UserError: `run` belongs to another configuration or another process.
        TrainingError: gradients that are not finite, step after step.
    """
    data = select(examples, max_tokens=config.max_tokens).examples
    engine = TrainEngine(policy, config.optimizer)
    with RunFolder.open(
        run, kind=RunKind.SFT, config=config.model_dump(mode="json"), seed=config.seed, resume=True
    ) as folder:
        state = SftState(**(engine.resume(run / "checkpoints") or {}))
        folder.rewind(state.step)
        while not state.finished:
            state = one_step(config, engine, data, dev, state)
            folder.log(state.step, **state.last)
            if state.finished or state.step % config.checkpoint.every == 0:
                engine.checkpoint(run / "checkpoints", state.step, vars(state), keep=config.checkpoint.keep)
        folder.finish(state.last)
    weights = run / "checkpoints" / f"{state.step:08d}" / "policy"
    return SftResult(weights, state.step, state.seconds, state.last["loss"], state.last.get("dev_loss"))


@dataclass(frozen=True)
class SftState:
    """Everything beside weights and optimizer that a step leaves behind."""

    format: int = 1
    step: int = 0
    seconds: float = 0.0
    """Spent in training steps, over all restarts."""
    finished: bool = False
    last: dict[str, float] = field(default_factory=dict)
    """Metrics of the step."""


def one_step(
    config: SftConfig, engine: TrainEngine, data: Sequence[Example], dev: Sequence[Example], state: SftState
) -> SftState:
    """One optimizer step, and the dev loss when it is due."""
    began = time.monotonic()
    progress = max(state.step / config.steps, state.seconds / (config.max_seconds or math.inf))
    chosen = minibatch(data, state.step, config.batch_samples, config.seed)
    loss, correct, count = accumulate(engine, chosen, config.micro_tokens)
    stats = engine.step(progress)
    took = time.monotonic() - began
    step, seconds = state.step + 1, state.seconds + took
    finished = step >= config.steps or seconds >= (config.max_seconds or math.inf)
    last = {"loss": loss, "accuracy": correct / count, "loss_tokens": count, **stats, "seconds": seconds}
    last["tokens_per_s"] = sum(len(sample.tokens) for sample in chosen) / took
    if dev and (finished or step % config.eval_every == 0):
        last["dev_loss"] = evaluate(engine.policy, dev, config.micro_tokens)
    return SftState(step=step, seconds=seconds, finished=finished, last=last)


def accumulate(engine: TrainEngine, chosen: Sequence[Example], micro_tokens: int) -> tuple[float, int, int]:
    """Add the gradient of one minibatch; returns (loss, correctly predicted targets, targets)."""
    count = sum(len(sample.targets) for sample in chosen)
    total, correct = 0.0, 0
    for nll_N, hit_N in likelihoods(engine.policy, chosen, micro_tokens):
        loss = nll_N.sum() / count
        engine.backward(loss)
        total += float(loss.detach())
        correct += int(hit_N.sum())
    return total, correct, count


@torch.no_grad()
def evaluate(policy: Policy, samples: Sequence[Example], micro_tokens: int) -> float:
    """Nats per loss-bearing token."""
    policy.module.eval()
    total = math.fsum(float(nll_N.sum()) for nll_N, _ in likelihoods(policy, samples, micro_tokens))
    policy.module.train()
    return total / sum(len(sample.targets) for sample in samples)


def likelihoods(policy: Policy, samples: Sequence[Example], micro_tokens: int):
    """Per micro-batch the negative log-likelihood of each target, and whether it was the likeliest token."""
    sequences = [PackedSequence(sample.tokens, sample.start) for sample in samples]
    positions = [sample.targets for sample in samples]
    for batch in pack(sequences, micro_tokens):
        wanted = targets(batch, positions)
        hidden_ND = wanted.hidden(policy.hidden(batch))
        logits_NV = hidden_ND.float() @ policy.head().float().T
        nll_N: Tensor = torch.nn.functional.cross_entropy(logits_NV, wanted.ids_N, reduction="none")
        yield nll_N, logits_NV.detach().argmax(-1) == wanted.ids_N
