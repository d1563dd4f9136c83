"""The records that rooms exchange: frozen, versioned, strict.

Every record carries `format`, the version of its own schema, so that a file found years later says how
to read it. Records hold ids and blob references, never the bytes of hidden tests or gold patches:
those are blobs, and they never enter an environment.
"""

from __future__ import annotations

import hashlib
import json
import math
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

BlobRef = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
"""A file by content: `sha256:` and 64 hexadecimal digits."""


class Record(BaseModel):
    """Base of every record: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Status(StrEnum):
    """Life of a task."""

    DRAFT = "draft"
    VALIDATED = "validated"
    ACCEPTED = "accepted"
    QUARANTINED = "quarantined"
    RETIRED = "retired"


class TestStatus(StrEnum):
    """Outcome class of one test. A missing test is ABSENT, which never equals an expected status."""

    __test__ = False

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    XPASSED = "xpassed"
    ABSENT = "absent"


class Origin(Record):
    """Where a task comes from."""

    kind: Literal["procedural", "commit", "release", "session", "log", "import"]
    source: str
    """The source as the user named it: `pypi:boltons`, a path or a URL."""
    revision: str
    """Release version or commit id of the state that the environment starts from."""
    path: str | None = None
    """File of the change, relative to the workspace, with forward slashes."""
    function: str | None = None
    """Qualified name inside the file of the function that the change touches."""
    operator: str | None = None
    """Name in `verifiers.operators` of the edit that made the bug (procedural tasks)."""
    licence: str | None = None


class Problem(Record):
    """What the agent is told."""

    statement: str
    visible_tests: tuple[str, ...] = ()
    """Test ids that the agent may run; a subset of the verifier's fail-to-pass ids."""
    interface: str = ""
    """Names and signatures that hidden tests use and the workspace does not show."""


class Limits(Record):
    """Resource limits of a sandbox."""

    memory_mb: int = 1024
    pids: int = 256
    disk_mb: int = 512
    timeout_s: float = 60.0


class Substrate(Record):
    """What a grader may run on instead of the task's own image, when many tasks share one package.

    `image` holds a clean workspace; `changes` turn it into this task's graded one, tests included. Built
    from the same trees as the task's image, and never shown to an agent.
    """

    image: str
    changes: BlobRef
    """JSON object: path -> base64 of the content, null deletes."""


class Environment(Record):
    """Where the agent works: an image, and nothing else."""

    image: str
    """Digest of the image manifest: `sha256:...`."""
    workdir: str = "/workspace"
    tree: str
    """Digest of the workspace's files as the agent finds them (`sandbox.trees.tree_digest`)."""
    limits: Limits = Limits()
    substrate: Substrate | None = None
    """Shared image for graders; None: they open the task's own image."""


class VerifierSpec(Record):
    """How a finished workspace is judged. Grading restores `protected` before it runs anything."""

    kind: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")] = "pytest"
    """`pytest`, or a name in `verifiers.judging.KINDS` or the entry point group `posttrain.verifiers`."""
    settings: dict[str, Any] = Field(default={}, exclude_if=lambda value: not value)
    """What verifiers other than pytest need, read by the verifier of that kind. Left out of the record
    where it is empty, so that ids and digests of pytest tasks do not depend on it."""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    expected: dict[str, TestStatus] = {}
    """The complete set of ids that the run must report, with the status of the gold run."""
    arguments: tuple[str, ...] = ()
    """Test files given to the runner, relative to the workspace."""
    protected: BlobRef
    """Tar of every test, conftest and ini file, restored over the workspace before grading."""
    allowed: tuple[str, ...]
    """Path prefixes that an agent's diff may touch; anything else is refused."""
    timeout_s: float = 60.0

    @model_validator(mode="after")
    def _ids_are_expected(self) -> VerifierSpec:
        if self.kind != "pytest":
            return self
        if self.settings:
            raise ValueError("settings are for other verifiers than pytest: remove them")
        if not self.fail_to_pass:
            raise ValueError("a verifier needs at least one fail-to-pass test")
        missing = (set(self.fail_to_pass) | set(self.pass_to_pass)) - set(self.expected)
        if missing:
            raise ValueError(f"no expected status for {sorted(missing)[:3]}")
        return self

    def digest(self) -> str:
        """Identity of the verifier, the key under which its verdicts are cached."""
        return digest_json(self.model_dump(mode="json"))


class Task(Record):
    """The triplet of problem, environment and verifier, with the hidden solution beside it."""

    format: Literal[1] = 1
    id: str
    origin: Origin
    problem: Problem
    environment: Environment
    verifier: VerifierSpec
    solution: BlobRef
    """Gold patch: a git diff from the environment's workspace to the solved one."""
    status: Status = Status.DRAFT
    split: Literal["train", "dev", "test"] | None = None
    foreign: BlobRef | None = None
    """For an imported task: what its document said that this record has no place for
    (`envfactory.formats.base.Foreign` as JSON)."""

    @staticmethod
    def make_id(slug: str, *parts: object) -> str:
        """`slug-<12 hex digits>`: the same inputs always give the same id."""
        return f"{slug}-{digest_json(list(parts))[7:19]}"


