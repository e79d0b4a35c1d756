"""Packing, written out by hand for small samples.

Sample 0 is [10 11 | 12 13 14], sample 1 is [20 21 22 | 23], sample 2 is [30 | 31]: prompt | response.
"""

import pytest
import torch

from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.micro_batch import MicroBatch, TokenSplit, pack, to_device


@pytest.fixture
def batch() -> RolloutBatch:
    samples = RolloutBatch.from_lists([5, 6, 7], [[10, 11], [20, 21, 22], [30]], [[12, 13, 14], [23], [31]])
    samples.advantages = samples.generated_ids / 10  # the advantage of token 13 is 1.3
    return samples


def targets(micro: MicroBatch) -> list[tuple[int, int, int, int]]:
    """Return for each target token: the packed token before it, the token, its sample and its position."""
    tokens = micro.tokens.squeeze(0)[micro.index]
    return list(zip(tokens.tolist(), micro.labels.tolist(), micro.sample.tolist(), micro.offset.tolist()))


def test_samples_lie_one_after_the_other_without_their_last_tokens(batch):
    micro = pack(batch, [0, 1], fields=("advantages",))
    assert micro.tokens.tolist() == [[10, 11, 12, 13, 20, 21, 22]]
    assert micro.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert micro.lengths == [4, 3]
    assert micro.cu_seqlens.tolist() == [0, 4, 7] and micro.cu_seqlens.dtype == torch.int32
    assert micro.index.tolist() == [1, 2, 3, 6]
    assert targets(micro) == [(11, 12, 0, 2), (12, 13, 0, 3), (13, 14, 0, 4), (22, 23, 1, 3)]
    assert torch.allclose(micro.fields["advantages"], torch.tensor([1.2, 1.3, 1.4, 2.3]))


def test_samples_come_in_the_given_order(batch):
    micro = pack(batch, [2, 0])
    assert micro.tokens.tolist() == [[30, 10, 11, 12, 13]]
    assert targets(micro) == [(30, 31, 2, 1), (11, 12, 0, 2), (12, 13, 0, 3), (13, 14, 0, 4)]
    assert micro.fields == {}


def test_fields_that_are_not_set_are_left_out(batch):
    assert pack(batch, [0], fields=("advantages", "returns")).fields.keys() == {"advantages"}


def test_each_target_token_has_its_samples_temperature(batch):
    batch.temperature = torch.tensor([0.7, 1.0, 1.3])
    micro = pack(batch, [2, 0], fields=("advantages",))
    assert torch.equal(micro.fields["temperature"], torch.tensor([1.3, 0.7, 0.7, 0.7]))
    assert micro.fields.keys() == {"advantages", "temperature"}


def test_sequence_parallelism_adds_a_padding_sequence(batch):
    micro = pack(batch, [0, 1], split=TokenSplit(multiple_of=4))
    assert micro.tokens.tolist() == [[10, 11, 12, 13, 20, 21, 22, 0]]
    assert micro.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
    assert (micro.lengths, micro.cu_seqlens.tolist()) == ([4, 3, 1], [0, 4, 7, 8])
    assert targets(micro) == targets(pack(batch, [0, 1]))
    assert pack(batch, [0], split=TokenSplit(multiple_of=4)).lengths == [4]  # no padding


def test_context_parallel_ranks_hold_the_outer_and_the_inner_chunks(batch):
    """cp=2: samples become multiples of 4 tokens; rank 0 has quarters 0 and 3, rank 1 quarters 1 and 2."""
    first, second = (
        pack(batch, [0, 1], fields=("advantages",), split=TokenSplit(cp=2, cp_rank=rank)) for rank in (0, 1)
    )
    assert first.tokens.tolist() == [[10, 13, 20, 0]] and second.tokens.tolist() == [[11, 12, 21, 22]]
    assert first.positions.tolist() == [[0, 3, 0, 3]] and second.positions.tolist() == [[1, 2, 1, 2]]
    for micro in (first, second):
        assert (micro.lengths, micro.cu_seqlens.tolist()) == ([4, 4], [0, 4, 8])  # whole sequences
    assert targets(first) == [(13, 14, 0, 4)]
    assert targets(second) == [(11, 12, 0, 2), (12, 13, 0, 3), (22, 23, 1, 3)]
    assert torch.allclose(second.fields["advantages"], torch.tensor([1.2, 1.3, 2.3]))


@pytest.mark.parametrize("last_token", [False, True])
@pytest.mark.parametrize(("cp", "multiple"), [(2, 1), (2, 2), (4, 1), (3, 2)])
def test_context_parallel_ranks_together_have_each_target_once(batch, cp, multiple, last_token):
    parts = [
        pack(
            batch,
            [0, 1, 2],
            last_token=last_token,
            split=TokenSplit(cp=cp, cp_rank=rank, multiple_of=multiple),
        )
        for rank in range(cp)
    ]
    assert len({part.tokens.size(1) for part in parts}) == 1 and parts[0].tokens.size(1) % multiple == 0
    assert all(length % (2 * cp) == 0 for length in parts[0].lengths)
    assert sorted(sum(map(targets, parts), [])) == sorted(
        targets(pack(batch, [0, 1, 2], last_token=last_token))
    )


@pytest.mark.parametrize(
    ("sizes", "packed", "length"),
    [({}, 1, 1), ({"multiple_of": 4}, 4, 4), ({"cp": 2}, 2, 4), ({"cp": 2, "multiple_of": 2}, 4, 8)],
)
def test_an_empty_micro_batch_is_padding_without_targets(batch, sizes, packed, length):
    micro = pack(batch, [], fields=("advantages",), split=TokenSplit(**sizes))
    assert micro.tokens.tolist() == [[0] * packed]
    assert (micro.lengths, micro.cu_seqlens.tolist()) == ([length], [0, length])
    assert not len(micro.index) and not len(micro.labels) and not len(micro.fields["advantages"])


def test_an_empty_batch_packs_too(batch):
    """A data-parallel rank that got no samples takes part with padding."""
    nothing = batch.select(torch.zeros(0, dtype=torch.int64))
    assert pack(nothing, []).tokens.tolist() == [[0]]


def test_a_reward_model_reads_every_token_and_targets_the_last(batch):
    micro = pack(batch, [0, 1, 2], last_token=True)
    assert micro.tokens.tolist() == [[10, 11, 12, 13, 14, 20, 21, 22, 23, 30, 31]]
    assert micro.lengths == [5, 4, 2]
    assert targets(micro) == [(14, 14, 0, 4), (23, 23, 1, 3), (31, 31, 2, 1)]


def test_a_sample_without_response_has_no_target():
    batch = RolloutBatch.from_lists([0, 1], [[10, 11, 12], [20]], [[], [21]])
    assert targets(pack(batch, [0, 1])) == [(20, 21, 1, 1)]
    assert targets(pack(batch, [0])) == []


def test_copied_micro_batches_are_equal(batch):
    """Among them one without targets, and one for a reward model."""
    packed = [pack(batch, samples, fields=("advantages",)) for samples in ([0, 1], [], [2])] + [
        pack(batch, [1], last_token=True)
    ]
    copies = to_device(packed)
    for micro, copy in zip(packed, copies, strict=True):
        assert copy.lengths == micro.lengths and copy.fields.keys() == micro.fields.keys()
        for there, here in zip(copy.tensors(), micro.tensors(), strict=True):
            assert there.dtype == here.dtype and torch.equal(there.cpu(), here)
    assert to_device([]) == []
