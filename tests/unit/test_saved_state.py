"""What a repeated iteration is compared by, and a run's first state.

Whole runs are in tests/end_to_end/test_restart.py.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from parallel.bridge import START
from parallel.checkpoint.folders import CheckpointError
from parallel.runtime import process
from tests.one_rank import ONE_RANK
from verl_megatron.algorithms import get_algorithm
from verl_megatron.config import TrainerConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.order.cursor import PromptCursor
from verl_megatron.lifecycle.progress import differences
from verl_megatron.manifest import samples_problem
from verl_megatron.observe.metrics import Sums
from verl_megatron.saved_state import SavedState, _made_by, _merged
from verl_megatron.separate.remote_sampler import RemoteSampler


def test_the_same_bits_or_near_enough():
    recorded = {"loss": 0.1, "norm": 2.0, "rate": math.nan}
    assert differences(recorded, dict(recorded), relative=0) == []
    assert differences(recorded, recorded | {"loss": math.nextafter(0.1, 1)}, relative=0) == [
        ("loss", 0.1, math.nextafter(0.1, 1))
    ]
    assert differences(recorded, recorded | {"loss": 0.1009, "norm": 1.99}, relative=1e-2) == []
    assert differences(recorded, recorded | {"norm": 1.9}, relative=1e-2) == [("norm", 2.0, 1.9)]
    assert differences({"loss": 1e-5}, {"loss": -1e-5}, relative=1e-2) == []  # a mean of signed terms
    assert differences({"loss": 1.0}, {}, relative=1e-2) == [("loss", 1.0, None)]
    assert differences({"loss": math.nan}, {"loss": 1.0}, relative=1e-2)


def test_samples_of_several_ranks_make_one_batch():
    one = RolloutBatch.from_lists([3, 0], [[1, 2], [3]], [[4], [5, 6, 7]], [[-0.1], [-0.2, -0.3, -0.4]])
    none = RolloutBatch.from_lists([], [], [], [])
    other = RolloutBatch.from_lists([1, 2], [[8] * 5, [9]], [[1], [2]], [[-0.5], [-0.6]])
    whole = RolloutBatch.concatenate([one, none, other])
    prompts, responses, logprobs = (
        [[3], [8] * 5, [9], [1, 2]],
        [[5, 6, 7], [1], [2], [4]],
        [[-0.2, -0.3, -0.4], [-0.5], [-0.6], [-0.1]],
    )
    expected = RolloutBatch.from_lists([0, 1, 2, 3], prompts, responses, logprobs).tensors()
    found = whole.tensors()
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_part_without_samples_does_not_say_which_fields_there_are(order):
    one, none = RolloutBatch.from_lists([0], [[1]], [[4]], [[-0.5]]), RolloutBatch.from_lists([], [], [], [])
    one.source_id, one.token_versions = torch.tensor([2]), torch.full((1, 2), 3)
    parts = (one, none)
    whole = RolloutBatch.concatenate([parts[place] for place in order])
    assert whole.source_id.tolist() == [2] and whole.token_versions.tolist() == [[3, 3]]


def test_samples_with_every_field_that_a_collection_sets_are_valid():
    batch = RolloutBatch.from_lists([0, 1], [[1], [2, 3]], [[4], [5]], [[-0.5], [-0.25]])
    batch.group_id, batch.policy_version = torch.tensor([0, 1]), torch.tensor([3, 3])
    batch.rewards, batch.baselines = torch.ones(2), torch.zeros(2)
    batch.source_id, batch.temperature = torch.tensor([0, 1]), torch.tensor([1.0, 0.8])
    batch.is_cut, batch.token_versions = torch.tensor([True, False]), torch.full((2, 3), 3)
    part = {
        "made_with": {},
        "batch": batch.tensors(),
        "sums": Sums().state_dict(),
        "reshard_bytes": 0,
        "seconds": {},
        "cursor": PromptCursor(num_prompts=2, seed=1, shuffle=True).state_dict(),
    }
    assert samples_problem(part) is None
    part["batch"]["baselines"] = torch.zeros(2, 3)
    assert "batch" in samples_problem(part)


def test_sums_survive_the_disk():
    sums = Sums()
    sums.add("reward/failed", 1.0, 4)
    sums.add("loss", torch.tensor(0.1), torch.tensor(3))
    sums.max("longest", torch.tensor(7.0))
    twice = _merged([Sums.from_state(sums.state_dict()), Sums.from_state(sums.state_dict())], ONE_RANK)
    assert twice.reduce(ONE_RANK) == sums.reduce(ONE_RANK) and twice.state_dict()["totals"][
        "reward/failed"
    ] == (2.0, 8)


@pytest.fixture
def state(tmp_path) -> SavedState:
    """That of the second of two ranks, without models."""
    state = object.__new__(SavedState)
    state.world = SimpleNamespace(
        rank=1, size=2, is_first=False, all_gather_object=lambda value: [value, value]
    )
    state.config = SimpleNamespace(run=SimpleNamespace(resume="newest", iterations=9))
    state.cursor = SimpleNamespace(load_state_dict=lambda _: None)
    state.run = SimpleNamespace(
        clock=SimpleNamespace(seconds={}), table_of=lambda batch: len(batch), sampler=None
    )
    state.say, state.step, state.folder, state._resumed = pytest.fail, 2, tmp_path, None
    state._made = {"data": {"validation_samples": 8}}
    return state


@pytest.mark.parametrize(("world_size", "expected"), [(1, [1, 3]), (2, [0, 1, 2, 3])])
def test_samples_of_one_rank_are_dealt_to_two(state, monkeypatch, world_size, expected):
    """What two ranks had written is this rank's own, and stays whole. A renamed setting is no change."""
    batch = RolloutBatch.from_lists([0, 1, 2, 3], [[1]] * 4, [[2]] * 4, [[-0.1]] * 4)
    part = {
        "made_with": {"data": {"validation_rows": 8}},
        "cursor": {},
        "seconds": {},
        "reshard_bytes": 0,
        "batch": batch.tensors(),
        "sums": Sums().state_dict(),
    }
    monkeypatch.setattr(
        "parallel.checkpoint.resume.read_attachment",
        lambda path, name, ranks, say, check: ([part], world_size),
    )
    state._resume_samples(Path())
    assert state._resumed.batch.sample_id.tolist() == expected and state._resumed.table == len(expected)


