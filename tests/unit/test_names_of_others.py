"""Settings of verl and TRL: each name is answered with the one here, by itself and in its kind of run."""

import re
from dataclasses import fields

import pytest

from verl_megatron.checks.overrides import structured
from verl_megatron.config import SCHEMAS, DPOConfig, RolloutConfig, TrainerConfig, name_here
from verl_megatron.config.older_names import OLDER
from verl_megatron.config.section import names_of, shown
from verl_megatron.config.trl_names import TRL
from verl_megatron.config.verl_names import VERL

SETTINGS = {
    f"{shown(section.name)}.{setting.name}"
    for schema in SCHEMAS.values()
    for section in fields(schema)
    for setting in fields(getattr(schema(), section.name))
}
KNOWN = {kind: names_of(schema) for kind, schema in SCHEMAS.items()}
ROWS = [
    (project, name, row)
    for project, table in (("verl", VERL), ("TRL", TRL), ("the older interface", OLDER))
    for rows in table.values()
    for row in rows
    for name in row.theirs
]


def test_the_tables_are_long_and_name_settings_that_exist():
    projects = [project for project, _, _ in ROWS]
    assert projects.count("verl") >= 150 and projects.count("TRL") >= 100
    named = {setting for _, _, row in ROWS for setting in row.settings}
    assert named <= SETTINGS and len(named) > 60
    in_notes = {found for _, _, row in ROWS for found in re.findall(r"`([a-z]+\.[a-z_]+)", row.note)}
    assert in_notes <= SETTINGS and len(in_notes) > 10


@pytest.mark.parametrize(("project", "name", "row"), ROWS)
def test_each_name_is_answered_with_the_one_here(project, name, row):
    said = name_here(name, row.settings)
    assert said.startswith(f"{name} of ") and said.endswith(("; rename it", "; leave it out"))
    if row.ours:
        assert f"is called {row.answer(name)} here" in said
    else:
        assert "has no setting here" in said and row.note.replace("`", "") in said


@pytest.mark.parametrize(("project", "name", "row"), [each for each in ROWS if each[0] == "verl"])
def test_a_full_name_of_verl_is_never_answered_as_another_one(project, name, row):
    """Nor as one of TRL, whatever its last part is; it may be a setting here, too."""
    said = name_here(name, KNOWN["train"])
    expected = f"is called {row.answer(name)} here" if row.ours else "has no setting here"
    assert said.startswith(f"{name} of verl {expected}")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("temperature", "is called rollout.temperature here; rename it"),
        ("top_k", "is called rollout.top_k here; rename it"),
        ("gpu_memory_utilization", "is called rollout.gpu_memory_utilization here; rename it"),
        (
            "val_kwargs.top_p",
            "has no setting here (validation takes rollout.top_p and rollout.top_k, as trai",
        ),
        ("val_kwargs.temperature", "is called data.validation_temperature here (0: greedy)"),
    ],
)
def test_settings_of_rollout_and_of_validation_are_told_apart(name, said):
    for full in (f"actor_rollout_ref.rollout.{name}", f"rollout.{name}"):
        if full not in KNOWN["train"]:
            assert name_here(full, KNOWN["train"]).startswith(f"{full} of verl {said}")


def test_a_row_holds_for_all_names_below_it():
    below = "actor_rollout_ref.rollout.multi_turn"
    for name in (f"{below}.max_user_turns", f"{below}.tools.path", below):
        assert name_here(name) == f"{below} of verl has no setting here (one turn a sample); leave it out"
    assert name_here("rollout.multi_turn.enable").startswith("rollout.multi_turn of verl has no")


def test_an_unknown_name_in_a_section_of_others_is_answered_by_itself():
    unknown = "is no setting here, nor a known one of verl"
    assert name_here("trainer.pace") == f"trainer.pace {unknown}; leave it out"
    assert name_here("trainer.save_frec") == (
        f'trainer.save_frec {unknown}, did you mean "save_freq"?; leave it out'
    )
    assert name_here("actor_rollout_ref.rollout.learning_rate").startswith(
        f"actor_rollout_ref.rollout.learning_rate {unknown}"
    )
    assert name_here("rollout.pace") == name_here("trainer") == name_here("trainer.pace", anywhere=True) == ""


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("train", "learning_rate", "is called actor.lr here (and critic.lr); rename it"),
        ("sft", "learning_rate", "is called actor.lr here; rename it"),
        ("dpo", "learning_rate", "is called actor.lr here; rename it"),
        ("reward_model", "learning_rate", "is called reward.lr here (of verl-megatron reward-model); rename"),
        ("train", "model_name_or_path", "is called actor.path here; rename it"),
        ("reward_model", "model_name_or_path", "is called reward.path here"),
        ("sft", "per_device_train_batch_size", "is called data.samples_per_step here"),
        ("dpo", "per_device_train_batch_size", "is called data.pairs_per_step here"),
        ("sft", "num_generations", "has no setting in this kind of run; leave it out"),
        ("sft", "deepspeed", "is called engine.sharding=full here"),
    ],
)
def test_only_settings_of_the_kind_of_run_are_named(kind, name, said):
    assert name_here(name, KNOWN[kind]).startswith(f"{name} of TRL {said}")


