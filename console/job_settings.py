"""Settings of whole jobs: a trainer's, the rollout service's and the engine's together. No torch.

The TOML files of `examples/` show them; `posttrain train settings rl` lists every name.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from opd.config import OpdConfig
from rl.config import RlConfig
from rollout.agents.bash import BashConfig
from rollout.config import EngineConfig, SamplingConfig, ServiceConfig
from rollout.evaluate import EvaluationConfig
from sft.config import SftConfig


class Job(BaseModel):
    """Base: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ActingJob(Job):
    """A job in which a policy acts on tasks."""

    agent: Literal["repair-choice", "bash"] = "repair-choice"
    """The scaffold."""
    split: Literal["train", "dev", "test"] = "train"
    """Accepted tasks of this split are worked on."""
    source: str | None = None
    """Only tasks of this source, such as `pypi:boltons`."""
    limit: int | None = Field(None, ge=1)
    """At most so many tasks, the first by id."""
    jobs: int = Field(2, ge=1)
    """Jails that run tests at once."""
    engine: EngineConfig = EngineConfig()
    bash: BashConfig = BashConfig()
    """Limits of the agent `bash`, and what its commands may reach."""


class EvaluateJob(ActingJob):
    """`posttrain rollout evaluate`."""

    policy: str = "flash-nano"
    """A built-in network, a folder, or `hf:PATH`."""
    split: Literal["train", "dev", "test"] = "dev"
    """Accepted tasks of this split are worked on. Choose on dev; open test once."""
    evaluation: EvaluationConfig = EvaluationConfig()


class SftJob(Job):
    """`posttrain train sft`."""

    train: SftConfig = SftConfig.model_validate({})


class RlJob(ActingJob):
    """`posttrain train rl`. The service samples at the efforts that the trainer prices."""

    train: RlConfig = RlConfig.model_validate({})
    service: ServiceConfig = ServiceConfig()

    def resolved_service(self) -> ServiceConfig:
        changed = self.service.model_dump() | {"efforts": self.train.effort.efforts}
        return ServiceConfig.model_validate(changed)


class OpdJob(ActingJob):
    """`posttrain train opd`."""

    train: OpdConfig
    service: ServiceConfig = ServiceConfig(samples=1, sampling=SamplingConfig())
