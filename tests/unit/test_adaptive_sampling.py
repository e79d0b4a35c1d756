"""Sampling by prompt length: tables and their texts, requests, groups of different sizes, metrics, checks."""

import re

import pytest
import torch
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.job_files import write_job
from tests.one_rank import ONE_RANK
from tests.scripted_engine import ScriptedEngine
from tests.unit.test_checks import good
from tests.unit.test_sampler import FirstToken, sampler_of
from verl_megatron.checks.batches import batch_arithmetic
from verl_megatron.checks.overrides import structured
from verl_megatron.checks.rollout import sampling_notes
from verl_megatron.checks.settings import check_config
from verl_megatron.config import RolloutConfig, TrainerConfig
from verl_megatron.data.prompts import GivenPrompts, Prompt
from verl_megatron.evaluation import Evaluation
from verl_megatron.observe.metrics import Sums
from verl_megatron.rewards.shaping import has_variance, take_baselines
from verl_megatron.rollout.adaptive import add_shares, entry_of, parse_table
from verl_megatron.rollout.sampler import Draw
from verl_megatron.rollout.sampling import Sampling, sample_seed

TEXT = "0-3:greedy+samples:2,4-5:as_set,6-:top_k:5+temperature:0.7+samples:3"
TABLE = parse_table(TEXT)
USUAL = Sampling(temperature=1.3, top_p=0.9, max_tokens=9)


# ---- the text ----------------------------------------------------------------------------------------------


def test_a_table_says_the_sampling_of_each_length():
    found = [entry_of(TABLE, tokens) for tokens in (1, 3, 4, 5, 6, 4000)]
    assert [entry.label for entry in found] == ["0-3", "0-3", "4-5", "4-5", "6-", "6-"]
    greedy, usual, last = TABLE
    assert greedy.greedy and greedy.sampling(USUAL) == Sampling(temperature=0, top_p=0.9, max_tokens=9)
    assert not usual.greedy and usual.sampling(USUAL) == USUAL and usual.samples is None
    assert last.sampling(USUAL) == Sampling(temperature=0.7, top_k=5, top_p=0.9, max_tokens=9)
    assert [entry.samples for entry in TABLE] == [2, None, 3]
    assert parse_table("") == parse_table(" ") == ()


@pytest.mark.parametrize(
    "written",
    [
        "rollout.adaptive_sampling=[0-63:greedy,64-:temperature:0.7+samples:4]",
        "rollout.adaptive_sampling='0-63:greedy, 64-: temperature=0.7+samples=4'",
    ],
)
def test_a_table_is_a_list_on_the_command_line(written):
    value = OverridesParser.create().parse_override(written).value()
    table = RolloutConfig(adaptive_sampling=getattr(value, "text", value)).adaptive_sampling
    assert parse_table(table) == parse_table("0-63:greedy,64-:temperature:0.7+samples:4")


@pytest.mark.parametrize(
    "written",
    [
        "[0-63:greedy, 64-:temperature:0.7+samples:4]",
        "[0-63: greedy, 64-: {temperature: 0.7, samples: 4}]",
        "{0-63: greedy, 64-: {temperature: 0.7, samples: 4}}",
        "0-63:greedy,64-:temperature:0.7+samples:4",
    ],
)
def test_a_recipe_may_write_it_in_yamls_ways(written):
    given = {"data": {"train": "a"}, "rollout": {"adaptive_sampling": yaml.safe_load(written)}}
    config = structured(given, TrainerConfig)
    assert config.rollout.adaptive_sampling == "0-63:greedy,64-:temperature:0.7+samples:4"


def test_true_is_the_usual_table_and_false_none():
    table = parse_table(RolloutConfig(adaptive_sampling=True).adaptive_sampling)
    assert [(entry.label, entry.changes) for entry in table] == [
        ("0-63", {"temperature": 0}),
        ("64-511", {}),
        ("512-", {"top_k": 50, "temperature": 0.7}),
    ]
    assert RolloutConfig(adaptive_sampling=False) == RolloutConfig()
    given = {"data": {"train": "a"}, "rollout": {"adaptive_sampling": True}}
    assert parse_table(structured(given, TrainerConfig).rollout.adaptive_sampling) == table


