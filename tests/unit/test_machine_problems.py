"""What a machine without GPUs refuses before ranks start."""

import pytest

from parallel import device
from verl_megatron.config import SFTConfig, TrainerConfig
from verl_megatron.launch.ranks import machine_problems

ASKED = {
    "engine.dtype": "needs GPUs that compute in fp8, and this machine has none; use auto",
    "reference.dtype": "leave it at auto",
    "teacher.dtype": "leave it at auto",
    "reward.dtype": "leave it at auto",
    "rollout.weight_dtype": "set rollout.dtype=bfloat16",
}


@pytest.mark.parametrize("setting", ASKED)
def test_fp8_needs_gpus(monkeypatch, setting):
    config = TrainerConfig()
    assert machine_problems(config) == []
    section, _, name = setting.partition(".")
    setattr(getattr(config, section), name, "fp8")
    monkeypatch.setattr(device, "is_gpu", lambda: False)
    (problem,) = machine_problems(config)
    assert problem.startswith(f"{setting}=fp8 ") and problem.endswith(ASKED[setting])
    monkeypatch.setattr(device, "is_gpu", lambda: True)
    assert machine_problems(config) == []


def test_trials_on_a_cpu_and_supervised_runs(monkeypatch):
    monkeypatch.setattr(device, "is_gpu", lambda: False)
    config = TrainerConfig()
    config.rollout.weight_dtype, config.rollout.dtype = "fp8", "bfloat16"
    assert machine_problems(config) == []
    supervised = SFTConfig()
    supervised.engine.dtype = "fp8"
    assert len(machine_problems(supervised)) == 1
