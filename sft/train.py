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
from dataclasses import dataclass
from pathlib import Path

import torch
from model.batch import Sequence as PackedSequence
from model.batch import pack
from model.policy import Policy
from torch import Tensor

from model.checkpoints import Checkpoints, JsonlMonitor, claim_run, read_json, write_json
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
        config: written to `run/config.json`; going on with other settings is an error.
        policy: the network to start from; its weights are replaced when `run` has a checkpoint.
        examples: all training samples, in any fixed order.
        dev: samples of which only the loss is measured.

    Raises:
        ValueError: no usable samples, or `run` belongs to another configuration.
        TrainingError: gradients that are not finite, step after step.
    """
    claim_run(run, config.model_dump(mode="json"))
    data = select(examples, max_tokens=config.max_tokens).examples
    engine = TrainEngine(policy, config.optimizer)
    checkpoints = Checkpoints(run / "checkpoints", config.checkpoint.keep)
    step, seconds, finished, last = resume(engine, checkpoints)
    monitor = JsonlMonitor(run / "metrics.jsonl", last_step=step)
    while not finished:
        began = time.monotonic()
        progress = max(step / config.steps, seconds / config.max_seconds if config.max_seconds else 0.0)
        chosen = minibatch(data, step, config.batch_samples, config.seed)
        loss, correct, count = accumulate(engine, chosen, config.micro_tokens)
        stats = engine.step(progress)
        step += 1
        seconds += time.monotonic() - began
        last = {"loss": loss, "accuracy": correct / count}
        finished = step >= config.steps or (config.max_seconds is not None and seconds >= config.max_seconds)
        if dev and (finished or step % config.eval_every == 0):
            last["dev_loss"] = evaluate(policy, dev, config.micro_tokens)
        rate = sum(len(sample.tokens) for sample in chosen) / (time.monotonic() - began)
        monitor.log(step, {**last, **stats, "tokens_per_s": round(rate, 1), "seconds": round(seconds, 3)})
        if finished or step % config.checkpoint.every == 0:
            state = {"format": 1, "step": step, "seconds": seconds, "finished": finished, "last": last}
            checkpoints.write(step, lambda folder, state=state: save(engine, folder, state))
    monitor.close()
    folder = checkpoints.folder(step) / "policy"
    return SftResult(folder, step, seconds, last["loss"], last.get("dev_loss"))


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


def resume(engine: TrainEngine, checkpoints: Checkpoints) -> tuple[int, float, bool, dict[str, float]]:
    """(steps done, seconds spent, finished, last metrics) of the newest checkpoint, with the engine
    restored."""
    newest = checkpoints.latest()
    if newest is None:
        return 0, 0.0, False, {}
    engine.restore(checkpoints.folder(newest))
    state = read_json(checkpoints.folder(newest) / "state.json")
    return state["step"], state["seconds"], state["finished"], state["last"]


def save(engine: TrainEngine, folder: Path, state: dict[str, object]) -> None:
    """Fill a checkpoint's folder."""
    engine.save(folder)
    write_json(folder / "state.json", state)
