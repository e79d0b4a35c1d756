"""Each contradiction is found, named with its value and a remedy; several are found at once."""

import dataclasses
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.worlds import ROOT
from verl_megatron.checks import batch_arithmetic, check_config, check_sft_config, refuse, structured
from verl_megatron.config import EngineConfig, ModelConfig, RolloutConfig, SFTConfig, TrainerConfig
from verl_megatron.limits import CHOICES, INTERVALS, check_values, inside
from verl_megatron.presets import get_trainer_config

LLAMA = dict(
    model_type="llama",
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=96,
    vocab_size=150,
    rms_norm_eps=1e-5,
    max_position_embeddings=256,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "rewards.py").write_text("def score(prompt, response, truth, extra):\n    return 1.0\n")
    return tmp_path


def good(folder: Path, **changes) -> TrainerConfig:
    """A configuration without problems on 4 ranks; `changes` as section__setting=value."""
    config = TrainerConfig()
    config.run.output_dir = str(folder / "out")
    config.run.track_metrics = ["console"]
    config.data.train = str(folder / "train.jsonl")
    config.data.max_prompt_tokens, config.data.prompts_per_iteration = 100, 8
    config.actor = ModelConfig(path=str(folder / "model"), layout="tp2pp2")
    config.critic.layout = "pp2"
    config.rollout = RolloutConfig(tp=2, max_tokens=100)
    for name, value in changes.items():
        section, setting = name.split("__")
        setattr(getattr(config, section), setting, value)
    return config


def test_nothing_is_wrong_with_a_good_configuration(folder):
    assert check_config(good(folder), world_size=4) == []
    assert check_config(good(folder, algorithm__name="grpo", data__samples_per_prompt=2, reward__function=f"{folder}/rewards.py:score"), world_size=4) == []


# changes, and what the problem must say
BAD = [
    (dict(actor__layout="tp3"), ["actor.layout='tp3'", "needs 3 ranks or a multiple"]),
    (dict(actor__layout="tensor2"), ["actor.layout='tensor2'", "not understood"]),
    (dict(actor__layout="tp8"), ["actor.layout='tp8'", "4 ranks started"]),
    (dict(actor__devices="0-7"), ["actor.devices='0-7'", "below the 4"]),
    (dict(critic__devices="x"), ["critic.devices='x'"]),
    (dict(actor__layout="pp4", actor__stage_layers=[2, 2]), ["stage_layers=[2, 2]", "4 pipeline stages"]),
    (dict(actor__layout="pp2", actor__stage_layers=[2, 3]), ["4 layers", "[2, 3]"]),
    (dict(actor__layout="pp2vpp4"), ["vpp=4", "[2, 2]"]),
    (dict(actor__path=""), ["actor.path has to be given"]),
    (dict(actor__path="/nowhere"), ["actor.path='/nowhere'", "does not exist"]),
    (dict(critic__path="/nowhere"), ["critic.path='/nowhere'"]),
    (dict(reward__path="/nowhere"), ["reward.path='/nowhere'"]),
    (dict(reward__function=""), ["reward.function and reward.path are both empty"]),
    (dict(reward__function="nonsense"), ["reward.function='nonsense'"]),
    (dict(reward__function="missing.py:f"), ["missing.py", "does not exist"]),
    (dict(rollout__min_tokens=101), ["rollout.min_tokens=101", "rollout.max_tokens=100"]),
    (dict(rollout__top_k=0), ["rollout.top_k=0"]),
    (dict(rollout__top_p=0.0), ["rollout.top_p=0.0", "(0, 1]"]),
    (dict(rollout__temperature=0.0), ["rollout.temperature=0.0"]),
    (dict(rollout__max_tokens=157), ["rows of 257 tokens", "256 positions"]),
    (dict(algorithm__mini_batches=3), ["8 rows", "algorithm.mini_batches=3"]),
    (dict(algorithm__mini_batches=8), ["mini-batches of 1", "critic.layout=pp2dp2"]),
    (dict(algorithm__name="grpo"), ["data.samples_per_prompt=1", "at least 2"]),
    (dict(algorithm__name="pppo"), ["algorithm.name='pppo'", 'did you mean "ppo"?']),
    (dict(algorithm__name="grpo", data__samples_per_prompt=2, algorithm__critic_warmup=1), ["algorithm.critic_warmup=1", "no critic"]),
    (dict(algorithm__kl_target=0.1), ["algorithm.kl_target=0.1", "algorithm.kl_coef"]),
    (dict(algorithm__kl_coef=0.1, algorithm__kl_in="loss"), ["algorithm.kl_in=loss", "kl_estimator=k1", "k2 or k3"]),
    (dict(algorithm__importance_cap=2.0, rollout__top_p=0.6), ["algorithm.importance_cap=2.0", "rollout.top_p=0.6"]),
    (dict(algorithm__importance_cap=2.0, rollout__top_k=9, rollout__min_tokens=2), ["rollout.top_k=9 and rollout.min_tokens=2"]),
    (dict(algorithm__gamma=1.5), ["algorithm.gamma=1.5", "(0, 1]"]),
    (dict(algorithm__clip_low=float("nan")), ["algorithm.clip_low=nan"]),
    (dict(algorithm__kl_in="both"), ["algorithm.kl_in='both'", "reward, loss"]),
    (dict(algorithm__kl_estimator="k4"), ["algorithm.kl_estimator='k4'"]),
    (dict(engine__schedule="step"), ["engine.schedule='step'"]),
    (dict(engine__recompute="all"), ["engine.recompute='all'"]),
    (dict(engine__dtype="fp4"), ["engine.dtype='fp4'"]),
    (dict(engine__dtype="fp8", engine__spec="local"), ["engine.dtype=fp8 with engine.spec=local"]),
    (dict(engine__dtype="fp8", actor__layout="tp4"), ["actor.layout='tp4'", "engine.dtype=fp8", "24 feed-forward channels"]),
    (dict(engine__adam_betas=[0.9, 1.0]), ["engine.adam_betas=[0.9, 1.0]", "[0, 1)"]),
    (dict(data__overlong="skip"), ["data.overlong='skip'"]),
    (dict(data__train="/nowhere.jsonl"), ["data.train='/nowhere.jsonl'"]),
    (dict(data__train="???"), ["data.train has to be given"]),
    (dict(data__validation="/nowhere.jsonl"), ["data.validation='/nowhere.jsonl'"]),
    (dict(run__validate_interval=5), ["run.validate_interval=5", "data.validation"]),
    (dict(run__track_metrics=["consol"]), ["run.track_metrics", "consol"]),
    (dict(run__output_dir=""), ["run.output_dir=''"]),
    (dict(reshard__verify="always"), ["reshard.verify='always'"]),
]


