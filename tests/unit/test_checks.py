"""Each contradiction is found, named with its value and a remedy; several are found at once."""

import json
import time
from pathlib import Path

import pytest

from tests.job_files import LLAMA, write_job
from verl_megatron.checks.batches import batch_arithmetic
from verl_megatron.checks.problems import refuse
from verl_megatron.checks.settings import check_config, check_supervised_config
from verl_megatron.config import (
    DPOConfig,
    ModelConfig,
    RewardModelConfig,
    RolloutConfig,
    SFTConfig,
    TrainerConfig,
)
from verl_megatron.config.section import attribute_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_job(tmp_path)
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
        setattr(getattr(config, attribute_of(section)), setting, value)
    return config


def test_distillation_needs_no_reward_unless_it_validates(folder):
    settings = dict(algorithm__name="distillation", teacher__path=f"{folder}/model", reward__function="")
    assert check_config(good(folder, **settings), world_size=4) == []
    (problem,) = check_config(
        good(folder, **settings, data__validation=f"{folder}/train.jsonl"), world_size=4
    )
    assert "both empty" in problem and "data.validation=" in problem and "needs scores" in problem


def test_nothing_is_wrong_with_a_good_configuration(folder):
    assert check_config(good(folder), world_size=4) == []
    separate = dict(rollout__devices="4-5", async__max_staleness=1)
    assert check_config(good(folder, **separate), world_size=4) == []
    assert (
        check_config(
            good(
                folder,
                algorithm__name="grpo",
                data__samples_per_prompt=2,
                reward__function=f"{folder}/rewards.py:score",
            ),
            world_size=4,
        )
        == []
    )


