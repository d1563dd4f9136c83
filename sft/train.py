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
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from catalog.models import RunKind
from catalog.runs import RunFolder
from model.batch import Batch, pack
from model.batch import Sequence as PackedSequence
from model.policy import Policy
from model.targets import targets
from model.training import LossSum, TrainEngine, TrainResult, TrainState
from sft.config import SftConfig
from sft.data import Example, minibatch, select


def train(
    config: SftConfig, policy: Policy, examples: Sequence[Example], *, run: Path, dev: Sequence[Example] = ()
) -> TrainResult:
    """Train, or go on training, in the folder `run`; the policy is written to `run/policy`.

    Args:
        config: going on with other settings than those in `run/config.json` is an error.
        policy: the network to start from; its weights are replaced when `run` has a checkpoint.
        examples: all training samples, in any fixed order.
        dev: samples of which only the loss is measured.

    Raises:
        ValueError: no usable samples.
        UserError: `run` belongs to another configuration or another process.
        NonFiniteError: a loss or gradient was not finite; the run may go on from its checkpoint.
    """
    data = select(examples, max_tokens=config.max_tokens).examples
    engine = TrainEngine(
        policy.module.train(), config.optimizer, folder=run / "checkpoints",
        clip_norm=config.clip_norm, keep=config.checkpoint.keep, bias_speed=config.bias_speed,
    )  # fmt: skip
    resolved = config.model_dump(mode="json")
    with RunFolder.open(run, kind=RunKind.SFT, config=resolved, seed=config.seed, resume=True) as folder:
        state = TrainState(**(engine.resume() or {}))
        folder.rewind(state.step)
        while not state.finished:
            state = one_step(config, engine, policy, data, dev, state)
            folder.log(state.step, **state.last)
            if state.finished or state.step % config.checkpoint.every == 0:
                engine.save(vars(state))
        policy.save(run / "policy")
        folder.finish(state.last)
    return TrainResult(run / "policy", state.step, state.seconds, state.last)


def one_step(
    config: SftConfig,
    engine: TrainEngine,
    policy: Policy,
    data: Sequence[Example],
    dev: Sequence[Example],
    state: TrainState,
) -> TrainState:
    """One optimizer step, and the dev loss when it is due."""
    began = time.monotonic()
    chosen = minibatch(data, state.step, config.batch_samples, config.seed)
    count = sum(len(sample.targets) for sample in chosen)

    def loss(batch: Batch) -> LossSum:
        nll_N, hit_N = likelihoods(policy, chosen, batch)
        return LossSum(nll_N.sum(), {"accuracy": hit_N.sum() / count})

    report = engine.step(packed(chosen, config.micro_tokens), loss, denominator=count)
    took = time.monotonic() - began
    state = state.after(took, steps=config.steps, max_seconds=config.max_seconds)
    last = {"loss": report.loss, **report.metrics, "grad_norm": report.grad_norm, "lr": report.lr}
    last |= {"loss_tokens": count, "seconds": state.seconds}
    last["tokens_per_s"] = sum(len(sample.tokens) for sample in chosen) / took
    if dev and (state.finished or state.step % config.eval_every == 0):
        last["dev_loss"] = evaluate(policy, dev, config.micro_tokens)
    return replace(state, last=last)


@torch.no_grad()
def evaluate(policy: Policy, samples: Sequence[Example], micro_tokens: int) -> float:
    """Nats per loss-bearing token."""
    policy.module.eval()
    batches = packed(samples, micro_tokens)
    total = math.fsum(float(likelihoods(policy, samples, batch)[0].sum()) for batch in batches)
    policy.module.train()
    return total / sum(len(sample.targets) for sample in samples)


def packed(samples: Sequence[Example], micro_tokens: int) -> list[Batch]:
    """The samples in micro-batches, by best fit."""
    return pack([PackedSequence(sample.tokens, sample.start) for sample in samples], micro_tokens)


def likelihoods(policy: Policy, samples: Sequence[Example], batch: Batch) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of each target of a micro-batch, and whether it was the likeliest token."""
    wanted = targets(batch, [sample.targets for sample in samples])
    logits_NV = wanted.hidden(policy.hidden(batch)).float() @ policy.head().float().T
    nll_N = torch.nn.functional.cross_entropy(logits_NV, wanted.ids_N, reduction="none")
    return nll_N, logits_NV.detach().argmax(-1) == wanted.ids_N
