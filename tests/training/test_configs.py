"""Shipped settings load, and settings need no torch."""

import subprocess
import sys
import tomllib

import pytest
from pydantic import ValidationError

from opd.config import OpdConfig, TeacherConfig
from rl.config import RlConfig
from sft.config import SftConfig
from tests.training.tiny import ROOT

CONFIGS = {"sft": SftConfig, "rl": RlConfig, "opd": OpdConfig}


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_file_loads(name):
    values = tomllib.loads((ROOT / "examples" / f"{name}.toml").read_text("utf-8"))["train"]
    config = CONFIGS[name].model_validate(values)
    assert config.model_dump(exclude_unset=True, mode="json") == values
    with pytest.raises(ValidationError, match="extra"):
        CONFIGS[name].model_validate(values | {"lerning_rate": 1})


def test_settings_and_data_rules_import_without_torch():
    light = "sft.config, sft.data, rl.config, rl.data, rl.effort, rl.advantages, opd.config, rollout.handover"
    program = f"import sys, {light}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_teachers_need_different_names():
    twice = (TeacherConfig(name="a", policy="x"), TeacherConfig(name="a", policy="y"))
    with pytest.raises(ValidationError, match="different names"):
        OpdConfig(teachers=twice)