@pytest.mark.parametrize(("changes", "words"), BAD, ids=lambda x: ",".join(x) if isinstance(x, dict) else "")
def test_each_contradiction_is_the_only_problem_and_is_named(folder, changes, words):
    problems = check_config(good(folder, **changes), world_size=4)
    assert len(problems) == 1, problems
    assert all(word in problems[0] for word in words), problems[0]


def test_a_model_that_tp_does_not_split(folder):
    config = good(folder, actor__layout="tp3", critic__layout="tp1", rollout__tp=3, data__prompts_per_iteration=12)
    problems = check_config(config, world_size=12)
    assert [problem.split(":")[0] for problem in problems] == ["actor.layout='tp3'", "actor.layout='tp3'", "rollout.tp=3", "rollout.tp=3"]
    assert any("8 attention heads" in problem for problem in problems) and any("4 key-value heads" in problem for problem in problems)


def test_a_config_json_that_is_not_understood(folder):
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA | {"rope_scaling": {"rope_type": "unheard"}}))
    problems = check_config(good(folder), world_size=4)
    assert problems and all("unheard" in problem for problem in problems)


def test_a_rollout_that_does_not_divide_the_ranks(folder):
    problem, *about_heads = check_config(good(folder, rollout__tp=3), world_size=4)
    assert "rollout.tp=3 must divide the 4 ranks" in problem and "[1, 2, 4]" in problem and len(about_heads) == 2
    problems = check_config(good(folder, rollout__tp=128), world_size=128)
    assert any("rollout.tp=128 must divide vLLM's vocabulary of 192" in problem for problem in problems)


def test_too_few_ranks(folder):
    problems = check_config(good(folder), world_size=1)
    assert len(problems) == 3 and all(name in problem for name, problem in zip(("actor.layout", "critic.layout", "rollout.tp"), problems))


def test_roles_on_disjoint_ranks(folder):
    config = good(folder, actor__devices="0-3", critic__devices="cuda:4-7", reward__path=str(folder / "model"), reward__devices="6-7", reward__layout="tp2")
    assert check_config(config, world_size=8) == []


def test_all_problems_come_in_one_error(folder):
    problems = check_config(good(folder, actor__layout="tp3", rollout__tp=3, data__train="/nowhere", algorithm__gamma=2.0, reward__function=""), world_size=4)
    assert len(problems) == 7
    with pytest.raises(ValueError) as error:
        refuse(problems)
    assert str(error.value).startswith("7 settings cannot work:") and all(problem in str(error.value) for problem in problems)
    refuse([])


def test_supervised_runs(folder):
    config = SFTConfig()
    config.run.track_metrics, config.run.output_dir = [], str(folder / "out")
    config.data.train, config.data.max_tokens = str(folder / "train.jsonl"), 256
    config.actor.path = str(folder / "model")
    assert check_sft_config(config, world_size=4) == []
    config.data.rows_per_step, config.data.max_tokens, config.run.save_interval, config.actor.layout = 1, 257, 5, "tp2"
    problems = check_sft_config(config, world_size=4)
    assert [problem.split("=")[0] for problem in problems] == ["data.rows_per_step", "data.max_tokens", "run.save_interval"]


