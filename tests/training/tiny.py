"""A tiny network and recorded trajectories for the trainers' tests: real parts, small."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from catalog.models import Segment, Trajectory, Verdict
from model.flash import FlashPolicy
from sft.data import Example

VOCAB = 128


def policy(seed: int = 0) -> FlashPolicy:
    """`flash-tiny` with fresh weights: window 8, all three kinds of layers, FP4 memory."""
    torch.set_num_threads(1)  # a fixed number, for bitwise equality; one, because the nets are tiny
    return FlashPolicy.fresh("flash-tiny", seed=seed)


def examples(count: int = 24, seed: int = 0) -> list[Example]:
    """Learnable samples: a prompt, then an answer that repeats its third token, then a tool result, then again."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        prompt = [rng.randrange(4, VOCAB) for _ in range(rng.randrange(6, 24))]
        tool = [rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, 5))]
        tokens = [*prompt, prompt[2], 3, *tool, prompt[2], 3]
        n = len(prompt)
        targets = (n, n + 1, len(tokens) - 2, len(tokens) - 1)
        made.append(Example(f"sample-{i}", tuple(tokens), targets, max(0, n - 8)))
    return made


@torch.no_grad()
def sample(
    net: FlashPolicy, prompt: Sequence[int], *, id: str, group: str, version: int, seed: int, reward: float | None,
    effort: int | None = None, temperature: float = 1.0, turns: int = 2,
) -> Trajectory:  # fmt: skip
    """Sample through the policy's own cache, as an engine does: prefill, decode, a tool result, decode."""
    net.module.eval()
    rng = random.Random(seed)
    cache = net.open_cache(1, 256)
    tokens, sampled, logprobs, versions = list(prompt), [False] * len(prompt), [None] * len(prompt), []
    versions = [None] * len(prompt)
    segments = [Segment(kind="prefill", start=0, end=len(prompt), version=version, kv_version=version)]
    logits = cache.extend([0], [list(prompt)])[0]
    for turn in range(turns):
        for _ in range(rng.randrange(2, 6)):
            logp = torch.log_softmax(logits.float() / temperature, -1)
            token = rng.choices(range(VOCAB), weights=logp.exp().tolist())[0]
            tokens.append(token)
            sampled.append(True)
            logprobs.append(float(logp[token]))
            versions.append(version)
            logits = cache.extend([0], [[token]])[0]
        if turn + 1 < turns:
            result = [rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, 5))]
            tokens += result
            sampled += [False] * len(result)
            logprobs += [None] * len(result)
            versions += [None] * len(result)
            logits = cache.extend([0], [result])[0]
    net.module.train()
    verdict = failure = None
    if reward is not None:
        verdict = Verdict(reward=reward)
    else:
        failure = {"boundary": "sandbox", "kind": "lost", "message": "gone"}
    return Trajectory(
        id=id, task_id=group, run_id="test", agent="test", policy=net.name, effort=effort, group=group,
        temperature=temperature, token_ids=tuple(tokens), sampled=tuple(sampled), logprobs=tuple(logprobs),
        versions=tuple(versions), segments=tuple(segments), verdict=verdict, failure=failure,
    )  # fmt: skip


def batch(
    net: FlashPolicy, step: int, *, version: int, prompts: int = 3, samples: int = 4, domain: str = ""
) -> list[Trajectory]:
    """Groups of samples; reward 1 when the first sampled token is even. Every seventh sample is lost."""
    made = []
    for p in range(prompts):
        rng = random.Random(f"{step}:{p}")
        prompt = [rng.randrange(4, VOCAB) for _ in range(rng.randrange(6, 24))]
        for s in range(samples):
            seed = 1000 * step + 10 * p + s
            id = f"{step}-{p}-{s}"
            found = sample(
                net, prompt, id=id, group=f"{domain}g{step}-{p}", version=version, seed=seed, reward=0.0
            )
            first = found.token_ids[found.sampled.index(True)]
            reward = float(first % 2 == 0)
            if seed % 7 == 6:
                lost = {"boundary": "sandbox", "kind": "lost", "message": "gone"}
                made.append(
                    Trajectory.model_validate(found.model_dump() | {"verdict": None, "failure": lost})
                )
            else:
                made.append(found.model_copy(update={"verdict": Verdict(reward=reward)}))
    return made


class Sampler:
    """Trajectories from the newest published weights, or from ones `lag` publications older: a service in one line.

    What it hands out in step k depends on the weights alone, so that a resumed run can be compared bit for bit.
    """

    def __init__(self, *, lag: int = 0, prompts: int = 3, samples: int = 4) -> None:
        self.lag, self.prompts, self.samples = lag, prompts, samples
        self.published: dict[int, FlashPolicy] = {}
        self.consumed: list[str] = []
        self.starts: list[tuple[int, int]] = []
        self.version = -1

    async def start(self, weights: Path, version: int, consumed: Sequence[str]) -> None:
        self.starts.append((version, len(consumed)))
        self.consumed = list(consumed)
        await self.publish(weights, version)

    async def next_batch(self) -> list[Trajectory]:
        behind = max(min(self.published), self.version - self.lag)
        made = batch(
            self.published[behind], self.version, version=behind, prompts=self.prompts, samples=self.samples
        )
        assert not {t.id for t in made} & set(self.consumed), "a sample was handed out twice"
        self.consumed += [t.id for t in made]
        return made

    async def publish(self, weights: Path, version: int) -> None:
        assert version > self.version, "publications only go up"
        self.published[version] = FlashPolicy.open(weights)
        self.version = version

    def metrics(self) -> Mapping[str, float]:
        return {"utilisation": 1.0}

    async def close(self) -> None:
        self.published.clear()
