"""The built wheel, installed into an environment of its own, works without a clone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds import ROOT

WORK = ("build", "outputs", "site", "*.egg-info", "__pycache__", ".*")
RECIPE = """
defaults: [ppo_toy_cpu, _self_]
actor:
  path: outputs/toy/sft/actor
  lr: 2.5e-4
"""


def command(*words: object, folder: Path) -> str:
    """What a command prints, without the clone on the path; the test fails if the command does."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, words)), cwd=folder, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_wheel_works_without_a_clone(tmp_path):
    source, work = tmp_path / "source", tmp_path / "work"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*WORK))
    work.mkdir()
    command(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path, source, folder=tmp_path)
    (wheel,) = tmp_path.glob("verl_megatron-*.whl")
    command(sys.executable, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    programs = tmp_path / "venv/bin"
    command(programs / "pip", "install", f"{wheel}[cpu]", folder=work)

    listed = command(programs / "verl-megatron", "recipes", "list", folder=work)
    assert "ppo_toy_cpu" in listed and "llama3_8b_grpo" in listed
    said = command(programs / "verl-megatron", "quickstart", "run.iterations=2", folder=work)
    assert "validation accuracy" in said and (work / "outputs/toy/ppo/actor/model.safetensors").is_file()
    (work / "own.yaml").write_text(RECIPE)
    planned = command(programs / "verl-megatron", "train", "--config", "own.yaml", "--dry-run", folder=work)
    assert "tp2pp2" in planned
