"""The benchmark of what leaves the GPU, on a CPU rank."""

import re

import pytest

from tests.worlds import run_world
from verl_megatron.benchmarks.offload import InTurns
from verl_megatron.config import TrainerConfig
from verl_megatron.examples.toy import make_toy


def test_both_ways_are_measured_in_turns(tmp_path):
    make_toy(tmp_path)
    common = [
        "--config-name",
        "ppo_toy_cpu",
        f"data.train={tmp_path}/train.jsonl",
        "data.prompts_per_iteration=16",
        f"actor.path={tmp_path}/model",
    ]
    settings = [
        "actor.layout=tp1",
        "critic.layout=tp1",
        "rollout.tp=1",
        "rollout.max_tokens=4",
        "run.iterations=5",
        f"run.output_dir={tmp_path}/run",
    ]
    output = run_world("tools/bench/offload.py", 1, *common, "reshard.offload=all", *settings)
    assert "medians of 2 and 1 iterations, in turns" in output
    found = {
        name: (float(given), float(nothing))
        for name, given, nothing in re.findall(r"^(\w+) +(\d+\.\d{3}) +(\d+\.\d{3})$", output, re.MULTILINE)
    }
    phases = ("reshard", "rollout", "return", "log_probs", "values", "critic_update", "actor_update")
    for way in (0, 1):
        assert found["iteration"][way] >= sum(found[phase][way] for phase in phases) > 0
    told = float(re.search(r"with offload=all an iteration takes ([+-]\d+\.\d)%", output)[1])
    assert told == pytest.approx(100 * (found["iteration"][0] / found["iteration"][1] - 1), abs=0.5)
    assert not (tmp_path / "run/actor").exists() and not (tmp_path / "run/checkpoint").exists()


@pytest.mark.parametrize(
    ("offload", "iterations", "message"),
    [("none", 8, "reshard.offload=none is what"), ("all", 3, "run.iterations=3 leaves nothing")],
)
def test_what_cannot_be_compared_is_refused(offload, iterations, message):
    config = TrainerConfig()
    config.reshard.offload, config.run.iterations = offload, iterations
    with pytest.raises(ValueError, match=message):
        InTurns(config)
