"""Settings: names, types, tables of limits and choices, former names, presets."""

import copy
import dataclasses
import json
import pickle
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.job_files import write_job
from tests.recipes import schema_of
from tests.worlds import ROOT
from verl_megatron.checks.limits import check_values, inside
from verl_megatron.checks.overrides import structured
from verl_megatron.checks.settings import check_config, check_supervised_config
from verl_megatron.config import (
    RENAMED,
    SCHEMAS,
    AlgorithmConfig,
    DPOLossConfig,
    EngineConfig,
    ModelConfig,
    RolloutConfig,
    SFTConfig,
    TrainerConfig,
    get_trainer_config,
)
from verl_megatron.config.section import shown
from verl_megatron.launch.command_line import settings_of
from verl_megatron.rewards.plan import read_plan

# ---- names and types -------------------------------------------------------------------------------------


def test_overrides_are_put_in():
    config = structured(
        {
            "actor": {"lr": "1e-3", "layout": "tp2"},
            "data": {"train": "a.jsonl"},
            "rollout": {"stop": ["x"], "sleep": False},
        },
        TrainerConfig,
    )
    assert isinstance(config, TrainerConfig) and isinstance(config.actor, ModelConfig)
    assert (
        config.actor.lr,
        config.actor.layout,
        config.data.train,
        config.rollout.stop,
        config.rollout.sleep,
    ) == (1e-3, "tp2", "a.jsonl", ["x"], False)
    assert config.critic.lr == 1e-5 and config.engine == EngineConfig()


def test_all_wrong_names_and_types_are_said_at_once():
    overrides = {
        "actor": {"lrr": 1, "lr": "fast", "stage_layers": 3},
        "rolout": {"tp": 2},
        "rollout": {
            "tp": 2.5,
            "sleep": "maybe",
            "stop_token_ids": ["a"],
            "top_p": None,
            "max_prompt_tokens": 8,
        },
        "engine": {"lr": 1},
        "iterations": 3,
        "actor.devices": "0-3",
        "run": 3,
    }
    with pytest.raises(ValueError) as error:
        structured(overrides, TrainerConfig)
    text = str(error.value)
    assert "rollout.stop_token_ids=['a'] has a wrong type" in text and "give a value like [1, 2]" in text
    for words in (
        'actor.lrr is no setting, did you mean "lr"?',
        "actor.lr='fast' has a wrong type",
        "actor.stage_layers=3 has a wrong type (it is no list); write [3]",
        'rolout is no section, did you mean "rollout"?',
        "rollout.max_prompt_tokens is no setting; write data.max_prompt_tokens",
        "engine.lr is no setting; write actor.lr or critic.lr",
        "iterations is no section; write run.iterations",
        "actor.devices is no section; a recipe has settings inside their section: actor: {devices: VALUE}",
        "rollout.tp=2.5 has a wrong type",
        "rollout.sleep='maybe'",
        "rollout.stop_token_ids=['a']",
        "rollout.top_p=None",
        "run=3 is no section",
        "data.train has to be given",
    ):
        assert words in text, words
    assert text.startswith("14 settings cannot work")


def test_a_single_problem_is_the_whole_message():
    with pytest.raises(ValueError, match="^data.train has to be given; add data.train=...$"):
        structured({}, SFTConfig)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_hold_known_settings_within_their_limits(recipe):
    schema = schema_of(recipe)
    settings = OmegaConf.load(recipe)
    settings.data.setdefault("train", "given.jsonl")
    assert check_values(structured(settings, schema)) == []


@pytest.mark.parametrize("section", [field.name for field in dataclasses.fields(TrainerConfig)])
def test_a_name_that_is_no_setting_is_refused_in_python(section):
    config = TrainerConfig()
    with pytest.raises(AttributeError, match="size_of_a_thing is no setting of .*; it has ") as error:
        getattr(config, section).size_of_a_thing = 3
    assert isinstance(error.value, ValueError)
    assert (
        dataclasses.asdict(config)
        == dataclasses.asdict(TrainerConfig())
        == OmegaConf.to_container(OmegaConf.structured(TrainerConfig))
    )


def test_the_nearest_name_is_said_in_python():
    with pytest.raises(
        ValueError, match='temprature is no setting of RolloutConfig, did you mean "temperature"?'
    ):
        RolloutConfig().temprature = 0
    with pytest.raises(ValueError, match='rolout is no setting of TrainerConfig, did you mean "rollout"?'):
        TrainerConfig().rolout = RolloutConfig()
    assert (
        dataclasses.replace(RolloutConfig(), tp=2).tp == 2 and ModelConfig(path=Path("/a/b")).path == "/a/b"
    )


OF_ANOTHER_TYPE = {
    int: ["2", None, 2.0, True, [1], float("nan")],
    float: ["1", None, True, [1.0], 1j],
    str: [None, 3, b"x", ["a"]],
    bool: [0, 1, "no", None],
}
OF_ANOTHER_TYPE |= {
    list[str]: ["a", [3], None, [None], {"a"}],
    list[int]: [1, ["1"], [1.0], [True], None],
    list[float]: [0.9, ["0.9"], [None], None],
}
SETTINGS = [
    (schema, section.name, field)
    for schema in SCHEMAS.values()
    for section in dataclasses.fields(schema)
    for field in dataclasses.fields(section.type)
]


