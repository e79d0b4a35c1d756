"""A PPO run with `engine.sharding=full` on two ranks against one with replicated weights, and its resume."""

import pytest

from tests.end_to_end.conftest import TRAIN, settings_of
from tests.end_to_end.launch import run
from verl_megatron.observe.tracking import read_metrics

SETTINGS = [
    *("actor.layout=tp1", "actor.devices=", "critic.layout=tp1", "critic.devices=", "rollout.tp=1"),
    *("algorithm.kl_in=reward", "reshard.offload=steps", "rollout.max_tokens=6", "run.validate_interval=0"),
    *("run.save_interval=1", "run.iterations=2"),
]
KEYS = ("policy/loss", "policy/entropy", "policy/grad_norm", "critic/loss", "critic/grad_norm")


def test_a_run_and_its_resume_give_the_numbers_of_replicated_weights(toy, tmp_path):
    """Rounding, which sums of micro-batches in another order give, may change no sampled token here."""
    found = {}
    for sharding in ("replicated", "full"):
        folder = tmp_path / sharding
        settings = settings_of(toy, folder, *SETTINGS, f"engine.sharding={sharding}")
        ended = run(2, TRAIN, *settings, folder=tmp_path)
        assert ended.code == 0, ended.text
        found[sharding] = [row for row in read_metrics(folder) if "policy/loss" in row]
        assert len(found[sharding]) == 2
    # The checkpoint of sharded weights goes on under replicated ones.
    more = [*SETTINGS[:-1], "run.iterations=3", "run.export=false", "engine.sharding=replicated"]
    ended = run(2, TRAIN, *settings_of(toy, tmp_path / "full", *more), folder=tmp_path)
    assert ended.code == 0 and "resuming after iteration 2" in ended.stdout, ended.text
    for want, got in zip(found["replicated"], found["full"], strict=True):
        assert {key: got[key] for key in KEYS} == pytest.approx({key: want[key] for key in KEYS}, abs=2e-4)
