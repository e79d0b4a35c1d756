"""Packing of groups that share their prompt, by hand and against packing of rows.

Group 0 has the prompt [10 11] and samples 0, 2 and 3, group 1 the prompt [20] and samples 1 and 4.
"""

import random

import pytest
import torch

from verl_megatron.checks.models import check_model
from verl_megatron.checks.settings import check_supervised_config
from verl_megatron.config import CriticConfig, EngineConfig, SFTConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.micro_batch import MicroBatch, TokenSplit, pack, to_device
from verl_megatron.data.packing import Units
from verl_megatron.data.shared_prompts import pack_shared


@pytest.fixture
def batch() -> RolloutBatch:
    samples = RolloutBatch.from_lists(
        [5, 6, 7, 8, 9], [[10, 11], [20], [10, 11], [10, 11], [20]], [[1, 2, 3], [4, 5], [6], [7, 8], [9]]
    )
    samples.group_id = torch.tensor([0, 1, 0, 0, 1])
    samples.advantages = samples.generated_ids / 10
    return samples


def targets(micro: MicroBatch) -> list[tuple[int, ...]]:
    """For each target token: the packed token and position before it, the token, its sample and place."""
    columns = (micro.tokens[0][micro.index], micro.positions[0][micro.index], micro.labels)
    return list(zip(*(column.tolist() for column in (*columns, micro.sample, micro.offset))))


def test_prompts_come_first_and_their_responses_follow(batch):
    micro = pack_shared(batch, [0, 1, 2, 3, 4])
    assert micro.tokens.tolist() == [[10, 11, 20, 1, 2, 7, 4]]  # the last token of a response predicts none
    assert micro.positions.tolist() == [[0, 1, 0, 2, 3, 2, 1]]
    assert (micro.lengths, micro.cu_seqlens.tolist()) == ([2, 1, 2, 1, 1], [0, 2, 3, 5, 6, 7])
    assert micro.shared is not None
    assert (micro.shared.prompts, micro.shared.responses) == ([2, 1], [3, 1])
    assert micro.shared.cu_prompts.tolist() == [0, 2, 3] and micro.shared.cu_prompts.dtype == torch.int32
    assert micro.shared.cu_responses.tolist() == [0, 3, 4]
    # The prompt's last token predicts the first token of each response.
    assert micro.index.tolist() == [1, 3, 4, 2, 6, 1, 1, 5, 2]
    assert micro.labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert micro.sample.tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 4]


def test_a_group_of_one_is_a_row_behind_the_responses(batch):
    micro = pack_shared(batch, [0, 1, 2])
    assert micro.tokens.tolist() == [[10, 11, 1, 2, 20, 4]] and micro.lengths == [2, 2, 2]
    assert micro.shared is not None and (micro.shared.prompts, micro.shared.responses) == ([2], [2])
    alone = pack_shared(batch, [0, 1])
    assert alone.shared is None
    for ours, theirs in zip(alone.tensors(), pack(batch, [0, 1]).tensors(), strict=True):
        assert torch.equal(ours, theirs)


def test_responses_of_one_token_leave_the_prompt_alone(batch):
    """Their only tokens predict nothing, and the prompt predicts them."""
    batch.response_mask[0, 3:], batch.attention_mask[0, 3:] = False, False
    micro = pack_shared(batch, [0, 2])
    assert micro.tokens.tolist() == [[10, 11]] and micro.shared is None
    assert targets(micro) == [(11, 1, 1, 0, 2), (11, 1, 6, 2, 2)]


