"""What one attempt at one task did, token for token."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import model_validator

from catalog.models import BlobRef, Failure, Record, Verdict


class Turn(Record):
    """One message of a trajectory; `start` and `end` are offsets into its tokens."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str
    start: int
    end: int


class Segment(Record):
    """A stretch of tokens computed in one piece by one policy version."""

    kind: Literal["prefill", "decode", "replay"]
    start: int
    end: int
    version: int
    """Publication number of the weights that computed these tokens."""
    kv_version: int
    """Publication number of the weights that wrote the cached key-values they read; the oldest one."""
    window_hit: bool | None = None
    """For a replay: whether the sliding window was still cached."""
    interrupted: bool = False
    """The segment ended because training preempted it, not because the turn was over."""
    routing: BlobRef | None = None
    """Expert choices, uint8 [layers, tokens, top_k] in row-major order (zlib)."""


class ToolCall(Record):
    """One action of the agent and what came back."""

    name: str
    arguments: dict[str, Any]
    result: str
    outcome: str
    """`exited`, `timeout`, `oom`, ... (`sandbox.base.Outcome`), or `invalid` for an unreadable call."""
    exit_code: int | None = None
    duration_s: float = 0.0
    cached: bool = False


class Trajectory(Record):
    """Everything that one attempt at one task did, token for token.

    `token_ids`, `sampled`, `logprobs` and `versions` have the same length. `logprobs` and `versions`
    are None where the token was given, not sampled.
    """

    format: Literal[1] = 1
    id: str
    task_id: str
    run_id: str
    agent: str
    policy: str
    effort: int | None = None
    group: str = ""
    """Samples of one prompt share it."""
    seed: int = 0
    temperature: float = 1.0
    turns: tuple[Turn, ...] = ()
    token_ids: tuple[int, ...] = ()
    sampled: tuple[bool, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    """Natural logarithm of the probability under the distribution that was sampled from."""
    versions: tuple[int | None, ...] = ()
    kept: tuple[tuple[int, ...] | None, ...] | None = None
    """Per token the ids that top-p kept; None when nothing was cut."""
    segments: tuple[Segment, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    verdict: Verdict | None = None
    failure: Failure | None = None
    repercussion: bool = False
    truncated: bool = False
    config_epoch: int = 0
    cost_s: float = 0.0
    patch: str | None = None
    """Base64 of the git diff that was graded; None where the agent left none."""
    submitted: dict[str, str] = {}
    """Whole files that were graded instead: path -> blob."""
    foreign: dict[str, Any] = {}
    """For an imported trajectory: `format`, and the `document` as it was read."""

    @model_validator(mode="after")
    def _aligned(self) -> Trajectory:
        n = len(self.token_ids)
        if not len(self.sampled) == len(self.logprobs) == len(self.versions) == n:
            raise ValueError("token_ids, sampled, logprobs and versions must have one length")
        for i, is_sampled in enumerate(self.sampled):
            logprob = self.logprobs[i]
            if is_sampled != (self.versions[i] is not None) or is_sampled != (logprob is not None):
                raise ValueError(f"token {i}: sampled needs a log-probability and a version, given has none")
            if logprob is not None and not math.isfinite(logprob):
                raise ValueError(f"token {i}: log-probability {logprob} is not finite")
        return self

    @property
    def reward(self) -> float | None:
        return self.verdict.reward if self.verdict and not self.failure else None

    @property
    def sampled_tokens(self) -> int:
        return sum(self.sampled)
