"""Settings of the demo. Budgets are steps and counts, not seconds, so that two runs do the same."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from envfactory.bugs import BugConfig
from envfactory.config import SynthConfig
from model.train_config import OptimizerConfig, ScheduleConfig
from opd.config import OpdConfig, TeacherConfig
from rl.config import EffortConfig, RlConfig
from rollout.config import EngineConfig, SamplingConfig, ServiceConfig
from sft.config import SftConfig

EFFORTS = (25, 100)


def _gentle(steps: int) -> OptimizerConfig:
    """AdamW that warms up and comes down over `steps`: the shipped networks know the game already."""
    schedule = ScheduleConfig(warmup=3, decay_from=steps // 2, decay_to=steps)
    return OptimizerConfig(kind="adamw", lr=2e-4, weight_decay=0.0, schedule=schedule)


def _laid_over(default: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Nested settings with changes."""
    result = dict(default)
    for name, value in changes.items():
        old = result.get(name)
        result[name] = _laid_over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


class DemoConfig(BaseModel):
    """The whole job; every part is the settings model of its room."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _tables_change_the_demo_s_own_defaults(cls, values: Any) -> Any:
        """A table that names some settings of a part leaves the demo's others as they are."""
        if not isinstance(values, dict):
            return values
        merged = dict(values)
        for name, value in values.items():
            default = cls.model_fields[name].default if name in cls.model_fields else None
            if isinstance(value, dict) and isinstance(default, BaseModel):
                merged[name] = _laid_over(default.model_dump(exclude_unset=False), value)
        return merged

    source: str = "pypi:boltons"
    seed: int = 0
    deterministic: bool = False
    """Sequential rollout on an exact engine: two runs end in the same table, killed in between or not."""
    synth: SynthConfig = SynthConfig(bugs=BugConfig(seed=3))
    """Held-out bugs of seeds 0, 1 and 2 were seen while the demo was made."""
    sft_share: float = Field(0.3, gt=0, le=0.3)
    """Share of the training functions whose tasks SFT may see; RL has the others."""
    variants: PositiveInt = 24
    """Demonstrations of one task."""
    sft: SftConfig = SftConfig(steps=12, batch_samples=16, micro_tokens=4096, optimizer=_gentle(12))
    slim: SftConfig = SftConfig(
        policy="flash-slim", steps=12, batch_samples=16, micro_tokens=4096, optimizer=_gentle(12)
    )
    """The second teacher: a narrower network, fine-tuned on the same demonstrations."""
    rl: RlConfig = RlConfig(
        steps=20,
        micro_tokens=4096,
        call_tokens={"try": 8.0},
        effort=EffortConfig(efforts=EFFORTS, k0=0.3, length_norm=64.0, cap=0.3),
        optimizer=OptimizerConfig(kind="adamw", lr=1e-4, weight_decay=0.0),
    )
    service: ServiceConfig = ServiceConfig(
        in_flight=96, batch_prompts=8, samples=4, efforts=EFFORTS, max_staleness=2
    )
    opd_service: ServiceConfig = ServiceConfig(
        in_flight=32, batch_prompts=4, samples=3, efforts=EFFORTS, max_staleness=2
    )
    engine: EngineConfig = EngineConfig(slots=96, max_tokens=640)
    opd: OpdConfig = OpdConfig(
        teachers=(TeacherConfig(name="rl", policy="set by the demo"),), steps=5, micro_tokens=4096
    )
    """Its teachers are those that the demo makes."""
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, top_p=0.95)
    """Of evaluations."""
    eval_effort: int = Field(100, ge=1, le=100)
    eval_samples: PositiveInt = 1