@pytest.mark.parametrize(
    ("made_with", "usable"),
    [({}, True), ({"data": {"validation_rows": 8}}, True), ({"data": {"validation_samples": 9}}, False)],
)
def test_samples_in_flight_are_used_if_they_would_be_made_alike(state, monkeypatch, made_with, usable):
    """An older checkpoint does not tell how they were made."""
    monkeypatch.setattr("parallel.checkpoint.random_state.set_rng_state", lambda saved: None)
    state.run.sampler = sampler = create_autospec(RemoteSampler, instance=True)
    told = {"made_with": made_with} if made_with else {}
    state._restore_rank_state({"in_flight": {"next": 3}} | told)
    sampler.load_state_dict.assert_called_once_with({"next": 3}, usable=usable)


def attempt(state, monkeypatch, number: int, *, launch: str, start: int = 0) -> list[str]:
    """Resume as an attempt of a launch does; return what it said."""
    said: list[str] = []
    state.world, state.say, state.config.run.resume = ONE_RANK, said.append, "never"
    monkeypatch.setattr(
        "parallel.checkpoint.resume.newest_sound", lambda folder, ranks, say, check: said.append("newest")
    )
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
    monkeypatch.setenv(START, str(start))
    monkeypatch.setenv(process.LAUNCH, launch)
    state.resume()
    return said


def test_a_launch_begins_anew_once(state, monkeypatch, tmp_path):
    """With run.resume=never; later attempts, and later starts of a world, resume this run."""
    for launch in ("a", "b"):
        (tmp_path / "step_1").mkdir()
        assert "step_1.earlier" in attempt(state, monkeypatch, 0, launch=launch)[0]
        (tmp_path / "step_2").mkdir()
        assert attempt(state, monkeypatch, 1, launch=launch) == ["newest"]
        assert attempt(state, monkeypatch, 0, launch=launch, start=1) == ["newest"]
        assert (tmp_path / "step_2").exists()
    assert "step_2.earlier" in attempt(state, monkeypatch, 0, launch="b")[0]  # trains twice in one process