@pytest.mark.parametrize(
    ("schema", "section", "field"),
    SETTINGS,
    ids=lambda x: getattr(x, "name", x if isinstance(x, str) else ""),
)
def test_a_value_of_another_type_is_named(schema, section, field):
    for value in OF_ANOTHER_TYPE[field.type]:
        if (many := field.metadata["many"]) and many(value) != value:
            continue  # another way to write it, such as a list of files
        config = schema()
        setattr(getattr(config, section), field.name, value)
        problems = (check_config if schema is TrainerConfig else check_supervised_config)(
            config, world_size=1
        )
        assert (
            len(problems) == 1 and f"{shown(section)}.{field.name}={value!r} has a wrong type" in problems[0]
        ), problems


@pytest.mark.parametrize("value", [None, {"tp": 2}, ModelConfig(), 3])
def test_a_section_of_another_type_is_named(value):
    config = TrainerConfig()
    config.rollout = value
    (problem,) = check_config(config, world_size=1)
    assert problem.startswith("rollout=") and problem.endswith("give a RolloutConfig")


# ---- tables ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "interval", "expected"),
    [
        (0, "[0, 1]", True),
        (0, "(0, 1]", False),
        (1, "[0, 1)", False),
        (1e9, "[0, inf)", True),
        (float("nan"), "(-inf, inf)", False),
        (float("inf"), "[0, inf)", False),
    ],
)
def test_intervals(value, interval, expected):
    assert inside(value, interval) is expected


def sections(schema) -> dict[str, type]:
    return {
        type(getattr(schema(), field.name)).__name__: type(getattr(schema(), field.name))
        for field in dataclasses.fields(schema)
    }


def test_every_setting_has_a_meaning_every_number_an_interval_and_every_default_is_valid():
    for schema in SCHEMAS.values():
        assert check_values(schema()) == []
        for kind in sections(schema).values():
            for field in dataclasses.fields(kind):
                assert field.metadata["meaning"], field.name
                assert bool(field.metadata["within"]) == (field.type in (int, float, list[float])), field.name
                assert not field.metadata["choices"] or field.type is str, field.name


def test_choices_are_those_of_the_tables_that_serve_them():
    from verl_megatron.algorithms import ALGORITHMS
    from verl_megatron.algorithms.kl import KL_ESTIMATORS
    from verl_megatron.algorithms.normalizers import NORMALIZERS
    from verl_megatron.algorithms.objectives import OBJECTIVES
    from verl_megatron.algorithms.preference import DPO_LOSSES

    choices = {field.name: field.metadata["choices"] for field in dataclasses.fields(AlgorithmConfig)}
    assert choices["name"] == tuple(ALGORITHMS)
    assert choices["objective"] == ("auto", *OBJECTIVES)
    assert choices["normalizer"] == ("auto", *NORMALIZERS)
    assert choices["kl_estimator"] == tuple(KL_ESTIMATORS)
    losses = {field.name: field.metadata["choices"] for field in dataclasses.fields(DPOLossConfig)}["loss"]
    assert losses == tuple(DPO_LOSSES)


# ---- former names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_former_name_is_refused_with_the_present_one(old, new):
    section, _, name = old.partition(".")
    schema = (
        SFTConfig if hasattr(getattr(SFTConfig(), section, None), new.partition(".")[2]) else TrainerConfig
    )
    kind = type(getattr(schema(), section))
    given = {"data": {"train": "a.jsonl"}}
    given.setdefault(section, {})[name] = 1
    with pytest.raises(ValueError, match=f"^{old} is now called {new}; rename it$"):
        structured(given, schema)
    for give in (lambda: setattr(kind(), name, 1), lambda: kind(**{name: 1})):
        with pytest.raises(
            ValueError, match=f"^{name} of {kind.__name__} is now called {new.partition('.')[2]}"
        ):
            give()


def test_former_names_lead_to_settings_that_exist():
    known = {
        f"{section.name}.{field.name}"
        for schema in SCHEMAS.values()
        for section in dataclasses.fields(schema)
        for field in dataclasses.fields(getattr(schema(), section.name))
    }
    assert known >= set(RENAMED.values()) and known.isdisjoint(RENAMED)


def test_sections_survive_copies_and_hydra():
    config = TrainerConfig(algorithm=AlgorithmConfig(gae_lambda=0.5))
    config.rollout.stop.append("a")
    config.data.train = "a.jsonl"
    for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
        assert copied == config
    assert OmegaConf.to_object(OmegaConf.structured(config)) == config and TrainerConfig().rollout.stop == []


# ---- presets ---------------------------------------------------------------------------------------------


