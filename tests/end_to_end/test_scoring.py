"""Frozen models in a world of their own: the run beside the one with all models on one rank, and deaths."""

import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from tests.end_to_end.conftest import TRAIN, settings_of
from tests.end_to_end.launch import run
from tests.end_to_end.test_separate import JOB, STALE, assert_balanced, ended_of, kill, numbers, started
from verl_megatron.observe.tracking import read_metrics

SCORING = ("reference.devices=2", "reward.devices=2")
WAITS = ("async/reward_", "async/reference_", "async/score_")


@pytest.fixture(scope="module")
def job(toy, tmp_path_factory) -> list[str]:
    """The toy job with a reward model; the settings of its output follow."""
    folder = tmp_path_factory.mktemp("reward_model")
    torch.manual_seed(7)
    config = LlamaConfig.from_pretrained(toy / "model", num_labels=1)
    AutoModelForSequenceClassification.from_config(config).float().eval().save_pretrained(folder)
    return [*JOB, f"reward.path={folder}"]


@pytest.fixture(scope="module")
def stale(job, toy, tmp_path_factory) -> Path:
    """A run with stale samples, whose frozen models are where training is."""
    folder = tmp_path_factory.mktemp("stale")
    ended_of(folder, *settings_of(toy, folder / "run", *job, *STALE))
    return folder / "run"


def weights(folder: Path) -> list[bytes]:
    """The trained models of the last checkpoint."""
    newest = max((folder / "checkpoint").glob("step_*"), key=lambda step: int(step.name[5:]))
    return [path.read_bytes() for path in sorted(newest.glob("*/*.distcp"))]


@pytest.mark.long
def test_in_turns_it_is_the_run_on_one_rank(job, toy, tmp_path):
    """The rollout is where training is; the reward model and the reference are not."""
    run(1, TRAIN, *settings_of(toy, tmp_path / "together", *job), folder=tmp_path)
    places = ("actor.devices=0", "reference.devices=1", "reward.devices=1")
    ended_of(tmp_path, *settings_of(toy, tmp_path / "apart", *job, *places))
    assert numbers(tmp_path / "apart", but="async/") == numbers(tmp_path / "together")
    assert weights(tmp_path / "apart") == weights(tmp_path / "together")
    rows = read_metrics(tmp_path / "apart")[1:]
    assert all(0 < row["async/score_wait_fraction"] < 1 and row["async/reward_s"] > 0 for row in rows)


@pytest.mark.long
def test_a_teacher_alone_in_a_world_teaches_the_same(toy, tmp_path):
    """On-policy distillation, whose only scores are the teacher's log-probs."""
    folder = tmp_path / "teacher"
    shutil.copytree(toy / "model", folder)
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(folder)).float().save_pretrained(folder)
    distillation = (*JOB, "algorithm.name=distillation", "algorithm.kl_coef=0", f"teacher.path={folder}")
    run(1, TRAIN, *settings_of(toy, tmp_path / "together", *distillation), folder=tmp_path)
    apart = ("rollout.devices=0", "teacher.devices=1")  # the rollout is where training is
    ended_of(tmp_path, *settings_of(toy, tmp_path / "apart", *distillation, *apart))
    assert numbers(tmp_path / "apart", but="async/") == numbers(tmp_path / "together")
    assert weights(tmp_path / "apart") == weights(tmp_path / "together")
    assert all(row["async/teacher_s"] > 0 for row in read_metrics(tmp_path / "apart")[1:])


def test_a_scoring_world_that_dies_is_started_again_and_the_numbers_stay(stale, job, toy, tmp_path):
    """It works ahead of training, and is killed in the middle of that."""
    settings = settings_of(toy, tmp_path / "run", *job, *STALE, *SCORING)
    with started(tmp_path, *settings, kills="reward=6") as worlds:
        ended = worlds.wait(timeout_s=300)
        assert not ended.code and not worlds.leftovers(), ended.text
    assert ended.stdout.count("the reward world ended with 137 and is started again") == 1
    assert ended.stdout.count("reward world 2 has joined; training has waited") == 1
    assert "resuming" not in ended.text
    assert_same(tmp_path / "run", stale)


@pytest.mark.long
def test_at_whatever_moments_a_scoring_world_dies_the_numbers_stay(job, toy, tmp_path):
    """Five kills of the scoring world, and two of the others, at random moments."""
    draw = random.Random(1)
    longer = [*job, *STALE, "run.iterations=24"]
    begin = time.monotonic()
    ended_of(tmp_path, *settings_of(toy, tmp_path / "undisturbed", *longer, *SCORING), timeout_s=400)
    undisturbed_s = time.monotonic() - begin
    roles = ["reward"] * 5 + ["rollout", "train"]
    draw.shuffle(roles)
    settings, begin = settings_of(toy, tmp_path / "run", *longer, *SCORING), time.monotonic()
    with started(tmp_path, *settings, "--max-restarts", "1") as worlds:
        for place, role in enumerate(roles):
            kill(worlds, role, once=f"step {3 * place + 2}/24", after_s=draw.random() * 2, timeout_s=200)
        ended = worlds.wait(timeout_s=400)
        assert not ended.code and not worlds.leftovers(), ended.text
    lost_s = time.monotonic() - begin - undisturbed_s
    print(f"{len(roles)} faults: {lost_s / len(roles):.1f} s lost per fault")
    assert ended.stdout.count("the reward world ended with 137 and is started again") == 5
    assert ended.stdout.count("resuming after") == 1
    assert_same(tmp_path / "run", tmp_path / "undisturbed")


def assert_same(folder: Path, undisturbed: Path) -> None:
    found = [_without_waits(row) for row in numbers(folder)]
    assert found == [_without_waits(row) for row in numbers(undisturbed)]
    assert weights(folder) == weights(undisturbed)
    assert_balanced(folder)


def _without_waits(row: dict) -> dict:
    return {name: value for name, value in row.items() if not name.startswith(WAITS)}
