"""tests/gpu/check.sh with a Python that only says something: what passes, and what does not."""

import os
import subprocess

import pytest

from tests.worlds import ROOT

GPUS = "seq 2 | sed 's/^/GPU /'"


@pytest.fixture
def check(tmp_path):
    def run(stage: str, *, python: str, **variables: str) -> subprocess.CompletedProcess:
        for name, script in (("python", python), ("nvidia-smi", GPUS)):
            (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
            (tmp_path / name).chmod(0o755)
        (tmp_path / "random/save").mkdir(parents=True, exist_ok=True)
        (tmp_path / "random/save/reward.py").touch()
        folders = {"LOGS": str(tmp_path / "logs"), "SCRATCH": str(tmp_path / "random")}
        environment = os.environ | folders | variables | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = ["bash", str(ROOT / "tests/gpu/check.sh"), stage]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    return run


def test_an_unknown_stage_is_refused(check):
    found = check("rezume", python="exit 0")
    assert found.returncode == 2 and "there is no stage rezume; choose among:" in found.stderr
    assert " resume " in found.stderr


@pytest.mark.parametrize(("said", "status"), [("gives all 12 recorded numbers", 0), ("resuming", 1)])
def test_resuming_passes_only_with_repeated_numbers(check, said, status, tmp_path):
    (tmp_path / "logs/resume/checkpoint/step_4").mkdir(parents=True)  # of an earlier call
    assert check("resume", python=f"echo {said}").returncode == status
    assert not (tmp_path / "logs/resume").exists()


def test_a_run_that_says_enough_and_fails_does_not_pass(check):
    found = check("save", python="echo resuming; exit 3", ONLY="save_resumed")
    assert found.returncode == 1 and "save_resumed" in found.stdout
