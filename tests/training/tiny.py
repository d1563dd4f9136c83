"""A tiny network and recorded trajectories for the trainers' tests: real parts, small."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from catalog.models import Failure, Verdict
from catalog.trajectory import Segment, Trajectory
from model.flash import FlashPolicy
from rollout.service import RolloutBatch
from rollout.staleness import histogram, loss_mask
from sft.data import Example

VOCAB = 128
ROOT = Path(__file__).parents[2]


def policy(seed: int = 0) -> FlashPolicy:
    """`flash-tiny` with fresh weights: window 8, all three kinds of layers, FP4 memory."""
    torch.set_num_threads(1)  # a fixed number, for bitwise equality; one, because the nets are tiny
    return FlashPolicy.fresh("flash-tiny", seed=seed)


def examples(count: int = 24, seed: int = 0) -> list[Example]:
    """Learnable samples: a prompt, an answer that repeats its third token, a tool result, the answer
    again."""
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


def trajectories(
    net: FlashPolicy, step: int, *, version: int, prompts: int = 3, samples: int = 4, temperature: float = 1.0
) -> list[Trajectory]:
    """Groups of samples of prompts that depend on `step` alone."""
    made = []
    for p in range(prompts):
        rng = random.Random(f"{step}:{p}")
        prompt = [rng.randrange(4, VOCAB) for _ in range(rng.randrange(6, 24))]
        made += [
            _Sample(f"{step}-{p}-{s}", f"{step}-{p}", prompt, 1000 * step + 10 * p + s)
            for s in range(samples)
        ]
    _speak(net, made, temperature)
    return [one.trajectory(net.name, version, temperature) for one in made]


class _Sample:
    """Two turns of a few tokens with a tool result between them.

    The reward is the share of even ids among the sampled ones; every seventh sample is lost to a fault
    of ours.
    """

    def __init__(self, id: str, group: str, prompt: list[int], seed: int) -> None:
        self.id, self.group, self.prompt, self.seed = id, group, len(prompt), seed
        self.rng = random.Random(seed)
        self.tokens: list[int] = []
        self.logprobs: dict[int, float] = {}
        result = [self.rng.randrange(4, VOCAB) for _ in range(self.rng.randrange(1, 5))]
        self.plan = [prompt, *[None] * self.rng.randrange(2, 5), result, *[None] * self.rng.randrange(2, 5)]

    def trajectory(self, name: str, version: int, temperature: float) -> Trajectory:
        lost = Failure(boundary="sandbox", kind="lost", message="gone") if self.seed % 7 == 6 else None
        places = range(len(self.tokens))
        even = [self.tokens[at] % 2 == 0 for at in self.logprobs]
        return Trajectory(
            id=self.id,
            task_id=self.group,
            run_id="test",
            agent="test",
            policy=name,
            group=self.group,
            temperature=temperature,
            token_ids=tuple(self.tokens),
            sampled=tuple(at in self.logprobs for at in places),
            logprobs=tuple(self.logprobs.get(at) for at in places),
            versions=tuple(version if at in self.logprobs else None for at in places),
            segments=(
                Segment(kind="prefill", start=0, end=self.prompt, version=version, kv_version=version),
                Segment(
                    kind="decode", start=self.prompt, end=len(places), version=version, kv_version=version
                ),
            ),
            verdict=None if lost else Verdict(reward=sum(even) / len(even)),
            failure=lost,
        )


@torch.no_grad()
def _speak(net: FlashPolicy, made: list[_Sample], temperature: float) -> None:
    """Sample through the policy's own cache, as an engine does: prefill, decode, tool result, decode."""
    net.module.eval()
    cache = net.open_cache(len(made), 64)
    logits: dict[int, torch.Tensor] = {}
    for turn in range(max(len(one.plan) for one in made)):
        slots = [slot for slot, one in enumerate(made) if turn < len(one.plan)]
        news = []
        for slot in slots:
            one = made[slot]
            new = one.plan[turn]
            if new is None:
                logp = torch.log_softmax(logits[slot].float() / temperature, -1)
                token = one.rng.choices(range(VOCAB), weights=logp.exp().tolist())[0]
                one.logprobs[len(one.tokens)] = float(logp[token])
                new = [token]
            one.tokens += new
            news.append(new)
        logits |= dict(zip(slots, cache.extend(slots, news), strict=True))
    net.module.train()


def batch_of(
    found: Sequence[Trajectory], *, number: int = 1, version: int = 0, bound: int = 2
) -> RolloutBatch:
    """What the service makes of these trajectories."""
    judged = [t for t in found if t.reward is not None]
    masks = [loss_mask(t, version, bound) for t in judged]
    return RolloutBatch(
        number=number,
        version=version,
        trajectories=tuple(judged),
        masks=tuple(masks),
        failed=tuple(t for t in found if t.reward is None),
        dropped=(),
        metrics={"utilisation": 1.0},
        staleness=histogram(judged, masks, version),
    )


class Recorder:
    """A service in a few lines: samples on demand from the weights published `lag` publications ago.

    What it hands out for step k depends on those weights and on k alone, so a resumed run may be
    compared bit for bit. Prompts come again after `cycle` steps.
    """

    def __init__(self, *, lag: int = 0, prompts: int = 3, samples: int = 4, cycle: int = 1000) -> None:
        self.cycle = cycle
        self.lag, self.prompts, self.samples = lag, prompts, samples
        self.published: dict[int, dict[str, torch.Tensor]] = {}
        self.handed_out: list[int] = []

    async def open(self, weights: Any, trained: int) -> Recorder:
        self.published = {trained: {k: v.clone() for k, v in weights.items()}}
        self.version = trained
        return self

    async def next_batch(self) -> RolloutBatch:
        behind = max(min(self.published), self.version - self.lag)
        net = policy()
        net.module.load_state_dict(self.published[behind])
        found = trajectories(
            net, self.version % self.cycle, version=behind, prompts=self.prompts, samples=self.samples
        )
        self.handed_out.append(self.version)
        return batch_of(found, number=self.version + 1, version=self.version)

    async def publish(self, weights: Any, version: int) -> None:
        assert version == self.version + 1, "publications go up one by one"
        self.published[version] = {k: v.clone() for k, v in weights.items()}
        self.version = version

    async def close(self) -> None:
        self.published.clear()


def weights_equal(left: FlashPolicy, right: FlashPolicy) -> bool:
    """Bit for bit."""
    other = right.module.state_dict()
    return all(torch.equal(value, other[name]) for name, value in left.module.state_dict().items())


def run_and_kill(program: str, run: Path, sign_of_life: Path, *, kills: int, seed: int = 0) -> int:
    """Run a Python program until it ends by itself; `kills` times before, SIGKILL it at a random moment.

    Args:
        program: source; gets `run` as its argument.
        sign_of_life: a file that grows while the program works; kills come after it grew.

    Returns:
        How often it was killed while it worked.
    """
    rng = random.Random(seed)
    done = 0
    while True:
        size = sign_of_life.stat().st_size if sign_of_life.exists() else 0
        child = subprocess.Popen([sys.executable, "-W", "error", "-c", program, str(run)], cwd=ROOT)
        if done < kills:
            while child.poll() is None and (not sign_of_life.exists() or sign_of_life.stat().st_size <= size):
                time.sleep(0.002)
            time.sleep(rng.uniform(0.0, 0.1))
            if child.poll() is None:
                child.kill()
                done += 1
        if child.wait(timeout=100) == 0:
            return done
        assert child.returncode == -signal.SIGKILL, "the program failed by itself"