class Gate(Record):
    """One quality check with its evidence and cost."""

    name: str
    passed: bool | None
    """None: the check could not be carried out (infrastructure), which is not a rejection."""
    evidence: str
    cost_s: float = 0.0
    data: dict[str, Any] = {}


class SolveRate(Record):
    """Successes of one solver on one task, with its Wilson 95 % interval."""

    solver: str
    effort: int | None = None
    passed: int
    attempts: int

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.passed, self.attempts)


class Decision(Record):
    """One entry of a task's history."""

    actor: str
    action: Literal["created", "rewritten", "accepted", "rejected", "quarantined", "retired", "audited"]
    reason: str
    at: float
    """Seconds since the epoch."""


class Candidate(Record):
    """One possible repair: a single edit of one file of the buggy workspace."""

    operator: str
    path: str
    line: int
    before: str
    """The changed lines as they stand in the buggy workspace."""
    after: str
    content: BlobRef
    """The whole file after the edit."""


class CandidateSet(Record):
    """The choices that the `repair-choice` agent offers, found in the buggy workspace alone.

    `passes_visible` and `passes` are measured by running tests; the policy never sees them.
    """

    format: Literal[1] = 1
    task_id: str
    candidates: tuple[Candidate, ...]
    """In the order shown to the policy: shuffled by task id."""
    passes_visible: tuple[bool, ...]
    passes: tuple[bool, ...]
    """The verdict of the hidden tests."""
    messages: tuple[str, ...] = ()
    """What the visible test says about each; empty where it passes."""
    tried: int
    """Edits that the search ran before it stopped."""
    order: tuple[int, ...] = ()
    """Candidates (indices from 0) in the order in which the solver's search has them; its trajectory is
    what SFT learns from."""
    test_source: str = ""
    """Source of the visible failing test, shown to the policy."""
    failure: str = ""
    """What that test says in the buggy workspace, shown to the policy."""

    @property
    def chance(self) -> float:
        """Probability that one uniform pick passes the hidden tests."""
        return sum(self.passes) / len(self.passes)


class QualityReport(Record):
    """Gates, solve rates and history of one task."""

    format: Literal[1] = 1
    task_id: str
    gates: tuple[Gate, ...] = ()
    solve_rates: tuple[SolveRate, ...] = ()
    history: tuple[Decision, ...] = ()

    @property
    def accepted(self) -> bool:
        return bool(self.gates) and all(gate.passed for gate in self.gates)

    @property
    def rejected_by(self) -> str | None:
        """The first gate that failed."""
        return next((gate.name for gate in self.gates if gate.passed is False), None)


class Failure(Record):
    """Something of ours broke: typed by the boundary, never a reward of 0."""

    boundary: Literal["engine", "scaffold", "sandbox", "verifier", "budget"]
    kind: str
    message: str


class Verdict(Record):
    """Outcome of one grading."""

    format: Literal[1] = 1
    reward: float | None
    """1.0 passed, 0.0 failed, None: could not be judged, and `failure` says why."""
    tests: dict[str, TestStatus] = {}
    evidence: str = ""
    failure: Failure | None = None
    cached: bool = False
    duration_s: float = 0.0

    @model_validator(mode="after")
    def _unjudged_has_a_failure(self) -> Verdict:
        if (self.reward is None) != (self.failure is not None):
            raise ValueError("reward is None exactly when there is a failure")
        return self


class RunKind(StrEnum):
    SYNTHESIS = "synthesis"
    AUDIT = "audit"
    SFT = "sft"
    RL = "rl"
    OPD = "opd"
    EVALUATION = "evaluation"


class Run(Record):
    """One job. Its folder holds `config.json`, `metrics.jsonl`, trajectories and checkpoints."""

    format: Literal[1] = 1
    id: str
    kind: RunKind
    folder: str
    config: dict[str, Any]
    seed: int
    state: Literal["running", "finished", "failed"] = "running"
    created: float
    finished: float | None = None
    summary: dict[str, Any] = {}


def canonical_json(value: object) -> bytes:
    """One byte string for one value: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest_json(value: object) -> str:
    """`sha256:` of the canonical JSON of a value."""
    return "sha256:" + hashlib.sha256(canonical_json(value)).hexdigest()


def wilson(passed: int, attempts: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson score interval of a proportion (Wilson 1927). (0, 1) without attempts."""
    if attempts == 0:
        return (0.0, 1.0)
    p, n = passed / attempts, attempts
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (max(0.0, centre - half), min(1.0, centre + half))