@pytest.mark.parametrize("value", [[True], [False], [None], {"0-": True}, {"0-": None}, "\uff10-:greedy"])
def test_a_bool_in_a_table_is_no_entry(value):
    with pytest.raises(ValueError, match="which is no (entry|sampling)"):
        parse_table(RolloutConfig(adaptive_sampling=value).adaptive_sampling)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0-5:greedy,5-:as_set", "has a range 5- that overlaps the entry before it; let it begin with 6"),
        ("0-5:greedy,7-:as_set", "has a range 7- that leaves out 6; let it begin with 6"),
        ("1-:greedy", "has a range 1- that leaves out 0; let it begin with 0"),
        ("0-5:greedy,6-9:as_set", "says nothing of prompts above 9 tokens; add 10-:as_set"),
        ("0-:greedy,6-:as_set", "has entries after an open range; put 6- before it"),
        ("5-3:greedy", "has a range 5-3 that ends before it begins"),
        ("0-5:greedy,,6-:as_set", "has '', which is no entry; write FIRST-LAST:SAMPLING"),
        ("0-5", "has '0-5', which is no entry"),
        ("0-5:", "has '0-5:', which is no entry"),
        ("0-x:greedy", "has '0-x:greedy', which is no entry"),
        ("-5:greedy", "which is no entry"),
        ("0-:greddy", 'which is no sampling, did you mean "greedy"?; it is greedy, as_set, or temperature'),
        ("0-:temprature:1", 'did you mean "temperature"?'),
        ("0-:max_tokens:4", "which is no sampling"),
        ("0-:greedy+temperature:1", "says temperature twice"),
        ("0-:top_k:5+top_k:5", "says top_k twice"),
        ("0-:temperature:0", "temperature is a number from 0.01 to 2, or greedy"),
        ("0-:temperature:2.5", "temperature is a number from 0.01 to 2"),
        ("0-:temperature:nan", "temperature is a number"),
        ("0-:temperature:warm", "temperature is a number"),
        ("0-:top_p:0", "top_p is a number above 0, at most 1"),
        ("0-:top_k:0", "top_k is a whole number of at least 1, or -1"),
        ("0-:top_k:2.5", "top_k is a whole number"),
        ("0-:samples:0", "samples is a whole number of at least 1"),
        (",".join(f"{i}-{i}:as_set" for i in range(10)) + ",10-:as_set", "has 11 entries; give at most 10"),
    ],
)
def test_a_malformed_table_is_one_clear_error(text, said):
    with pytest.raises(ValueError) as error:
        parse_table(text)
    assert said in str(error.value)


@pytest.mark.parametrize("value", [3, 0.5, None])
def test_what_is_no_table_keeps_its_type_for_the_check(value):
    assert RolloutConfig(adaptive_sampling=value).adaptive_sampling == value


# ---- requests and groups -----------------------------------------------------------------------------------

LENGTHS = [2, 5, 6, 3, 9, 4, 7, 2]  # groups of 2, 4, 3, 2, 3, 4, 3 and 2 samples
SIZES = [2, 4, 3, 2, 3, 4, 3, 2]


def prompts_of(lengths):
    """Prompts whose first token and ground truth are their number."""
    return [
        Prompt(prompt_token_ids=[1 + i] + [9] * (n - 1), text=f"prompt {i}", answer=i)
        for i, n in enumerate(lengths)
    ]


class InOrder:
    """The prompts, one after the other."""

    def __init__(self):
        self.left = prompts_of(LENGTHS)

    def draw(self, count):
        drawn, self.left = self.left[:count], self.left[count:]
        return drawn


def draw_of(num_prompts, **options):
    return Draw(num_prompts=num_prompts, samples_per_prompt=4, sampling=USUAL, table=TABLE, **options)


