"""Settings of a synthesis. No torch, no I/O."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from envfactory.bugs import BugConfig, Split
from envfactory.candidates import CandidateConfig
from envfactory.repair import RepairConfig


class SynthConfig(BaseModel):
    """How many tasks to make of a source, and how hard to look at each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: dict[Split, NonNegativeInt] = {"train": 50, "dev": 10, "test": 100}
    """Accepted tasks wanted for each split; the synthesis stops proposing when it has them."""
    choices: bool = True
    """Also make a candidate set for each accepted task (the `repair-choice` agent needs one), and count a
    task towards `tasks` only when it has one."""
    gold_runs: int = Field(default=2, ge=1)
    """k: times that the gold state must pass."""
    max_fail_to_pass: PositiveInt = 40
    max_visible: int = Field(default=1, ge=1)
    """Failing tests that the agent is shown."""
    max_test_files: PositiveInt = 2
    """Test files of one verifier, those of the most specific tests first."""
    slow_s: PositiveFloat = 4.0
    """Test files that take longer on the clean tree are left out."""
    history: bool = True
    """Mine the source's history as well."""
    history_tasks: int = Field(default=8, ge=0)
    """Most tasks of the history that are examined, newest first."""
    mining_pairs: int = Field(default=1, ge=1)
    """Neighbouring revisions looked at, newest first. No time, so that every run finds the same."""
    parallel: PositiveInt = 12
    """Bugs examined at once. They are taken in order, so a slow one must not starve the jails."""
    jobs: PositiveInt = 2
    """Jails that run at once."""
    bugs: BugConfig = BugConfig()
    repair: RepairConfig = RepairConfig(budget=40)
    candidates: CandidateConfig = CandidateConfig()