@pytest.mark.parametrize("kind", SCHEMAS)
def test_no_answer_names_a_setting_that_the_kind_of_run_does_not_have(kind):
    for _, name, _ in ROWS:
        named = set(re.findall(r"[a-z_.]+", name_here(name, KNOWN[kind]).replace(name, "", 1))) & SETTINGS
        assert named <= KNOWN[kind], name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rollout": {"n": 8}}, "rollout.n of verl is called data.samples_per_prompt here"),
        ({"data": {"train_batch_size": 8}}, "is called data.prompts_per_iteration here (prompts, in both)"),
        ({"trainer": {"total_epochs": 3}}, "trainer.total_epochs of verl is called run.iterations here"),
        ({"algorithm": {"adv_estimator": "grpo"}}, "adv_estimator of verl is called algorithm.name here"),
        (
            {"actor_rollout_ref": {"rollout": {"n": 8}, "actor": {"optim": {"lr": 1}}}},
            "actor_rollout_ref.actor.optim.lr of verl is called actor.lr here; rename it",
        ),
        ({"critic": {"optim": {"lr": 1}}}, "critic.optim.lr of verl is called critic.lr here"),
        ({"num_generations": 8}, "num_generations of TRL is called data.samples_per_prompt here"),
        ({"learning_rate": 1e-5}, "learning_rate of TRL is called actor.lr here (and critic.lr)"),
        ({"fsdp_config": {"sharding_strategy": "FULL_SHARD"}}, "is called engine.sharding here"),
        ({"checkpoint_config": {"keep_last_k": 3}}, "of the older interface is called run.keep_last_k here"),
        ({"beta": 0.1}, "beta of TRL is called algorithm.kl_coef here"),
        ({"rollout": {"pace": 1}}, "rollout.pace is no setting"),
        ({"trainer": {"pace": 1}}, "trainer.pace is no setting here, nor a known one of verl"),
        ({"trainer": {}}, "trainer is no section; the sections are"),
        ({"lr": 1}, "lr is no section; write actor.lr or critic.lr"),
        ({"nnodes": 2}, "nnodes of verl is called NNODES here"),
    ],
)
def test_a_command_line_with_names_of_others(given, said):
    with pytest.raises(ValueError) as error:
        structured({"data": {}} | given, TrainerConfig)
    assert said in str(error.value)


def test_each_setting_is_answered_although_others_are_unknown():
    """Also below sections that are ours; what no table has is said once."""
    given = {
        "actor_rollout_ref": {"rollout": {"n": 8, "glow": 1, "multi_turn": {"enable": True, "format": "x"}}},
        "trainer": {"rollout_data_dir": "x", "pace": 1, "total_epochs": 3},
        "critic": {"optim": {"lr": 1, "pace": 2, "drift": 3}, "lr": 1e-5},
        "rolout": {"tp": 2, "top_p": 1},
        "data": {"train": "x"},
    }
    with pytest.raises(ValueError) as error:
        structured(given, TrainerConfig)
    count, *problems = str(error.value).splitlines()
    assert count == "9 settings cannot work:"
    starts = [
        "actor_rollout_ref.rollout.n of verl is called data.samples_per_prompt here; rename it",
        "actor_rollout_ref.rollout.glow is no setting here, nor a known one of verl; leave it out",
        "actor_rollout_ref.rollout.multi_turn of verl has no setting here (one turn a sample); leave it out",
        "trainer.rollout_data_dir of verl is called rollout.record_interval here",
        "trainer.pace is no setting here, nor a known one of verl; leave it out",
        "trainer.total_epochs of verl is called run.iterations here",
        "critic.optim.lr of verl is called critic.lr here; rename it",
        "critic.optim is no setting; critic has path,",
        'rolout is no section, did you mean "rollout"?',
    ]
    for problem, start in zip(problems, starts, strict=True):
        assert problem.startswith(f"  - {start}")


def test_a_name_belongs_to_the_kind_of_run():
    with pytest.raises(ValueError, match="beta of TRL is called dpo.beta here"):
        structured({"beta": 0.1}, DPOConfig)
    with pytest.raises(AttributeError, match="rollout.n of verl is called data.samples_per_prompt here"):
        RolloutConfig().n = 8
    with pytest.raises(ValueError, match="actor.ppo_epochs of verl is called algorithm.epochs here"):
        TrainerConfig().actor.ppo_epochs = 2
    with pytest.raises(ValueError, match="batch_size_per_device of verl is called rollout.max_num_seqs here"):
        structured({"data": {"train": ""}, "rollout": {"batch_size_per_device": 2}}, TrainerConfig)