def lengths_vary(request):
    """Two lengths of response in the groups of odd prompts, one in others."""
    number = request.prompt_token_ids[0] - 1
    return [20 + number] * (1 + number % 2 * (request.sample_id % 2))


def test_each_prompt_has_its_samples_sampling_and_seeds():
    engine = ScriptedEngine(lengths_vary)
    batch = sampler_of(engine).collect(GivenPrompts(prompts_of(LENGTHS)), draw_of(8), iteration=2, version=0)
    groups = [group for group, size in enumerate(SIZES) for _ in range(size)]
    assert batch.sample_id.tolist() == list(range(23)) and batch.group_id.tolist() == groups
    asked = sorted(engine.submitted, key=lambda request: request.sample_id)
    assert [request.seed for request in asked] == [sample_seed(3, 2, i) for i in range(23)]
    for request, group in zip(asked, groups):
        assert request.prompt_token_ids[0] == group + 1
        assert request.sampling == entry_of(TABLE, LENGTHS[group]).sampling(USUAL)
    temperatures = [{2: 1.0, 4: 1.3, 3: 0.7}[SIZES[group]] for group in groups]
    assert batch.temperature.tolist() == pytest.approx(temperatures), "1 for greedy samples"


def test_without_a_table_samples_have_no_temperature_of_their_own():
    draw = Draw(num_prompts=2, samples_per_prompt=2, sampling=USUAL)
    batch = sampler_of(ScriptedEngine(lengths_vary)).collect(
        GivenPrompts(prompts_of([2, 3])), draw, iteration=1, version=0
    )
    assert batch.temperature is None


def collect(draw, *, keep_group=None):
    sampler = sampler_of(ScriptedEngine(lengths_vary), FirstToken())
    batch = sampler.collect(InOrder(), draw, iteration=1, version=0, keep_group=keep_group)
    batch.rewards = sampler.score(batch, Sums())
    numbers = batch.input_ids[:, 0] - 1
    assert torch.equal(batch.generated_ids[torch.arange(len(batch)), batch.lengths - 1] - 20, numbers)
    torch.testing.assert_close(batch.rewards, numbers + batch.response_mask.sum(1) / 100)
    assert batch.sample_id.tolist() == list(range(len(batch)))
    return batch, numbers.tolist()


def test_dynamic_sampling_keeps_groups_of_their_own_size():
    batch, numbers = collect(draw_of(3, max_rounds=9), keep_group=has_variance)
    assert numbers == [1] * 4 + [3] * 2 + [5] * 4
    assert batch.group_id.tolist() == [0] * 4 + [1] * 2 + [2] * 4


def test_baselines_are_those_of_their_group():
    batch, numbers = collect(draw_of(4, with_greedy=True))
    sizes = [size + 1 for size in SIZES[:4]]
    assert numbers == [number for number, size in enumerate(sizes) for _ in range(size)]
    last = [sum(sizes[: group + 1]) - 1 for group in range(4)]
    assert [batch.temperature[b].item() for b in last] == [1.0] * 4
    scores = batch.rewards[last]
    part = take_baselines(batch, Sums(), num_groups=4, all_sum=lambda x: x)
    assert part.sample_id.tolist() == list(range(sum(SIZES[:4])))
    assert part.group_id.tolist() == [group for group, size in enumerate(SIZES[:4]) for _ in range(size)]
    assert torch.equal(part.baselines, scores[part.group_id])


def test_shares_and_rewards_of_the_entries():
    batch, _ = collect(draw_of(8))
    add_shares(TABLE, batch, sums := Sums())
    metrics = sums.reduce(ONE_RANK)
    assert len(metrics) == 2 * len(TABLE)
    for entry in TABLE:
        members = [i for i, n in enumerate(LENGTHS) if entry_of(TABLE, n) == entry]
        is_here = torch.isin(batch.group_id, torch.tensor(members))
        assert metrics[f"sampling/share_{entry.label}"] == pytest.approx(is_here.float().mean().item())
        mean = batch.rewards[is_here].mean().item()
        assert metrics[f"sampling/reward_{entry.label}"] == pytest.approx(mean)