def test_a_launch_begins_anew_though_its_first_attempt_died_early(state, monkeypatch, tmp_path):
    attempt(state, monkeypatch, 0, launch="another")
    (tmp_path / "step_7").mkdir()
    (tmp_path / "step_9").mkdir()
    replaced = []

    def die_later(source, target):
        replaced.append(source)
        if len(replaced) > 1:
            raise KeyboardInterrupt
        Path(source).rename(target)

    with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr("parallel.checkpoint.resume.os.replace", die_later)
        attempt(state, dying, 0, launch="this")
    assert "step_7.earlier" in attempt(state, monkeypatch, 1, launch="this")[0]
    assert sorted(path.name for path in tmp_path.glob("step*")) == ["step_7.earlier", "step_9.earlier"]
    (tmp_path / "begun_anew.json").write_text("{")  # damaged
    (tmp_path / "step_1").mkdir()
    assert "step_1.earlier" in attempt(state, monkeypatch, 2, launch="this")[0]


@pytest.mark.parametrize(
    "change",
    [
        "reward.overlong_tokens=4",
        "reward.overlong_penalty=0.5",
        "algorithm.dynamic_sampling=True",
        "algorithm.name=remax",
        "rollout.temperature=0.5",
        "reward.function=other",
        "reward.failure_score=0.5",
        "rollout.adaptive_sampling=other",
        "rollout.kv_cache_dtype=fp8",
    ],
)
def test_samples_are_collected_again_if_what_made_them_changes(change):
    def made_with(config: TrainerConfig) -> dict:
        draw: Any = SimpleNamespace(with_greedy="greedy" in get_algorithm(config.algorithm).needs)
        run: Any = SimpleNamespace(config=config, draw=draw)
        return _made_by(run)

    changed, (name, text) = TrainerConfig(), change.split("=")
    section, setting = name.split(".")
    old = getattr(getattr(changed, section), setting)
    setattr(getattr(changed, section), setting, {"True": True}.get(text, type(old)(text)))
    assert made_with(TrainerConfig()) == made_with(TrainerConfig()) != made_with(changed)


@pytest.mark.parametrize("others", [True, False])
def test_samples_are_reused_by_all_ranks_or_none(state, monkeypatch, others):
    """A rank that would reuse its own does not wait for one that collects."""
    part = {"made_with": state._made, "cursor": {}, "seconds": {}, "reshard_bytes": 0}
    part["batch"] = RolloutBatch.from_lists([1], [[1]], [[2]], [[-0.1]]).tensors()
    part["sums"] = Sums().state_dict()
    monkeypatch.setattr(
        "parallel.checkpoint.resume.read_attachment", lambda path, name, ranks, say, check: ([part], 2)
    )
    said: list[str] = []
    state.world.all_gather_object, state.say = (lambda differs: [differs, others]), said.append
    state._resume_samples(Path())
    assert (state._resumed is None) == others == any("collected again" in text for text in said)


def test_verifying_what_cannot_be_repeated_is_an_error(state, monkeypatch):
    said: list[str] = []
    state.config.run.resume, state.say, state._is_repeated = "verify", said.append, False
    recorded = "parallel.checkpoint.resume.read_record"
    monkeypatch.setattr(recorded, lambda *_, **__: None)
    state._check_repeatable(Path("step_2"))
    assert "iteration 3 has no complete record" in said[0]
    monkeypatch.setattr(recorded, lambda *_, **__: {"policy/loss": 1.0})
    with pytest.raises(CheckpointError, match="iteration 3 cannot be repeated from step_2"):
        state._check_repeatable(Path("step_2"))
    state._is_repeated = True
    state._check_repeatable(Path("step_2"))


def test_fitted_micro_batches_are_compared_as_another_layout_is(state, monkeypatch):
    """Their size follows the free memory, and with it the order of sums."""
    said: list[str] = []
    state.say, state.world, state._is_same_layout = said.append, ONE_RANK, True
    state.config.engine = SimpleNamespace(dynamic_batching=True)
    recorded = {"policy/loss": 1.0, "policy/tokens_per_micro_batch": 16.0}
    monkeypatch.setattr("parallel.checkpoint.resume.read_record", lambda *_, **__: recorded)
    state._verify(Path("step_2"), {"policy/loss": 1.001})
    assert "gives all 1 recorded numbers" in said[0]
    state.config.engine.dynamic_batching = False
    with pytest.raises(CheckpointError, match="differs in 1 of 1 numbers"):
        state._verify(Path("step_2"), {"policy/loss": 1.001})