# changes, and what the problem must say
BAD = [
    (dict(actor__layout="tp3"), ["actor.layout='tp3'", "needs 3 ranks or a multiple"]),
    (dict(actor__layout="tensor2"), ["actor.layout='tensor2'", "not understood"]),
    (dict(actor__layout="tp8"), ["actor.layout='tp8'", "with 4 ranks: layout"]),
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
    (dict(rollout__devices="4"), ["rollout.tp=2 must divide the number of ranks that generate, 1;"]),
    (dict(rollout__devices="2-3"), ["rollout.devices='2-3' leaves 2 ranks to train, and 4 were started"]),
    (dict(rollout__devices="4,6"), ["rollout.devices='4,6' must be the last ranks of the run"]),
    (dict(rollout__devices="0-1"), ["rollout.devices='0-1' shares ranks", "write 0-3, or only ranks after"]),
    (dict(rollout__devices="five"), ["rollout.devices='five'"]),
    (
        dict(rollout__devices="4-5", reshard__mode="swap"),
        ["reshard.mode=swap shares memory", "use reshard.mode=keep"],
    ),
    (
        dict(rollout__devices="4-5", reshard__offload="all"),
        ["reshard.offload=all has no effect with a rollout on ranks of its own"],
    ),
    (dict(async__max_staleness=2), ["async.max_staleness=2 needs a rollout on ranks of its own"]),
    (dict(async__max_staleness=-1), ["async.max_staleness=-1"]),
    (dict(rollout__devices="4-5", async__sync_interval=2), ["async.sync_interval=2", "buffer=window, or"]),
    (
        dict(rollout__devices="4-5", async__max_staleness=1, rollout__top_p=0.6),
        ["algorithm.correction=auto", "rollout.top_p=0.6"],
    ),
    (dict(rollout__min_tokens=101), ["rollout.min_tokens=101", "rollout.max_tokens=100"]),
    (dict(rollout__top_k=0), ["rollout.top_k=0"]),
    (dict(rollout__top_p=0.0), ["rollout.top_p=0.0", "(0, 1]"]),
    (dict(rollout__temperature=0.0), ["rollout.temperature=0.0"]),
    (dict(rollout__max_tokens=157), ["samples of 257 tokens", "256 positions"]),
    (dict(algorithm__num_mini_batches=3), ["8 samples", "algorithm.num_mini_batches=3"]),
    (dict(algorithm__num_mini_batches=8), ["mini-batches of 1", "critic.layout=pp2dp2"]),
    (dict(algorithm__name="grpo"), ["data.samples_per_prompt=1", "at least 2"]),
    (dict(algorithm__name="pppo"), ["algorithm.name='pppo'", 'did you mean "ppo"?']),
    (
        dict(algorithm__name="grpo", data__samples_per_prompt=2, algorithm__critic_warmup=1),
        ["algorithm.critic_warmup=1", "no critic"],
    ),
    (dict(critic__value_coef=0.5), ["critic.value_coef=0.5 has no effect", "set share_trunk=true"]),
    (
        dict(critic__trunk_gradient=False),
        ["critic.trunk_gradient=false has no effect", "set share_trunk=true"],
    ),
    (
        dict(algorithm__name="grpo", data__samples_per_prompt=2, critic__share_trunk=True),
        ["critic.share_trunk=true", "no critic"],
    ),
    (dict(critic__share_trunk=True), ["critic.layout='pp2'", "critic.share_trunk=true", "'tp1'"]),
    (
        dict(critic__share_trunk=True, critic__layout="tp1", critic__value_coef=0.0),
        ["critic.value_coef=0", "such as 0.1"],
    ),
    (
        dict(critic__share_trunk=True, critic__layout="tp1", algorithm__critic_warmup=1),
        ["algorithm.critic_warmup=1", "critic.share_trunk=true"],
    ),
    (dict(algorithm__kl_ctrl_target=0.1), ["algorithm.kl_ctrl_target=0.1", "algorithm.kl_coef"]),
    (
        dict(algorithm__kl_coef=0.1, algorithm__kl_in="loss"),
        ["algorithm.kl_in=loss", "kl_estimator=k1", "k2 or k3"],
    ),
    (
        dict(algorithm__correction="mask", rollout__top_p=0.6),
        ["algorithm.correction=mask", "rollout.top_p=0.6"],
    ),
    (
        dict(algorithm__correction="truncate", rollout__top_k=9, rollout__min_tokens=2),
        ["rollout.top_k=9 and rollout.min_tokens=2"],
    ),
    (dict(algorithm__correction_high=3.0), ["algorithm.correction_high=3.0", "correction=truncate"]),
    (dict(algorithm__correction_level="sequence"), ["algorithm.correction_level=sequence"]),
    (dict(algorithm__correction="tis"), ["algorithm.correction='tis'", "truncate"]),
    (dict(algorithm__objective="clipped"), ["algorithm.objective='clipped'", 'did you mean "clip"?']),
    (dict(algorithm__normalizer="mean"), ["algorithm.normalizer='mean'", "token_mean"]),
    (dict(algorithm__dual_clip=0.5), ["algorithm.dual_clip=0.5", "above 1"]),
    (dict(algorithm__dual_clip=3.0, algorithm__objective="cispo"), ["algorithm.dual_clip=3.0", "cispo"]),
    (dict(algorithm__kl_unbiased=True), ["algorithm.kl_unbiased=true", "kl_in=reward"]),
    (
        dict(algorithm__kl_unbiased=True, algorithm__kl_in="loss", algorithm__kl_estimator="k2"),
        ["algorithm.kl_estimator=k2", "k1 or k3"],
    ),
    (dict(algorithm__name="distillation"), ["teacher.path is empty"]),
    (dict(reward__function=""), ["both empty", "algorithm.name=ppo needs scores"]),
    (dict(teacher__path="/nowhere"), ["teacher.path='/nowhere'"]),
    (dict(reward__overlong_tokens=101), ["reward.overlong_tokens=101", "rollout.max_tokens=100"]),
    (dict(algorithm__mask_cut=True, rollout__ignore_eos=True), ["mask_cut=true", "ignore_eos=true"]),
    (
        dict(reward__missing_eos_penalty=1.0, rollout__ignore_eos=True),
        ["missing_eos_penalty=1 ", "ignore_eos=true"],
    ),
    (dict(reward__missing_eos_penalty=-1.0), ["reward.missing_eos_penalty=-1.0"]),
    (dict(algorithm__dynamic_sampling=True), ["algorithm.name=ppo", "do not compare"]),
    (
        dict(algorithm__dynamic_sampling=True, algorithm__name="remax", data__samples_per_prompt=2),
        ["algorithm.name=remax", "do not compare"],
    ),
    (dict(algorithm__max_sampling_rounds=0), ["algorithm.max_sampling_rounds=0"]),
    (dict(algorithm__gamma=1.5), ["algorithm.gamma=1.5", "(0, 1]"]),
    (dict(algorithm__clip_ratio_low=float("nan")), ["algorithm.clip_ratio_low=nan"]),
    (dict(algorithm__kl_in="both"), ["algorithm.kl_in='both'", "reward, loss"]),
    (dict(algorithm__kl_estimator="k4"), ["algorithm.kl_estimator='k4'"]),
    (dict(engine__lr_decay_style="step"), ["engine.lr_decay_style='step'"]),
    (dict(engine__recompute="all"), ["engine.recompute='all'"]),
    (dict(engine__dtype="fp4"), ["engine.dtype='fp4'"]),
    (
        dict(engine__dtype="fp8", engine__transformer_impl="local"),
        ["engine.dtype=fp8 with engine.transformer_impl=local"],
    ),
    (
        dict(engine__dtype="fp8", actor__layout="tp4"),
        ["actor.layout='tp4'", "engine.dtype=fp8", "24 feed-forward channels"],
    ),
    (dict(engine__adam_betas=[0.9, 1.0]), ["engine.adam_betas=[0.9, 1.0]", "[0, 1)"]),
    (dict(data__overlong="skip"), ["data.overlong='skip'"]),
    (dict(data__train="/nowhere.jsonl"), ["data.train='/nowhere.jsonl'"]),
    (dict(data__train="???"), ["data.train has to be given"]),
    (dict(data__validation="/nowhere.jsonl"), ["data.validation='/nowhere.jsonl'"]),
    (dict(run__validate_interval=5), ["run.validate_interval=5", "data.validation"]),
    (dict(run__track_metrics=["consol"]), ["run.track_metrics", "consol"]),
    (dict(run__output_dir=""), ["run.output_dir=''"]),
    (dict(reshard__verify="always"), ["reshard.verify='always'"]),
    (dict(rollout__temperature=2.5), ["rollout.temperature=2.5", "[0.01, 2]"]),
    (dict(rollout__temperature=1e-9), ["rollout.temperature=1e-09"]),
    (dict(data__validation_temperature=0.001), ["data.validation_temperature=0.001", "0 (greedy)"]),
    (dict(rollout__stop=["a", ""]), ["rollout.stop has an empty string"]),
    (dict(rollout__stop=["a"] * 10**6), ["rollout.stop has 1,000,000 entries"]),
    (dict(rollout__stop_token_ids=[3, 150, -1]), ["rollout.stop_token_ids has [150, -1]", "150 tokens"]),
    (dict(rollout__top_k=10**12), ["rollout.top_k=1000000000000"]),
    (dict(rollout__kv_cache_mib=10**7), ["rollout.kv_cache_mib=10000000", "more than this host has"]),
    (dict(reshard__window_mib=10**12), ["reshard.window_mib=1000000000000"]),
    (dict(reward__workers=10**6), ["reward.workers=1000000"]),
    (dict(reward__failure_score=1e300), ["reward.failure_score=1e+300"]),
    (dict(actor__lr=1e30), ["actor.lr=1e+30", "[0, 1]"]),
    (dict(engine__adam_eps=1e-300), ["engine.adam_eps=1e-300"]),
    (dict(engine__adam_betas=[0.9] * 10**6), ["engine.adam_betas=[0.9, 0.9", "must be two numbers"]),
    (dict(run__seed=2**64), [f"run.seed={2**64}", "4294967295"]),
    (dict(run__seed=10**5000), ["run.seed=a int that is too long"]),
    (
        dict(data__prompts_per_iteration=10**6, data__samples_per_prompt=10**6),
        ["1000000000000 samples are more than 1,000,000"],
    ),
    (dict(actor__layout="tp1000000000"), ["actor.layout='tp1000000000'"]),
    (dict(actor__layout="tp" + "9" * 10**6), ["actor.layout='tp999", "characters"]),
    (dict(actor__layout="tp\u0662"), ["not understood"]),
    (dict(actor__layout="tp0"), ["size of 0"]),
    (dict(actor__layout="tp-1"), ["not understood"]),
    (dict(critic__devices="0-999999999"), ["critic.devices='0-999999999'", "at most 131,072"]),
    (dict(critic__devices="3-0"), ["critic.devices='3-0'"]),
    (dict(actor__stage_layers=[1] * 10**6), ["stage_layers=[1, 1", "2 pipeline stages"]),
    (dict(run__track_metrics=["console", "console"]), ["run.track_metrics names console twice"]),
    (
        dict(run__output_dir="/etc/hostname/x"),
        ["run.output_dir='/etc/hostname/x' is below the file /etc/hostname"],
    ),
    (dict(run__output_dir="/proc/x"), ["run.output_dir='/proc/x' cannot be written"]),
    (dict(run__output_dir="a" * 300), ["run.output_dir='aaa", "File name too long"]),
    (dict(run__output_dir="a\0b"), ["run.output_dir='a\\x00b'", "no name"]),
    (dict(run__output_dir="a\nb"), ["run.output_dir='a\\nb'", "no name"]),
    (dict(data__train=""), ["data.train has to be given"]),
    (dict(data__train="/"), ["data.train='/' is a folder"]),
    (dict(data__train="a" * 10**6), ["data.train='aaa", "File name too long"]),
]