def test_shares_without_rewards_or_samples():
    batch, _ = collect(draw_of(2))
    batch.rewards = None
    add_shares(TABLE, batch, sums := Sums())
    add_shares((), batch, sums)
    add_shares(TABLE, batch.select(torch.zeros(0, dtype=torch.int64)), sums)
    metrics = sums.reduce(ONE_RANK)
    assert metrics == {
        "sampling/share_0-3": pytest.approx(1 / 3),
        "sampling/share_4-5": pytest.approx(2 / 3),
        "sampling/share_6-": 0,
    }
    assert all(re.fullmatch(r"[\w/-]+", name) for name in metrics), "names that every sink takes"


# ---- checks ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    write_job(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("table", "others", "said"),
    [
        ("0-5:greedy", {}, "='0-5:greedy' says nothing of prompts above 5 tokens; add 6-:as_set"),
        (
            "0-5:as_set,6-:samples:5",
            {},
            "gives prompts of 6- tokens 5 samples, above data.samples_per_prompt=4, which bounds",
        ),
        (
            "0-5:as_set,6-:samples:1",
            dict(algorithm__name="grpo"),
            "gives prompts of 6- tokens 1 samples, and algorithm.name=grpo compares those of a prompt",
        ),
        (
            "0-5:as_set,6-:samples:1",
            dict(algorithm__num_mini_batches=8),
            "32 samples, of which rollout.adaptive_sampling leaves at least 8, in 8 mini-batches of 1 leave",
        ),
        (
            "0-5:greedy,6-:as_set",
            dict(algorithm__correction="truncate"),
            "algorithm.correction=truncate with greedy samples of prompts of 0-5 tokens",
        ),
        (
            "0-5:as_set,6-:top_k:5",
            dict(algorithm__correction="mask"),
            "algorithm.correction=mask with top_k:5 of rollout.adaptive_sampling 6- would scale the loss",
        ),
        (
            "0-5:greedy,6-:as_set",
            dict(rollout__devices="4-5", async__max_staleness=1),
            "algorithm.correction=truncate with greedy samples of prompts of 0-5 tokens",
        ),
    ],
)
def test_what_cannot_be_right_is_one_clear_error(folder, table, others, said):
    config = good(folder, rollout__adaptive_sampling=table, data__samples_per_prompt=4, **others)
    (problem,) = check_config(config, world_size=4)
    assert said in problem


def test_tables_that_are_right_and_what_is_said_of_them(folder):
    config = good(folder, rollout__adaptive_sampling=True, data__samples_per_prompt=4)
    assert check_config(config, world_size=4) == []
    (beyond,) = sampling_notes(config)
    assert beyond.endswith("no prompt has 512- tokens, as data.max_prompt_tokens=100")
    config.algorithm.name = "grpo"
    alike, _ = sampling_notes(config)
    assert "prompts of 0-63 tokens teach nothing with algorithm.name=grpo" in alike
    assert sampling_notes(good(folder)) == []


def test_an_evaluation_has_no_table():
    settings = {"data": {"validation": "a.jsonl"}, "rollout": {"adaptive_sampling": True}}
    problem = Evaluation(settings=settings).problems(world_size=1)[0]
    assert problem.startswith("rollout.adaptive_sampling=True is for training") and "leave it out" in problem


def test_groups_of_different_sizes_need_not_divide_into_mini_batches(folder):
    table = dict(rollout__adaptive_sampling="0-5:samples:3,6-:as_set", data__samples_per_prompt=5)
    config = good(folder, **table, algorithm__num_mini_batches=3)
    assert check_config(config, world_size=4) == []
    said = batch_arithmetic(config, 4)
    assert said.startswith("8 prompts x 5 samples = 40 samples (at least 24, by rollout.adaptive_sampling)")
