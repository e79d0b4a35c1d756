"""Which worlds a run has, from the devices of its models, and what a scoring world is told."""

import pytest
import torch

from tests.planned import run_config
from verl_megatron.checks.settings import check_config
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.sample_table import SampleTable, columns_of
from verl_megatron.launch.merging import devices_in
from verl_megatron.model_specs import models_apart, models_of, serving_worlds
from verl_megatron.planner.search.choices import configured

APART = {"algorithm.kl_coef": 0.1, "actor.layout": "tp1"}


def worlds_of(**devices: str) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    settings = {section: {"devices": text} for section, text in devices.items()}
    return {each.name: (each.ranks, each.models) for each in serving_worlds(devices_in(settings))}


def test_disjoint_devices_are_worlds_of_their_own():
    assert worlds_of(reference="2") == {"reference": ((2,), ("reference",))}
    assert worlds_of(rollout="1", reference="2", reward="2") == {
        "rollout": ((1,), ()),
        "reward": ((2,), ("reward", "reference")),
    }
    assert worlds_of(rollout="2-3", reference="1", reward="4-5") == {
        "reference": ((1,), ("reference",)),
        "rollout": ((2, 3), ()),
        "reward": ((4, 5), ("reward",)),
    }
    assert serving_worlds(devices_in({"actor": {"devices": 0}, "teacher": {"devices": 1}}))  # as YAML has it
    assert list(worlds_of(actor="0-1", teacher="2", rollout="3+4")) == ["teacher", "rollout:0", "rollout:1"]


def test_overlapping_devices_are_colocated():
    assert worlds_of(reward="2-3") == {}  # the actor has all ranks
    assert worlds_of(actor="0-1", critic="2-3", reward="3") == {}
    assert worlds_of(actor="0-3", reward="2-3", rollout="4") == {"rollout": ((4,), ())}
    assert worlds_of(rollout="0-3", reference="0-3") == worlds_of(actor="2-3", rollout="0-3") == {}
    assert worlds_of(actor="0-3", reference="2-5") == worlds_of(actor="0-3", rollout="2-5") == {}
    assert worlds_of(rollout="0-3", reward="4") == {"reward": ((4,), ("reward",))}


@pytest.mark.parametrize(
    "devices",
    [
        {"rollout": "2", "reference": "2"},
        {"rollout": "2", "reward": "4"},
        {"rollout": "0-1+2-3"},
        {"reference": "2-3", "reward": "3-4"},
    ],
)
def test_worlds_that_overlap_or_leave_ranks_out_are_refused(devices):
    with pytest.raises(ValueError, match="must be the last ranks of the run in order"):
        worlds_of(**devices)


def test_models_are_where_their_devices_are():
    config = configured(run_config(), APART | {"reference.devices": "2-3", "reference.layout": "tp2"})
    assert "reference" not in [spec.name for spec in models_of(config)]
    (reference,) = models_apart(config)
    assert (reference.name, reference.model.layout, reference.model.path) == (
        "reference",
        "tp2",
        config.actor.path,
    )


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"reference.devices": "2-4", "reference.layout": "tp2"},
            "reference.layout='tp2', reference.devices='2-4', with 3 ranks",
        ),
        ({"actor.devices": "0-1", "reward.devices": "2"}, "reward.path is empty"),
        ({"algorithm.kl_coef": 0.0, "reference.devices": "2"}, "reference.devices=2 has no effect with"),
        ({"reference.layout": "tp2"}, "reference.layout=tp2 has no effect without ranks of its own"),
        (
            {"reference.devices": "0-1", "reference.layout": "tp2"},
            "reference.layout=tp2 has no effect without ranks of its own",
        ),
        (
            {"actor.devices": "0", "reference.devices": "0-1"},
            "reference.devices='0-1' shares ranks with those that train, and there the reference uses those "
            "of the actor; write 0, or",
        ),
        (
            {"rollout.devices": "0-2"},
            "rollout.devices='0-2' shares ranks with those that train, and there vLLM uses all of them; "
            "write 0-1, or",
        ),
        ({"rollout.devices": "0-1", "async.max_staleness": 1}, "async.max_staleness=1 needs a rollout"),
        ({"reference.devices": "3"}, "reference.devices='3' leaves 3 ranks to train, and 2 were started"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, problem):
    problems = check_config(configured(run_config(), APART | settings), world_size=2)
    assert len([text for text in problems if problem in text]) == 1, problems


def test_the_table_from_columns_is_the_gathered_one():
    """Both worlds make it from what three owners tell; their samples alternate."""
    batches = []
    for owner in range(3):
        ids = list(range(owner, 7, 3))
        prompts, responses = (
            [[1] * (2 + number) for number in ids],
            [[2] * (1 + number % 2) for number in ids],
        )
        batch = RolloutBatch.from_lists(ids, prompts, responses)
        batch.group_id = torch.tensor(ids) // 2
        batches.append(batch)
    columns = [columns_of(batch, owner=owner) for owner, batch in enumerate(batches)]
    table = SampleTable.join(columns, num_mini_batches=2, shared_prompts=True)
    assert table.owner_B.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert table.response_B.tolist() == [1, 2, 1, 2, 1, 2, 1]
    assert table.lengths_B.tolist() == [3, 5, 5, 7, 7, 9, 9]
    assert table.group_B.tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert table.mini_batches == [range(0, 3), range(3, 7)]
    assert table.prompt_B is not None and table.prompt_B.tolist() == list(range(2, 9))
