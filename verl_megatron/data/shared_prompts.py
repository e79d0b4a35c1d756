"""Groups whose samples share their prompt's tokens in a micro-batch (engine.shared_prompts).

The packed tokens are [prompts of the groups | their responses | other rows | padding]: each prompt once, then
the responses group by group, each a sequence whose positions go on where the prompt ends. A group of one
sample is a row. The last token of a prompt predicts the first token of each of its responses.

Letters: B samples of a batch, M samples of a micro-batch, S packed sequences, Q packed tokens, N target
tokens, T token positions of a sample.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.micro_batch import MicroBatch, SharedPrompts, TokenSplit, fields_of
from verl_megatron.data.packing import members_of

_WHOLE = TokenSplit()


@dataclass(frozen=True, slots=True)
class _Arrangement:
    """Packed sequences, and where the tokens of each sample are."""

    sequences: list[tuple[int, int, int]]  # a sample's place in M, its first token here, number of tokens
    prompts: list[int]  # as in SharedPrompts
    responses: list[int]
    shared_M: list[int]  # tokens of each sample that are its group's; 0 in a row
    prompt_start_M: list[int]  # where they are packed
    own_start_M: list[int]  # where its others are


def _arrange(groups: list[list[int]], prompt_M: list[int], used_M: list[int]) -> _Arrangement:
    """Arrange groups of places whose first `used` tokens are packed."""
    heads, tails, rows, responses = [], [], [], []
    shared_M, leader_M = [0] * len(used_M), list(range(len(used_M)))
    for members in groups:
        shared = min(prompt_M[m] for m in members) if len(members) > 1 else 0
        own = [(m, shared, used_M[m] - shared) for m in members if used_M[m] > shared]
        for m in members:
            shared_M[m], leader_M[m] = shared, members[0]
        if not shared:
            rows += own
            continue
        tails += own
        (heads if own else rows).append((members[0], 0, shared))
        responses += [sum(count for _, _, count in own)] if own else []
    sequences = heads + tails + rows
    starts = accumulate((count for _, _, count in sequences), initial=0)
    start_of = {(m, first): start for (m, first, _), start in zip(sequences, starts)}
    return _Arrangement(
        sequences,
        [count for _, _, count in heads],
        responses,
        shared_M,
        [start_of.get((leader, 0), 0) for leader in leader_M],
        [start_of.get(own, 0) for own in enumerate(shared_M)],
    )


def pack_shared(
    batch: RolloutBatch,
    samples: list[int],
    *,
    fields: tuple[str, ...] = (),
    last_token: bool = False,
    split: TokenSplit = _WHOLE,
) -> MicroBatch:
    """Pack samples as `pack` does, but the prompt of those with the same `group_id` once.

    The target tokens come in the same order. Without context parallelism.
    """
    assert split.cp == 1, "preflight refuses engine.shared_prompts with cp"
    if len(batch) == 0:
        batch = RolloutBatch.from_lists([0], [[0]], [[]])
    take = torch.tensor(samples, dtype=torch.int64)
    here = batch.select(take)
    groups = [[m] for m in range(len(samples))]
    if here.group_id is not None:
        groups = members_of(here.group_id.tolist())
    prompt_M, used_M = here.prompt_lengths, here.lengths - (0 if last_token else 1)
    arranged = _arrange(groups, prompt_M.tolist(), used_M.tolist())
    _assert_shared(here, groups, arranged.shared_M)

    tokens_Q, position_Q = _gather(here.generated_ids, arranged.sequences)
    lengths, multiple = [count for _, _, count in arranged.sequences], split.multiple_of
    if padding := -len(tokens_Q) % multiple or (0 if len(tokens_Q) else multiple):
        tokens_Q = F.pad(tokens_Q, (0, padding))
        position_Q = torch.cat([position_Q, torch.arange(padding)])
        lengths = [*lengths, padding]

    is_target_MT = here.response_mask
    if last_token:
        is_target_MT = torch.arange(is_target_MT.size(1)) == (here.lengths - 1).unsqueeze(1)
    place, offset = is_target_MT.nonzero(as_tuple=True)
    before = offset if last_token else offset - 1
    shared, prompt_start, own_start = (
        torch.tensor(values, dtype=torch.int64)[place]
        for values in (arranged.shared_M, arranged.prompt_start_M, arranged.own_start_M)
    )
    sample = take[place]
    return MicroBatch(
        tokens=tokens_Q.unsqueeze(0),
        positions=position_Q.unsqueeze(0),
        lengths=lengths,
        cu_seqlens=_ends(lengths),
        index=torch.where(before < shared, prompt_start + before, own_start + before - shared),
        labels=batch.generated_ids[sample, offset],
        sample=sample,
        offset=offset,
        fields=fields_of(batch, fields, sample, offset),
        shared=SharedPrompts(
            arranged.prompts, arranged.responses, _ends(arranged.prompts), _ends(arranged.responses)
        )
        if arranged.prompts
        else None,
    )


def _gather(ids_MT: Tensor, sequences: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
    """Return the sequences' tokens and their positions in their samples, [Q] int64 each."""
    source_S, first_S, count_S = torch.tensor(sequences, dtype=torch.int64).view(-1, 3).unbind(1)
    sequence_Q = torch.repeat_interleave(torch.arange(len(sequences)), count_S)
    position_Q = torch.arange(len(sequence_Q)) + (first_S - count_S.cumsum(0) + count_S)[sequence_Q]
    return ids_MT[source_S[sequence_Q], position_Q], position_Q


def _ends(lengths: list[int]) -> Tensor:
    """Return the first token of each sequence and the end, [S + 1] int32."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _assert_shared(here: RolloutBatch, groups: list[list[int]], shared_M: list[int]) -> None:
    for members in groups:
        ids = here.generated_ids[members, : shared_M[members[0]]]
        assert (ids == ids[:1]).all(), "samples of a group share their prompt"
