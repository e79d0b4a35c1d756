"""Names of verl, of TRL and of the older Python interface: each is answered or accepted."""

import functools
import importlib
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import asdict, fields

import pytest

from tests.job_files import write_job
from tests.one_rank import ONE_RANK
from tests.worlds import ROOT
from verl_megatron import RLTrainer
from verl_megatron.checks.overrides import structured
from verl_megatron.checks.ranks import not_started, ranks_needed
from verl_megatron.config import (
    RolloutConfig,
    TrainerConfig,
    get_trainer_config,
)
from verl_megatron.config.older_names import OLDER_NAMES, PLACES
from verl_megatron.launch.ranks import ranks_of
from verl_megatron.lifecycle.agreement import (
    agree_on_settings,
    agreed_by_worlds,
    agreed_settings,
    different_data,
    different_settings,
)
from verl_megatron.rewards.callables import spec_of
from verl_megatron.rewards.checks import check_reward
from verl_megatron.rewards.pool import RewardPool

# ---- the older Python interface ----------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES.values())
def test_older_imports_have_their_places(place):
    module, _, name = place.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))


def entrances(name: str, value: object):
    """The ways to give an argument of the older interface; each returns a configuration."""

    def as_attribute() -> TrainerConfig:
        config = TrainerConfig()
        setattr(config, name, value)
        return config

    return (
        lambda: TrainerConfig(**{name: value}),
        lambda: get_trainer_config(**{name: value}),
        as_attribute,
    )


@pytest.mark.parametrize("name", OLDER_NAMES)
def test_an_older_argument_gives_settings_or_a_reason(name):
    older = OLDER_NAMES[name]
    settings = dict(re.findall(r"`([a-z_.]+)=([^`]*)`", older.gives))
    if older.gives.startswith("refused"):
        for give in (*entrances(name, older.example), lambda: RLTrainer(**{name: older.example})):
            with pytest.raises(ValueError, match=f"^{name}=") as error:
                give()
            substitutes = re.findall(r"`([a-z]+\.[a-z_]+)", older.gives)
            assert all(setting in str(error.value) for setting in substitutes)
        return
    for give in entrances(name, older.example):
        config = give()
        found = {setting: functools.reduce(getattr, setting.split("."), config) for setting in settings}
        assert {setting: str(value).lower() for setting, value in found.items()} == settings
        assert {field.name for field in fields(config)} == set(asdict(TrainerConfig())), "no new attribute"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"actor_device_mapping": {"optimizer": "cuda:0"}}, 'is not understood; write {"model": "cuda:0-3"}'),
        ({"checkpoint_config": {"save_intervall": 1}}, 'did you mean "save_interval"?'),
        ({"checkpoint_config": 3}, "is no dict"),
        ({"acter_device_mapping": {}}, 'did you mean "actor_device_mapping"?'),
    ],
)
def test_older_arguments_with_wrong_values_are_refused(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        get_trainer_config(**given)
    with pytest.raises(ValueError, match=re.escape(message)):
        RLTrainer(**given)


def test_older_arguments_that_change_nothing_are_accepted():
    harmless = dict(trust_remote_code=False, offload_folder=None, fsdp_config=None)
    assert TrainerConfig(**harmless) == TrainerConfig()


def test_the_page_has_no_other_name_that_is_not_there():
    """Settings, links and commands of the page are tried with those of all pages; here the metrics."""
    page = (ROOT / "docs" / "python.md").read_text().partition("Others:")[2]
    source = "".join(path.read_text() for path in (ROOT / "verl_megatron").rglob("*.py"))
    metrics = re.findall(r"`((?:rollout|reward|train|memory)/\w+)`", page)
    assert len(metrics) == 4 and all(name in source for name in metrics)


def test_older_attributes_of_a_section_are_taken():
    config = get_trainer_config()
    config.rollout.batch_size_per_device, config.rollout.use_dynamic_batching = 12, True
    assert config.rollout == RolloutConfig(batch_size_per_device=12, use_dynamic_batching=True)
    assert (config.rollout.max_num_seqs, config.rollout.dynamic_batching) == (12, True)
    with pytest.raises(AttributeError):
        config.critic.batch_size_per_device = 12


# ---- functions as rewards ----------------------------------------------------------------------------------


def test_functions_of_any_kind_are_rewards(tmp_path):
    bonus = 0.5

    def shorter(prompt, response, ground_truth, extra, scale=1):
        return bonus * scale + (response == ground_truth)

    functions = [lambda *_: 0.25, shorter, functools.partial(shorter, scale=2)]
    specs = [spec_of(function, tmp_path / "run") for function in functions]
    scores = []
    for spec in specs:
        with RewardPool(spec) as pool:
            pool.submit(0, "p", "r", "r")
            scores.append(pool.results()[0].score)
    assert scores == [0.25, 1.5, 2.0] and len(set(specs)) == 3
    assert spec_of("match", tmp_path) == "match" and spec_of(shorter, tmp_path / "run") == specs[1]


def test_a_function_has_one_name_in_every_process(tmp_path):
    """Whatever the order of its sets, and the ids of classes of a script."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import sys
from verl_megatron.rewards.callables import spec_of

WORDS = set("abcdefgh")

class Reward:
    def __call__(self, prompt, response, ground_truth, extra):
        return float(response in WORDS or response in {"yes", "no", "perhaps", "never"})

print(*spec_of([Reward(), lambda p, r, g, e: r in {"i", "j", "k"}], sys.argv[1]), sep="\\n")
"""
    )
    found = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, script, tmp_path / "run"]
        found.add(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    assert len(found) == 1 and len(list((tmp_path / "run").iterdir())) == 2


def test_a_function_may_use_sets_that_have_it_and_large_ones(tmp_path):
    registered: set = set()
    words = {f"word {number}" for number in range(50_000)}

    def score(prompt, response, ground_truth, extra):
        return float(response in words) + len(registered)

    registered.add(score)
    begin = time.perf_counter()
    assert spec_of(score, tmp_path) == spec_of(score, tmp_path)
    assert time.perf_counter() - begin < 20


def test_functions_that_cannot_be_rewards_are_refused(tmp_path):
    lock = threading.Lock()
    with pytest.raises(ValueError, match="reward_function='.*<lambda>' cannot be passed .* write it into a"):
        spec_of(lambda *_: lock.locked(), tmp_path)
    (problem,) = check_reward(spec_of(lambda a, b: 1.0, tmp_path))
    assert "takes (a, b) and is called with (prompt, response, ground_truth, extra)" in problem
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="run.output_dir='.*file' cannot take the file of the reward"):
        spec_of(lambda *_: 1.0, tmp_path / "file")