def test_batch_arithmetic_is_one_line(folder):
    config = good(folder, data__prompts_per_iteration=64, data__samples_per_prompt=4, algorithm__mini_batches=2, algorithm__epochs=3)
    assert batch_arithmetic(config, 4) == (
        "64 prompts x 4 samples = 256 rows = 2 mini-batches of 128; actor tp2pp2: 128 rows of a mini-batch a data-parallel rank; "
        "critic pp2dp2: 64 rows of a mini-batch a data-parallel rank; micro-batches of at most 8192 tokens; 3 epochs: 6 optimizer steps an iteration; "
        "rollout 2 replicas of tp2"
    )


# ---- names and types --------------------------------------------------------------------------------------------------


def test_overrides_are_put_in():
    config = structured({"actor": {"lr": "1e-3", "layout": "tp2"}, "data": {"train": "a.jsonl"}, "rollout": {"stop": ["x"], "sleep": False}}, TrainerConfig)
    assert isinstance(config, TrainerConfig) and isinstance(config.actor, ModelConfig)
    assert (config.actor.lr, config.actor.layout, config.data.train, config.rollout.stop, config.rollout.sleep) == (1e-3, "tp2", "a.jsonl", ["x"], False)
    assert config.critic.lr == 1e-5 and config.engine == EngineConfig()


def test_all_wrong_names_and_types_are_said_at_once():
    overrides = {
        "actor": {"lrr": 1, "lr": "fast", "stage_layers": 3},
        "rolout": {"tp": 2},
        "rollout": {"tp": 2.5, "sleep": "maybe", "stop_token_ids": ["a"], "top_p": None},
        "run": 3,
    }
    with pytest.raises(ValueError) as error:
        structured(overrides, TrainerConfig)
    text = str(error.value)
    for words in (
        'actor.lrr is no setting, did you mean "lr"?',
        "actor.lr='fast' has a wrong type",
        "actor.stage_layers=3 has a wrong type",
        'rolout is no section, did you mean "rollout"?',
        "rollout.tp=2.5 has a wrong type",
        "rollout.sleep='maybe'",
        "rollout.stop_token_ids=['a']",
        "rollout.top_p=None",
        "run=3 is no section",
        "data.train has to be given",
    ):
        assert words in text, words
    assert text.startswith("10 settings cannot work")


def test_a_single_problem_is_the_whole_message():
    with pytest.raises(ValueError, match="^data.train has to be given; add data.train=...$"):
        structured({}, SFTConfig)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_hold_known_settings_within_their_limits(recipe):
    schema = SFTConfig if recipe.stem.startswith("sft") else TrainerConfig
    settings = OmegaConf.load(recipe)
    settings.data.setdefault("train", "given.jsonl")
    assert check_values(structured(settings, schema)) == []


# ---- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "interval", "expected"),
    [(0, "[0, 1]", True), (0, "(0, 1]", False), (1, "[0, 1)", False), (1e9, "[0, inf)", True), (float("nan"), "(-inf, inf)", False), (float("inf"), "[0, inf)", False)],
)
def test_intervals(value, interval, expected):
    assert inside(value, interval) is expected


def sections(schema) -> dict[str, type]:
    return {type(getattr(schema(), field.name)).__name__: type(getattr(schema(), field.name)) for field in dataclasses.fields(schema)}


def test_every_number_has_an_interval_and_no_entry_is_left_over():
    known = sections(TrainerConfig) | sections(SFTConfig)
    for name, kind in known.items():
        numbers = {field.name for field in dataclasses.fields(kind) if field.type in (int, float)}
        assert numbers == set(INTERVALS.get(name, {})), name
        assert set(CHOICES.get(name, {})) <= {field.name for field in dataclasses.fields(kind) if field.type is str}
    assert set(INTERVALS) | set(CHOICES) <= set(known)


def test_choices_are_those_of_the_tables_that_serve_them():
    from verl_megatron.algorithms import ALGORITHMS
    from verl_megatron.kl import KL_ESTIMATORS

    assert set(CHOICES["AlgorithmConfig"]["name"]) == set(ALGORITHMS)
    assert set(CHOICES["AlgorithmConfig"]["kl_estimator"]) == set(KL_ESTIMATORS)


# ---- presets ----------------------------------------------------------------------------------------------------------


def test_a_configuration_from_a_few_numbers(folder):
    config = get_trainer_config(dp_size=2, tp_size=2, pp_size=2, hybrid_engine=True, enable_recompute=True, mixed_precision=False)
    assert (config.actor.layout, config.critic.layout, config.rollout.tp) == ("tp2pp2dp2", "tp2pp2dp2", 2)
    assert (config.engine.recompute, config.engine.dtype, config.critic.lr) == ("full", "float32", 1e-5)
    config.actor.path, config.data.train, config.run.track_metrics = str(folder / "model"), str(folder / "train.jsonl"), []
    config.data.max_prompt_tokens = config.rollout.max_tokens = 100
    assert check_config(config, world_size=8) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(hybrid_engine=False), "rollout on ranks of its own is not available yet"),
        (dict(tp_size=0), "tp_size=0"),
        (dict(enable_recompute="some"), "enable_recompute='some'"),
        (dict(mixed_precision="fp4"), "mixed_precision='fp4'"),
    ],
)
def test_refused_numbers(settings, words):
    with pytest.raises(ValueError, match=words):
        get_trainer_config(**settings)