def test_a_configuration_from_a_few_numbers(tmp_path):
    write_job(tmp_path)
    config = get_trainer_config(
        dp_size=2, tp_size=2, pp_size=2, hybrid_engine=True, enable_recompute=True, mixed_precision=False
    )
    assert (config.actor.layout, config.critic.layout, config.rollout.tp) == ("tp2pp2dp2", "tp2pp2dp2", 2)
    assert (config.engine.recompute, config.engine.dtype, config.critic.lr) == ("full", "float32", 1e-5)
    config.actor.path, config.data.train, config.run.track_metrics = (
        str(tmp_path / "model"),
        str(tmp_path / "train.jsonl"),
        [],
    )
    config.data.max_prompt_tokens = config.rollout.max_tokens = 100
    assert check_config(config, world_size=8) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(hybrid_engine=False), "name ranks that only generate in rollout.devices"),
        (dict(tp_size=0), "tp_size=0"),
        (dict(tp_size="2"), "tp_size='2'"),
        (dict(pp_size=2.0), "pp_size=2.0"),
        (dict(dp_size=True), "dp_size=True"),
        (dict(dp_size=10**12), "dp_size=1000000000000"),
        (dict(hybrid_engine="no"), "hybrid_engine='no'"),
        (dict(enable_recompute=[]), r"enable_recompute=\[\]"),
        (dict(mixed_precision=16), "mixed_precision=16"),
        (dict(enable_recompute="some"), "enable_recompute='some'"),
        (dict(mixed_precision="fp4"), "mixed_precision='fp4'"),
    ],
)
def test_refused_numbers(settings, words):
    with pytest.raises(ValueError, match=words):
        get_trainer_config(**settings)


@pytest.mark.parametrize("number", [2, -1, "2", "+3", "00"])
def test_a_bool_is_no_other_number(number):
    given = {"data": {"train": "a"}, "engine": {"dynamic_batching": number}}
    if int(number) in (0, 1):
        assert structured(given, TrainerConfig).engine.dynamic_batching is bool(int(number))
        return
    with pytest.raises(ValueError, match=r"engine.dynamic_batching=.* is not a valid bool"):
        structured(given, TrainerConfig)


def test_a_home_folder_may_be_written_as_shells_do(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    given = {
        "run": {"output_dir": "~/run"},
        "actor": {"path": "~/model"},
        "data": {"train": ["~/a.jsonl:0.7", "b.jsonl:0.3"], "validation": "a~/b"},
        "reward": {"function": {"default": "~/mine.py:score"}, "format": "~/"},
    }
    found = structured(given, TrainerConfig)
    assert (found.run.output_dir, found.actor.path) == ("/home/me/run", "/home/me/model")
    assert found.data.train == "/home/me/a.jsonl:0.7,b.jsonl:0.3" and found.data.validation == "a~/b"
    assert "/home/me/mine.py:score" in found.reward.function and found.reward.format == "~/"


NUMBERS = ["2024_01_02", "1e3", "0.10", "true", "007", "0x10", "nan", "1:30", "off"]


@pytest.mark.parametrize("text", NUMBERS)
def test_a_text_that_looks_like_a_number_stays_as_it_is(text, tmp_path):
    settings = ["--config", str(tmp_path / "mine.yaml"), f"run.output_dir={text}", f"rollout.stop=[é,{text}]"]
    (tmp_path / "mine.yaml").write_text(
        f"data: {{train: [{text}, b], validation: {text}}}\n"
        f"reward: {{function: {{{text}: math, default: exact}}}}\n"
    )
    config = structured(settings_of(settings)[1], TrainerConfig)
    assert config.run.output_dir == text and config.rollout.stop == ["é", text]
    assert config.data.train == f"{text},b" and config.data.validation == text
    assert json.loads(config.reward.function) == {text: "math", "default": "exact"}


@pytest.mark.parametrize("text", ["1e3", "true", "007", "gsm8k"])
def test_so_does_a_name_of_a_mapping(text):
    _, given = settings_of([f"reward.function={{{text}:math,default:exact}}", "data.train=[]"])
    plan = read_plan(structured(given, TrainerConfig).reward.function)
    assert set(plan.routes) == {text, "default"}


def test_numbers_and_truth_values_of_a_recipe_stay_such(tmp_path):
    text = "actor: &a {lr: 1e-5, path: 007}\ncritic: {<<: *a}\nrollout: {adaptive_sampling: true}\n"
    (tmp_path / "mine.yaml").write_text(text + "data: {train: {a.jsonl: 1e-1, b.jsonl: 0.9}}\n")
    config = structured(settings_of(["--config", str(tmp_path / "mine.yaml")])[1], TrainerConfig)
    assert (config.actor.lr, config.critic.lr, config.critic.path) == (1e-5, 1e-5, "007")
    assert config.rollout.adaptive_sampling and config.data.train == "a.jsonl:0.1,b.jsonl:0.9"


@pytest.mark.parametrize(
    "section", ["run={output_dir:1e3}", "rollout={stop:[a,2.50]}", "run={resume:true}", "data={train:[true]}"]
)
def test_what_a_section_given_as_a_whole_reads_as_a_number_is_no_text(section):
    _, given = settings_of(["data.validation=a", section])
    with pytest.raises(ValueError, match="was read as a .* is a text; put it in quotes"):
        structured(given, TrainerConfig)
