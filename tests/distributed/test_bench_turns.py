"""Benchmarks whose iterations are in turns, on a CPU rank."""

import json
import re

import pytest

from tests.worlds import run_world
from verl_megatron.benchmarks.offload import OffloadInTurns
from verl_megatron.config import TrainerConfig
from verl_megatron.examples.toy import make_toy
from verl_megatron.observe.tracking import read_metrics


def job(tmp_path) -> list[str]:
    """A toy job of five iterations."""
    make_toy(tmp_path)
    return [
        "--config-name",
        "ppo_toy_cpu",
        f"data.train={tmp_path}/train.jsonl",
        "data.prompts_per_iteration=16",
        f"actor.path={tmp_path}/model",
        "actor.layout=tp1",
        "critic.layout=tp1",
        "rollout.tp=1",
        "rollout.max_tokens=4",
        "run.iterations=5",
        f"run.output_dir={tmp_path}/run",
    ]


def test_both_ways_are_measured_in_turns(tmp_path):
    earlier = tmp_path / "run/checkpoint/step_9/manifest.json"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("{}")
    output = run_world("tools/bench/offload.py", 1, *job(tmp_path), "reshard.offload=all")
    assert "medians of 2 and 1 iterations, in turns" in output
    found = {
        name: (float(given), float(nothing))
        for name, given, nothing in re.findall(r"^(\w+) +(\d+\.\d{3}) +(\d+\.\d{3})$", output, re.MULTILINE)
    }
    phases = ("reshard", "rollout", "return", "log_probs", "values", "critic_update", "actor_update")
    for way in (0, 1):
        assert found["iteration"][way] >= sum(found[phase][way] for phase in phases) > 0
    told = float(re.search(r"with offload=all an iteration takes ([+-]\d+\.\d)%", output)[1])
    ratio = found["iteration"][0] / found["iteration"][1]
    rounded = ratio * sum(0.0005 / seconds for seconds in found["iteration"])  # to milliseconds
    assert told == pytest.approx(100 * (ratio - 1), abs=100 * rounded + 0.1)
    assert not (tmp_path / "run/actor").exists() and [*(tmp_path / "run/checkpoint").rglob("*.json")] == [
        earlier
    ]


@pytest.mark.long
def test_sizes_of_micro_batches_are_measured_on_the_same_prompts(tmp_path):
    settings = ("engine.tokens_per_micro_batch=64", "run.iterations=6", "run.track_metrics=[console,jsonl]")
    record = ("rollout.record_interval=1", "rollout.record_prompts=16")
    output = run_world("tools/bench/batching.py", 1, *job(tmp_path), *settings, *record)
    assert "medians of 1 and 1 and 1 iterations, in turns" in output
    assert re.search(r"^micro-batches +fitted +64 +128$", output, re.MULTILINE)
    assert re.search(r"fitted budget, \d+\.\d{3} times as fast as with (64|128) tokens", output)
    rows = [row for row in read_metrics(tmp_path / "run") if "time/actor_update_s" in row]
    assert [("policy/tokens_per_micro_batch" in row) for row in rows] == [True, False, False] * 2
    drawn = []
    for step in range(1, 7):
        lines = (tmp_path / f"run/samples/step_{step}.jsonl").read_text().splitlines()
        drawn.append({json.loads(line)["prompt"] for line in lines})
    assert drawn == [drawn[0]] * 3 + [drawn[3]] * 3 and drawn[0] != drawn[3]


@pytest.mark.parametrize(
    ("offload", "iterations", "message"),
    [("none", 8, "reshard.offload=none is what"), ("all", 3, "run.iterations=3 leaves nothing")],
)
def test_what_cannot_be_compared_is_refused(offload, iterations, message):
    config = TrainerConfig()
    config.reshard.offload, config.run.iterations = offload, iterations
    with pytest.raises(ValueError, match=message):
        OffloadInTurns(config)
