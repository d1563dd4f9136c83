"""Settings from a TOML file and dotted options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, model_validator

from catalog.errors import UserError
from console.demo.config import DemoConfig
from console.job_settings import EvaluateJob, OpdJob, RlJob, SftJob
from console.settings import describe, load_settings
from envfactory.config import SynthConfig


class Loss(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["pg", "cispo"] = "pg"
    """Which formula."""
    clip: float = 0.2


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: str
    steps: int = 20
    """Optimizer steps."""
    efforts: tuple[int, ...] = (50, 100)
    loss: Loss = Loss()
    resume: bool = False

    @model_validator(mode="after")
    def _enough(self) -> Settings:
        if self.steps < 1:
            raise ValueError("steps must be at least 1")
        return self


def test_options_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('policy = "flash-nano"\nsteps = 5\n[loss]\nkind = "cispo"\n')
    loaded = load_settings(
        Settings, file, ["--steps=7", "--loss.clip", "-0.5", "--efforts", "[1, 2]", "--resume"]
    )
    assert loaded == Settings(
        policy="flash-nano", steps=7, efforts=(1, 2), loss=Loss(kind="cispo", clip=-0.5), resume=True
    )
    assert load_settings(Settings, None, ["--policy", "hf:a/b"]).policy == "hf:a/b"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--policy", "x", "--stps", "3"], "There is no setting stps. Did you mean steps?"),
        (["--policy", "x", "--loss.klip", "3"], "There is no setting loss.klip. Did you mean loss.clip?"),
        (["--policy", "x", "--steps", "0"], "steps must be at least 1"),
        (["--policy", "x", "--steps", "few"], "steps: Input should be a valid integer"),
        (["--policy", "x", "--loss.kind", "ppo"], "loss.kind: Input should be 'pg' or 'cispo'"),
        (["--policy", "x", "--steps.a", "1", "--steps", "2", "--steps.b", "3"], "steps is a value"),
        ([], "The setting policy is required"),
        (["policy"], "is not a setting: write --NAME VALUE"),
    ],
)
def test_mistakes_name_the_setting(options: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)) as caught:
        load_settings(Settings, None, options)
    assert "\n" not in str(caught.value)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "fast.toml").write_text("policy = ")
    with pytest.raises(UserError, match=r"Did you mean fast\.toml"):
        load_settings(Settings, tmp_path / "fats.toml")
    with pytest.raises(UserError, match="not valid TOML"):
        load_settings(Settings, tmp_path / "fast.toml")


def test_every_setting_is_described() -> None:
    lines = {name: (default, note) for name, default, note in describe(Settings)}
    assert lines["--steps"] == ("20", "Optimizer steps.")
    assert lines["--loss.kind"] == ("pg", "Which formula.")
    assert lines["--policy"][0] == "required"


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
JOBS = {"sft": SftJob, "rl": RlJob, "opd": OpdJob, "evaluate": EvaluateJob}


def test_every_shipped_file_loads() -> None:
    shipped = {file.stem: file for file in EXAMPLES.glob("*.toml")}
    assert shipped.keys() >= JOBS.keys()
    for name, model in JOBS.items():
        load_settings(model, shipped[name])
    job = load_settings(RlJob, shipped["rl"])
    assert job.resolved_service().efforts == job.train.effort.efforts == (50, 100)


NUMBERED: dict[str, type[BaseModel]] = {
    "synth": SynthConfig,
    "evaluate": EvaluateJob,
    "sft": SftJob,
    "rl": RlJob,
    "demo": DemoConfig,
}
MAY_BE_NEGATIVE = ("seed", "failed_at")


@pytest.mark.parametrize("name", NUMBERED)
def test_no_number_of_a_job_may_be_negative_or_infinite(name: str) -> None:
    numbers = [
        option
        for option, default, _ in describe(NUMBERED[name])
        if re.fullmatch(r"[\d.e-]+", default) and ".teachers." not in option
    ]
    assert len(numbers) > 8
    accepted: list[str] = []
    for option in numbers:
        for value in ("-1", "nan", "inf"):
            try:
                load_settings(NUMBERED[name], None, [f"{option}={value}"])
                accepted.append(f"{option} {value}")
            except UserError:
                continue
    assert [one for one in accepted if not one.endswith(tuple(f"{n} -1" for n in MAY_BE_NEGATIVE))] == []


def test_a_settings_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    place = tmp_path / "fast.toml"
    place.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"fast\.toml is not valid TOML"):
        load_settings(Settings, place, ["--policy", "tiny"])