@pytest.mark.parametrize(("changes", "words"), BAD, ids=lambda x: ",".join(x) if isinstance(x, dict) else "")
def test_each_contradiction_is_the_only_problem_and_is_named(folder, changes, words):
    problems = check_config(good(folder, **changes), world_size=4)
    assert len(problems) == 1, problems
    assert all(word in problems[0] for word in words), problems[0]


def test_a_problem_is_cut_and_comes_at_once(folder):
    started = time.monotonic()
    for changes, _ in BAD:
        assert all(len(problem) < 1500 for problem in check_config(good(folder, **changes), world_size=4)), (
            changes
        )
    assert time.monotonic() - started < 120  # some values once took for ever


def test_a_link_to_nowhere_is_no_folder(folder):
    (folder / "link").symlink_to(folder / "gone")
    for name in ("link", "link/run"):
        (problem,) = check_config(good(folder, run__output_dir=str(folder / name)), world_size=4)
        assert "a link to what does not exist" in problem


def test_a_model_that_tp_does_not_split(folder):
    config = good(
        folder, actor__layout="tp3", critic__layout="tp1", rollout__tp=3, data__prompts_per_iteration=12
    )
    problems = check_config(config, world_size=12)
    assert [problem.split(":")[0] for problem in problems] == [
        "actor.layout='tp3'",
        "actor.layout='tp3'",
        "rollout.tp=3",
        "rollout.tp=3",
    ]
    assert any("8 attention heads" in problem for problem in problems) and any(
        "4 key-value heads" in problem for problem in problems
    )


