"""`verl-megatron` on the toy job: it starts ranks itself, and asks and scores the model."""

import json
import subprocess
import sys

import pytest

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
