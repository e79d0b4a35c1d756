"""`verl-megatron` on the toy job: it starts ranks itself, and asks and scores the model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.conftest import settings_of
from tests.worlds import ROOT, environment_of_ranks
from verl_megatron.observe.tracking import read_metrics


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "verl_megatron", *arguments],
        cwd=ROOT,
        env=environment_of_ranks(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def test_a_run_starts_the_ranks_that_it_needs(toy, tmp_path):
    small = [
        "run.iterations=1",
        "run.save_interval=1",
        "actor.layout=tp1",
        "critic.layout=tp1",
        "rollout.tp=2",
        "data.validation=",
    ]
    ended = command("train", *settings_of(toy, tmp_path / "run", *small))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(read_metrics(tmp_path / "run")) == 1 and "actor dp2" in ended.stdout

    out = tmp_path / "exported"
    exported = command("export", str(tmp_path / "run"), "--dtype", "fp32", "--out", str(out))
    assert exported.returncode == 0, exported.stdout + exported.stderr
    for name in ("actor", "critic"):
        own, again = weights_of(tmp_path / "run" / name), weights_of(out / name)
        assert own.keys() == again.keys() and all(own[key].equal(again[key]) for key in own), name
        assert (out / name / "tokenizer_config.json").is_file()
    missing = command("export", str(tmp_path / "run"), "--step", "7")
    assert missing.returncode == 2 and "--step 7" in missing.stderr and "checkpoints 1" in missing.stderr


def test_a_model_is_asked_and_scored(toy, tmp_path):
    model, prompts = str(toy / "model"), str(toy / "val.jsonl")
    few = ["rollout.max_tokens=6", "data.max_prompt_tokens=32", "data.validation_samples=5"]
    reward = f"{toy}/rewards.py:tenth"
    ended = command(
        *("evaluate", model, prompts, "--reward", reward, "--out", str(tmp_path / "scored.jsonl")),
        *("--samples", "2", "--ranks", "2", "data.validation_temperature=1.0", *few),
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    asked = [json.loads(line)["prompt"] for line in (toy / "val.jsonl").read_text().splitlines()[:5]]
    assert [row["prompt"] for row in rows[::2]] == asked == [row["prompt"] for row in rows[1::2]]
    scores = [len(row["response"]) / 10 for row in rows]
    assert [row["score"] for row in rows] == pytest.approx(scores)
    said = dict(part.rsplit(" ", 1) for part in ended.stdout.splitlines()[-1].split(", "))
    assert said["prompts"] == "5" and said["samples"] == "10"
    assert float(said["score"]) == pytest.approx(sum(scores) / len(scores), rel=1e-5)

    greedy = command("generate", model, prompts, "--out", str(tmp_path / "written.jsonl"), *few)
    assert greedy.returncode == 0, greedy.stdout + greedy.stderr
    written = [json.loads(line) for line in (tmp_path / "written.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in written] == asked and "score" not in written[0]