def test_a_config_json_that_is_not_understood(folder):
    (folder / "model" / "config.json").write_text(
        json.dumps(LLAMA | {"rope_scaling": {"rope_type": "unheard"}})
    )
    problems = check_config(good(folder), world_size=4)
    assert problems and all("unheard" in problem for problem in problems)


def test_a_rollout_that_does_not_divide_the_ranks(folder):
    problem, *about_heads = check_config(good(folder, rollout__tp=3), world_size=4)
    assert "rollout.tp=3 must divide the number of ranks that generate, 4" in problem, problem
    assert "[1, 2, 4]" in problem and len(about_heads) == 2
    problems = check_config(good(folder, rollout__tp=128), world_size=128)
    assert any("tp=128 must divide vLLM's padded vocabulary of 192" in problem for problem in problems)


def test_too_few_ranks(folder):
    problems = check_config(good(folder), world_size=1)
    assert len(problems) == 3 and all(
        name in problem for name, problem in zip(("actor.layout", "critic.layout", "rollout.tp"), problems)
    )


def test_roles_on_disjoint_ranks(folder):
    config = good(
        folder,
        actor__devices="0-3",
        critic__devices="cuda:4-7",
        reward__path=str(folder / "model"),
        reward__devices="6-7",
        reward__layout="tp2",
    )
    assert check_config(config, world_size=8) == []


