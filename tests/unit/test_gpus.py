"""Which GPUs a plan is for, where none is named."""

import pytest

from verl_megatron.config import gpus
from verl_megatron.planner.machine import MACHINES


@pytest.mark.parametrize(
    ("program", "machine"),
    [
        ("echo NVIDIA H100 80GB HBM3; echo NVIDIA H100 80GB HBM3", "h100"),
        ("echo NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("echo NVIDIA H200", "h200"),
        ("echo NVIDIA B200", "b200"),
        ("echo Tesla V100", "h200"),
        ("echo No devices were found; exit 6", "h200"),
        ("echo NVIDIA H100; sleep 9", "h200"),
        (None, "h200"),
    ],
)
def test_a_plan_is_for_the_gpus_of_this_host(tmp_path, monkeypatch, program, machine):
    if program is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{program}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpus, "ASKING_S", 2.0 if "sleep" in (program or "") else 60.0)
    assert gpus.machine_here() == machine


def test_all_names_are_of_machines():
    assert {*gpus.MACHINES.values(), gpus.USUAL} <= MACHINES.keys()
