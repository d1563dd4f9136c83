"""Reinforcement learning in one file, to read before `rl/train.py`: `python examples/rl_loop.py [steps]`.

A tiny network with fresh weights reads a prompt of random tokens and samples eight more; the reward is the
share of even ids among them. Everything is the real thing, small: sampling through the key-value cache with
FP4 memory, leave-one-out advantages, log-probabilities recomputed on packed rows that share their prompt, the
clipped loss with one denominator, the shared optimizer engine. Against `rl.train` it leaves out what makes RL
asynchronous: the service, staleness, journals, checkpoints, and sandboxes, tools and effort besides.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from typing import Literal

import torch

from model.batch import Batch, Sequence
from model.flash import FlashPolicy
from model.forks import pack_forks
from model.network import Network
from model.presets import preset
from model.targets import targets, token_logprobs
from model.train_config import OptimizerConfig
from model.training import LossSum, TrainEngine
from rl.advantages import Scored, advantages
from rl.config import LossConfig
from rl.losses import TokenData, TokenStats, denominator, policy_loss

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 40, 8


@dataclass
class Sample:
    """One rollout: the prompt, what was sampled, and with which log-probabilities."""

    id: str
    group: str
    prompt: list[int]
    said: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def reward(self) -> float:
        return sum(token % 2 == 0 for token in self.said) / len(self.said)


@torch.no_grad()
def rollout(policy: FlashPolicy, step: int, rng: random.Random) -> list[Sample]:
    """Sample all groups at once, one cache slot a sample; a prompt is read once and forked."""
    policy.module.eval()
    samples: list[Sample] = []
    cache = policy.open_cache(PROMPTS * SAMPLES, PROMPT_TOKENS + NEW_TOKENS)
    rows: list[torch.Tensor] = []
    for p in range(PROMPTS):
        prompt = [rng.randrange(policy.vocab) for _ in range(PROMPT_TOKENS)]
        first = len(samples)
        logits_V = cache.extend([first], [prompt])[0]
        for s in range(SAMPLES):
            samples.append(Sample(f"{step}-{p}-{s}", f"{step}-{p}", prompt))
            rows.append(logits_V)
            if s:
                cache.fork(first, first + s)
    logits_NV = torch.stack(rows)
    for left in reversed(range(NEW_TOKENS)):
        logprobs_NV = torch.log_softmax(logits_NV, -1)
        for sample, logprobs_V in zip(samples, logprobs_NV, strict=True):
            token = rng.choices(range(policy.vocab), weights=logprobs_V.exp().tolist())[0]
            sample.said.append(token)
            sample.logprobs.append(float(logprobs_V[token]))
        if left:
            logits_NV = cache.extend(range(len(samples)), [[sample.said[-1]] for sample in samples])
    policy.module.train()
    return samples


def main(steps: int = 20, seed: int = 0, memory_format: Literal["fp4", "none"] = "fp4") -> list[float]:
    """Train and return the mean reward of each step.

    With memory in FP4 a value between two roundings may go one way in the sampler and the other in the
    trainer, which moves a log-probability by some thousandths; without, they agree to float32 rounding.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    config = preset("flash-tiny").model_copy(update={"memory_format": memory_format})
    policy = FlashPolicy(config, Network(config))
    optimizer = OptimizerConfig(kind="adamw", lr=1e-2, weight_decay=0.0, eps=1e-8)
    engine = TrainEngine(policy.module, optimizer, bias_speed=0.0)
    losses = LossConfig()
    rewards: list[float] = []
    for step in range(steps):
        # 1. Act. 2. Compare each sample with the others of its group.
        samples = rollout(policy, step, rng)
        judged = advantages([Scored(s.id, s.group, None, s.reward) for s in samples])
        kept = [sample for sample in samples if sample.id in judged.values]
        rewards.append(sum(sample.reward for sample in samples) / len(samples))
        if not kept:
            continue

        # 3. Lay the samples out; a prompt is computed once for its group.
        start = max(0, PROMPT_TOKENS - policy.config.window)
        sequences = [Sequence(sample.prompt + sample.said, start) for sample in kept]
        positions = [range(PROMPT_TOKENS, PROMPT_TOKENS + NEW_TOKENS)] * len(kept)
        needed_from = [PROMPT_TOKENS - 1] * len(kept)
        batches = pack_forks(sequences, [sample.group for sample in kept], needed_from, 4096)

        # 4. Their log-probabilities under the weights of now, the loss, one step.
        stats = TokenStats()

        def loss(batch: Batch, kept=kept, positions=positions, judged=judged, stats=stats) -> LossSum:
            wanted = targets(batch, positions)
            now_N, entropy_N = token_logprobs(
                wanted.hidden(policy.hidden(batch)), policy.head(), wanted.ids_N
            )
            yes_N = torch.ones(len(wanted), dtype=torch.bool)
            data = TokenData(
                rollout_N=wanted.lay([sample.logprobs for sample in kept]),
                advantage_N=wanted.spread([judged.values[sample.id] for sample in kept]),
                staleness_N=torch.zeros(len(wanted), dtype=torch.long),
                bears_N=yes_N,
                same_N=yes_N,
            )
            stats.update(losses, now_N.detach(), entropy_N, data)
            return LossSum(policy_loss(losses, now_N, now_N.detach(), data))

        over = denominator(losses, len(kept) * NEW_TOKENS, len(kept))
        report = engine.step(batches, loss, denominator=over)
        found = stats.metrics()
        print(
            f"step {step:3d}  reward {rewards[-1]:.3f}  entropy {found['entropy']:.2f}  "
            f"gradient {report.grad_norm:.3f}  trainer - sampler {found['mismatch_max']:.1e}"
        )
    return rewards


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