def test_all_problems_come_in_one_error(folder):
    problems = check_config(
        good(
            folder,
            actor__layout="tp3",
            rollout__tp=3,
            data__train="/nowhere",
            algorithm__gamma=2.0,
            reward__function="",
        ),
        world_size=4,
    )
    assert len(problems) == 7
    with pytest.raises(ValueError) as error:
        refuse(problems)
    assert str(error.value).startswith("7 settings cannot work:") and all(
        problem in str(error.value) for problem in problems
    )
    refuse([])


def test_supervised_runs(folder):
    config = SFTConfig()
    config.run.track_metrics, config.run.output_dir = [], str(folder / "out")
    config.data.train, config.data.max_tokens = str(folder / "train.jsonl"), 256
    config.actor.path = str(folder / "model")
    assert check_supervised_config(config, world_size=4) == []
    config.engine.min_lr_ratio, config.data.samples_per_step = 0.1, 1
    config.data.max_tokens, config.actor.layout = 257, "tp2"
    config.run.save_interval = config.run.validate_interval = config.run.keep_best_k = 5
    config.data.validation = config.data.train
    problems = check_supervised_config(config, world_size=4)
    wrong = ["engine.min_lr_ratio", "data.samples_per_step", "data.max_tokens", "run.keep_best_k"]
    assert [problem.split("=")[0] for problem in problems] == wrong


def test_pairs(folder):
    for schema in (DPOConfig, RewardModelConfig):
        config = schema()
        model = config.actor if schema is DPOConfig else config.reward
        name = "actor" if schema is DPOConfig else "reward"
        config.run.track_metrics, config.run.output_dir = [], str(folder / "out")
        config.data.train, config.data.max_tokens = str(folder / "train.jsonl"), 256
        assert check_supervised_config(config, world_size=4) == [
            f"{name}.path has to be given; name a Hugging Face folder"
        ]
        model.path, model.layout, config.data.pairs_per_step = str(folder / "model"), "tp2", 1
        config.run.save_interval = config.run.validate_interval = config.run.keep_best_k = 5
        config.data.validation = config.data.train
        (problem,) = check_supervised_config(config, world_size=4)
        assert (
            problem.startswith("data.pairs_per_step=1 leaves some of the 2") and f"{name}.layout" in problem
        )
    config = DPOConfig()
    config.run.output_dir = str(folder / "out")
    config.data.train, config.data.max_tokens = str(folder / "train.jsonl"), 256
    config.actor.path, config.dpo.loss, config.dpo.label_smoothing = str(folder / "model"), "ipo", 0.1
    (problem,) = check_supervised_config(config, world_size=4)
    assert problem.startswith("dpo.label_smoothing=0.1 belongs to dpo.loss=sigmoid, not to ipo")


def test_batch_arithmetic_is_one_line(folder):
    config = good(
        folder,
        data__prompts_per_iteration=64,
        data__samples_per_prompt=4,
        algorithm__num_mini_batches=2,
        algorithm__epochs=3,
    )
    assert batch_arithmetic(config, 4) == (
        "64 prompts x 4 samples = 256 samples = 2 mini-batches of 128; actor tp2pp2: 128 samples of a "
        "mini-batch a data-parallel rank; "
        "critic pp2dp2: 64 samples of a mini-batch a data-parallel rank; micro-batches of at most 8192 "
        "tokens; 3 epochs: 6 optimizer steps an iteration; "
        "rollout 2 replicas of tp2"
    )