# ---- ranks -------------------------------------------------------------------------------------------------


def test_a_run_of_several_ranks_says_how_to_start_them(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    write_job(tmp_path)
    config = get_trainer_config(tp_size=2, pp_size=2, dp_size=2)
    config.actor.path = str(tmp_path / "model")
    assert ranks_needed(config) == 8 and ranks_needed(TrainerConfig()) == 1
    config.reward.path, config.reward.devices = config.actor.path, "8-9"
    assert ranks_needed(config) == 16
    main = importlib.import_module("__main__")
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", str(tmp_path / "my run.py"), raising=False)
    monkeypatch.setattr("sys.argv", ["x", "--fast"])
    monkeypatch.chdir(tmp_path)
    (problem,) = not_started(config, world_size=1)
    assert "actor.layout=tp2pp2dp2" in problem
    assert problem.endswith("torchrun --nproc_per_node 16 'my run.py' --fast")
    monkeypatch.delattr(main, "__file__")
    assert "a notebook is one rank" in not_started(config, world_size=1)[0]
    assert not_started(config, world_size=2) == not_started(TrainerConfig(), world_size=1) == []


@pytest.mark.parametrize(
    ("given", "named", "ranks"),
    [
        ({"rollout": {"tp": 10**11}}, "rollout.tp=100000000000", "100,000,000,000"),
        ({"actor": {"layout": "tp99999999999"}}, "actor.layout=tp99999999999", "99,999,999,999"),
        ({"actor": {"devices": "0-2000"}}, "actor.devices='0-2000'", "2,001"),
    ],
)
def test_too_many_ranks_are_refused_with_all_settings_that_ask_for_them(given, named, ranks):
    with pytest.raises(ValueError) as caught:
        ranks_of(structured({"data": {"train": "x"}} | given, TrainerConfig))
    names, _, rest = str(caught.value).partition(" need ")
    assert named in names.split(" and ") and "critic.layout=tp1" in names
    assert rest.startswith(f"{ranks} ranks, and this command starts at most 1,024")


@pytest.mark.parametrize("section", ["hydra_", "rollout_", "async__"])
def test_a_section_with_an_underscore_too_many_is_refused_by_its_name(section):
    with pytest.raises(ValueError, match=f"^{section} is no section"):
        structured({"data": {"train": "x"}, section: {"tp": 2}}, TrainerConfig)


def test_ranks_that_differ_are_told_what_they_differ_in():
    first, here = TrainerConfig(), TrainerConfig()
    here.run.output_dir, first.actor.path, here.actor.path = "elsewhere", "a/model", "b/model"
    first.reward.function = "run/reward_function_0123456789ab.py:score"
    here.reward.function = "run/reward_function_ba9876543210.py:score"
    assert different_settings(agreed_settings(first), agreed_settings(here)) == []
    first.reward.function, here.reward.function = "/home/a/score.py:f", "/root/score.py:f"
    assert different_settings(agreed_settings(first), agreed_settings(here)) == []
    here.actor.lr, here.rollout.stop, here.data.validation = 1e-3, ["a"], "val.jsonl"
    assert set(different_settings(agreed_settings(first), agreed_settings(here))) == {
        "actor.lr=0.001 is 1e-06 on rank 0; start all ranks with the same settings",
        "rollout.stop=['a'] is [] on rank 0; start all ranks with the same settings",
        "data.validation='...' is '' on rank 0; start all ranks with the same settings",
    }
    assert "run.seed" in agreed_by_worlds(first) and "run.iterations" not in agreed_by_worlds(first)
    assert (
        different_settings({}, agreed_settings(here)) == different_settings(agreed_settings(first), {}) == []
    )
    rows = {"data.train": (10, 5), "data.validation": (11, 2)}
    assert different_data(rows, rows) == []
    (problem,) = different_data(rows, rows | {"data.train": (12, 5)})
    assert "data.train is not the same file on all hosts: 5 rows with the digest 00000000000c here" in problem


def test_settings_of_wrong_types_are_left_to_the_checks_of_types():
    for section, value in (("rollout", "x"), ("rollout", None), ("run", threading.Lock())):
        wrong = TrainerConfig()
        setattr(wrong, section, value)
        agree_on_settings(wrong, ONE_RANK)
    wrong = TrainerConfig()
    wrong.rollout.top_p = threading.Lock()
    agree_on_settings(wrong, ONE_RANK)
