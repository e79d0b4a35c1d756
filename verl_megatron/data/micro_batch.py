"""Packed micro-batches: samples concatenated into one sequence without padding, as a forward pass takes them.

Letters: B samples, S packed sequences (samples and padding), T token positions of a sample, Q packed tokens
before the context-parallel split, P on this context-parallel rank, N target tokens on this rank, whose
log-probability or value is computed.

A sample of length L enters with its tokens 0 … L-2: the hidden state at t-1 predicts token t (its
log-probability, and the value of the state in which it is chosen). A reward model reads the last token's
hidden state instead and takes all L tokens.

With context parallelism a sample is padded to a multiple of 2·cp tokens and cut into 2·cp chunks, of which
rank r holds chunks r and 2·cp-1-r. Sequence parallelism, fp8 and empty micro-batches need extra tokens: a
padding sequence without target tokens.
"""

from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor

from parallel import device
from verl_megatron.data.batch import RolloutBatch


@dataclass(slots=True)
class SharedPrompts:
    """Groups G of a micro-batch whose samples share their prompt's tokens (`shared_prompts.py`).

    The packed tokens begin with the groups' prompts. Their responses follow, group by group.
    """

    prompts: list[int]  # tokens of each group's prompt
    responses: list[int]  # tokens of all responses of each group
    cu_prompts: Tensor  # [G + 1] int32
    cu_responses: Tensor  # [G + 1] int32, from the first token after the prompts


@dataclass(slots=True)
class MicroBatch:
    """Packed samples and their target tokens."""

    tokens: Tensor  # [1, P] int64
    positions: Tensor  # [1, P] int64, position of each token in its sample
    lengths: list[int]  # of the packed sequences, before the context-parallel split
    cu_seqlens: Tensor  # [len(lengths) + 1] int32
    index: Tensor  # [N] int64, packed positions whose hidden states predict the target tokens
    labels: Tensor  # [N] int64, the target tokens
    sample: Tensor  # [N] int64, index of the sample in the batch
    offset: Tensor  # [N] int64, position t in the sample
    # [N] each: the batch's per-token fields at (sample, offset), and if set the sample's "temperature"
    fields: dict[str, Tensor] = field(default_factory=dict)
    shared: SharedPrompts | None = None  # None: every sample is one packed sequence

    def tensors(self) -> list[Tensor]:
        """Return all tensors, always in the same order."""
        shared = (self.shared.cu_prompts, self.shared.cu_responses) if self.shared is not None else ()
        return [getattr(self, name) for name in _TENSORS] + [*self.fields.values(), *shared]

    def with_tensors(self, tensors: list[Tensor]) -> "MicroBatch":
        """Return a copy with `tensors` in place of `tensors()`."""
        given = iter(tensors)
        plain = {name: next(given) for name in _TENSORS}
        fields = {name: next(given) for name in self.fields}
        shared = self.shared and replace(self.shared, cu_prompts=next(given), cu_responses=next(given))
        return replace(self, **plain, fields=fields, shared=shared)


_TENSORS = ("tokens", "positions", "cu_seqlens", "index", "labels", "sample", "offset")


def to_device(micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """Copy all micro-batches to this rank's device in one transfer."""
    moved = iter(device.copy_together([tensor for micro in micro_batches for tensor in micro.tensors()]))
    return [micro.with_tensors(list(islice(moved, len(micro.tensors())))) for micro in micro_batches]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSplit:
    """The part of the packed tokens that this rank computes, and their padding."""

    cp: int = 1  # context-parallel ranks
    cp_rank: int = 0
    multiple_of: int = 1  # of the packed tokens of a rank (sequence parallelism, fp8)


def pack(
    batch: RolloutBatch,
    samples: list[int],
    *,
    fields: tuple[str, ...] = (),
    last_token: bool = False,
    split: TokenSplit = TokenSplit(),
) -> MicroBatch:
    """Pack the samples with indices `samples` of a batch (on the CPU).

    Args:
        fields: per-token fields of the batch to gather at the target tokens.
        last_token: use one target per sample, its last token (reward model), instead of every response token.
    """
    take = torch.tensor(samples, dtype=torch.int64)
    # A rank without samples still runs its part of the pipeline, and the padding sequence indexes one sample.
    if len(batch) == 0:
        batch = RolloutBatch.from_lists([0], [[0]], [[]])
    used_B = batch.attention_mask[take].sum(1) - (0 if last_token else 1)
    length_S = _padded_lengths(used_B, split)
    num_padding = len(length_S) - len(samples)  # 0 or 1

    # The packed tokens before the context-parallel split.
    start_S = length_S.cumsum(0) - length_S
    sequence_Q = torch.repeat_interleave(torch.arange(len(length_S)), length_S)
    position_Q = torch.arange(len(sequence_Q)) - start_S[sequence_Q]
    sample_Q = torch.cat([take, take.new_zeros(num_padding)])[sequence_Q]
    used_Q = torch.cat([used_B, used_B.new_zeros(num_padding)])[sequence_Q]
    is_real_Q = position_Q < used_Q
    last_position = batch.generated_ids.size(1) - 1
    tokens_Q = torch.where(is_real_Q, batch.generated_ids[sample_Q, position_Q.clamp(max=last_position)], 0)
    if last_token:
        is_target_Q, offset_Q = position_Q == used_Q - 1, position_Q
    else:
        offset_Q = torch.where(is_real_Q, position_Q + 1, 0)
        is_target_Q = is_real_Q & batch.response_mask[sample_Q, offset_Q].bool()

    local = _local_tokens(position_Q, length_S[sequence_Q], split)
    index = is_target_Q[local].nonzero().squeeze(1)
    sample, offset = sample_Q[local][index], offset_Q[local][index]
    return MicroBatch(
        tokens=tokens_Q[local].unsqueeze(0),
        positions=position_Q[local].unsqueeze(0),
        lengths=length_S.tolist(),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), length_S.cumsum(0)]).int(),
        index=index,
        labels=batch.generated_ids[sample, offset],
        sample=sample,
        offset=offset,
        fields=fields_of(batch, fields, sample, offset),
    )


def fields_of(
    batch: RolloutBatch, names: tuple[str, ...], sample: Tensor, offset: Tensor
) -> dict[str, Tensor]:
    """Return the fields that are set, and the temperatures if they are, at the target tokens: [N] each."""
    found = {name: value[sample, offset] for name in names if (value := getattr(batch, name)) is not None}
    return found | ({} if batch.temperature is None else {"temperature": batch.temperature[sample]})


def _padded_lengths(used_B: Tensor, split: TokenSplit) -> Tensor:
    """Return the lengths of the packed sequences [S] int64: one per sample, and perhaps one of padding."""
    unit = 2 * split.cp if split.cp > 1 else 1
    padded_B = (used_B + unit - 1) // unit * unit
    total, multiple = int(padded_B.sum()), unit * split.multiple_of
    padding = -total % multiple or (multiple if total == 0 else 0)
    return torch.cat([padded_B, padded_B.new_tensor([padding] if padding else [])])


def _local_tokens(position_Q: Tensor, length_Q: Tensor, split: TokenSplit) -> Tensor:
    """Return the indices of this rank's packed tokens: chunks r and 2·cp-1-r of every sequence on rank r."""
    if split.cp == 1:
        return torch.arange(len(position_Q))
    chunk_Q = position_Q * (2 * split.cp) // length_Q
    is_local_Q = (chunk_Q == split.cp_rank) | (chunk_Q == 2 * split.cp - 1 - split.cp_rank)
    return is_local_Q.nonzero().squeeze(1)