def test_without_groups_every_sample_is_a_row(batch):
    batch.group_id = None
    for ours, theirs in zip(
        pack_shared(batch, [2, 0, 3]).tensors(), pack(batch, [2, 0, 3]).tensors(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_a_reward_model_targets_the_last_token(batch):
    micro = pack_shared(batch, [0, 2, 4], last_token=True)
    assert micro.tokens.tolist() == [[10, 11, 1, 2, 3, 6, 20, 9]]
    assert targets(micro) == [(3, 4, 3, 0, 4), (6, 2, 6, 2, 2), (9, 1, 9, 4, 1)]


def test_padding_is_a_sequence_at_the_end(batch):
    micro = pack_shared(batch, [0, 2, 3], split=TokenSplit(multiple_of=4))
    assert micro.tokens.tolist() == [[10, 11, 1, 2, 7, 0, 0, 0]] and micro.lengths == [2, 2, 1, 3]
    assert targets(micro) == targets(pack_shared(batch, [0, 2, 3]))
    empty = pack_shared(batch, [], fields=("advantages",), split=TokenSplit(multiple_of=4))
    assert (empty.tokens.tolist(), empty.lengths, len(empty.index)) == ([[0] * 4], [4], 0)
    nothing = batch.select(torch.zeros(0, dtype=torch.int64))
    assert pack_shared(nothing, []).tokens.tolist() == [[0]]


def test_a_sample_without_response_shares_its_prompt_too():
    batch = RolloutBatch.from_lists([0, 1, 2], [[5, 6, 7]] * 3, [[], [8, 9], [4]])
    batch.group_id = torch.zeros(3, dtype=torch.int64)
    assert batch.prompt_lengths.tolist() == [3, 3, 3]
    micro = pack_shared(batch, [0, 1, 2])
    assert micro.tokens.tolist() == [[5, 6, 7, 8]]
    assert targets(micro) == [(7, 2, 8, 1, 3), (8, 3, 9, 1, 4), (7, 2, 4, 2, 3)]


def test_another_prompt_in_a_group_is_noticed(batch):
    batch.generated_ids[2, 0] = 99
    with pytest.raises(AssertionError, match="share their prompt"):
        pack_shared(batch, [0, 2])


@pytest.mark.parametrize("last_token", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_targets_are_those_of_rows(seed, last_token):
    """The same tokens, predicted after the same token at the same position, in the same order; on a copy."""
    draw = random.Random(seed)
    prompts, responses, groups = [], [], []
    for group in range(draw.randint(1, 4)):
        prompt = [draw.randint(1, 99) for _ in range(draw.randint(1, 6))]
        for _ in range(draw.randint(1, 4)):
            prompts.append(prompt)
            responses.append([draw.randint(1, 99) for _ in range(draw.randint(0, 5))])
            groups.append(group)
    order = draw.sample(range(len(groups)), len(groups))
    batch = RolloutBatch.from_lists(
        list(range(len(order))), [prompts[i] for i in order], [responses[i] for i in order]
    )
    batch.group_id = torch.tensor([groups[i] for i in order])
    batch.advantages = torch.randn(batch.generated_ids.shape)
    samples = sorted(draw.sample(range(len(order)), draw.randint(0, len(order))))
    options = {"fields": ("advantages",), "last_token": last_token}
    shared, rows = pack_shared(batch, samples, **options), pack(batch, samples, **options)
    assert targets(shared) == targets(rows)
    assert torch.equal(shared.fields["advantages"], rows.fields["advantages"])
    (copy,) = to_device([shared])
    assert (copy.lengths, copy.shared is None) == (shared.lengths, shared.shared is None)
    for there, here in zip(copy.tensors(), shared.tensors(), strict=True):
        assert there.dtype == here.dtype and torch.equal(there.cpu(), here)


# ---- settings ------------------------------------------------------------------------------------------


def test_context_parallelism_is_refused_by_name():
    engine = EngineConfig(shared_prompts=True)
    (problem,) = check_model("critic", CriticConfig(layout="cp2"), engine, world_size=2).problems
    assert problem.startswith("engine.shared_prompts=true: critic.layout='cp2'") and "without cp" in problem
    assert check_model("critic", CriticConfig(layout="tp2"), engine, world_size=2).problems == []


def test_supervised_runs_have_no_groups():
    config = SFTConfig()
    config.data.train = "demonstrations.jsonl"
    before = set(check_supervised_config(config, world_size=1))
    config.engine.shared_prompts = True
    (problem,) = set(check_supervised_config(config, world_size=1)) - before
    assert problem.startswith("engine.shared_prompts=true belongs to runs that generate several samples")


# ---- what stays together -------------------------------------------------------------------------------


def test_tokens_of_a_unit_have_the_prompt_once():
    members = [[0, 1, 2], [3]]
    assert Units(members, [9, 7, 8, 5]).tokens() == [24, 5]
    assert Units(members, [9, 7, 8, 5], [6, 6, 6, 2]).tokens() == [6 + 3 + 1 + 2, 5]


def test_whole_groups_are_spread():
    """Four groups of four samples over two bins: two groups each, although rows would balance better."""
    lengths = [12, 11, 12, 11] * 2 + [13, 12, 11, 12] * 2
    units = Units([list(range(first, first + 4)) for first in range(0, 16, 4)], lengths, [10] * 16)
    bins = units.spread(2)
    assert sorted(sum(bins, [])) == list(range(16))
    for content in bins:
        assert all(
            set(members) <= set(content) or not set(members) & set(content) for members in units.members
        )


def test_groups_are_cut_where_a_bin_would_have_more_tokens():
    """One group over four bins: its quarters have the prompt four times, and each bin has fewer tokens."""
    units = Units([list(range(8))], [14] * 8, [10] * 8)
    bins = units.spread(4)
    assert sorted(map(sorted, bins)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert units.spread(1) == [list(range(8))]
    # Two groups over four bins, in halves: 10 + 2 * 4 tokens a bin instead of 10 + 4 * 4.
    halves = Units([[0, 1, 2, 3], [4, 5, 6, 7]], [14] * 8, [10] * 8).spread(4)
    assert sorted(map(sorted, halves)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("members", [[[0, 1, 2]], [[0], [1, 2]], [[0, 1], [2]]])
def test_groups_are_cut_before_a_rank_gets_no_sample(members):
    """Also where the longest sample alone is the heaviest bin, so that no cut lowers it."""
    bins = Units(members, [1010, 15, 15], [10, 10, 10]).spread(3)
    assert sorted(bins) == [[0], [1], [2]]


def test_groups_are_cut_at_the_token_budget():
    """Pieces of 10 + 4 + 3 + 2, 14, 4 and 20 tokens: the last is above the budget, and 14 + 4 fit."""
    units = Units([[0, 1, 2, 3], [4, 5]], [14, 13, 12, 14, 4, 20], [10, 10, 10, 10, 2, 2])
    found = units.micro_batches(tokens_per_micro_batch=19, multiple_of=1)
    assert sorted(map(sorted, found)) == [[0, 1, 2], [3, 4], [5]]
    assert units.micro_batches(tokens_per_micro_batch=45, multiple_of=1) == [[0, 1, 2, 3, 4, 5]]
