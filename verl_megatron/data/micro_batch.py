"""Packed micro-batches: samples concatenated into one sequence without padding, as a forward pass takes them.

Letters: B samples, T token positions of a sample, P packed tokens on this context-parallel rank, N target
tokens on this rank, whose log-probability or value is computed.

A sample of length L enters with its tokens 0 … L-2: the hidden state at t-1 predicts token t (its
log-probability, and the value of the state in which it is chosen). A reward model reads the last token's
hidden state instead and takes all L tokens.

With context parallelism a sample is padded to a multiple of 2·cp tokens and cut into 2·cp chunks, of which
rank r holds chunks r and 2·cp-1-r. Sequence parallelism, fp8 and empty micro-batches need extra tokens: a
padding sequence without target tokens.
"""

from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from parallel import device
from verl_megatron.data.batch import RolloutBatch


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
    # [N] each: the batch's per-token fields at (sample, offset)
    fields: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        """Return all tensors, always in the same order."""
        return [
            self.tokens,
            self.positions,
            self.cu_seqlens,
            self.index,
            self.labels,
            self.sample,
            self.offset,
            *self.fields.values(),
        ]

    def holding(self, tensors: list[Tensor]) -> "MicroBatch":
        """Return a copy with `tensors` in place of `tensors()`."""
        tokens, positions, cu_seqlens, index, labels, sample, offset, *fields = tensors
        return MicroBatch(
            tokens,
            positions,
            self.lengths,
            cu_seqlens,
            index,
            labels,
            sample,
            offset,
            dict(zip(self.fields, fields)),
        )


def to_device(micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """Copy all micro-batches to this rank's device in one transfer."""
    moved = iter(device.copy_together([tensor for micro in micro_batches for tensor in micro.tensors()]))
    return [micro.holding(list(islice(moved, len(micro.tensors())))) for micro in micro_batches]


def pack(
    batch: RolloutBatch,
    samples: list[int],
    *,
    fields: tuple[str, ...] = (),
    last_token: bool = False,
    multiple_of: int = 1,
    cp: int = 1,
    cp_rank: int = 0,
) -> MicroBatch:
    """Pack the samples with indices `samples` of a batch (on the CPU).

    Args:
        fields: per-token fields of the batch to gather at the target tokens.
        last_token: use one target per sample, its last token (reward model), instead of every response token.
        multiple_of: pad the packed tokens of this rank to a multiple of it (sequence parallelism, fp8).
    """
    take = torch.tensor(samples, dtype=torch.int64)
    # A rank without samples still runs its part of the pipeline, and the padding sequence indexes one sample.
    if len(batch) == 0:
        batch = RolloutBatch.from_lists([0], [[0]], [[]])
    lengths_B = batch.attention_mask[take].sum(1)
    used_B = lengths_B if last_token else lengths_B - 1
    unit = 2 * cp if cp > 1 else 1
    whole_B = (used_B + unit - 1) // unit * unit  # with padding
    total = int(whole_B.sum())
    filler = -total % (unit * multiple_of) or (unit * multiple_of if total == 0 else 0)
    whole = whole_B.tolist() + ([filler] if filler else [])

    whole_B = torch.tensor(whole)
    start_B = whole_B.cumsum(0) - whole_B
    # Q: packed tokens before the context-parallel split
    sequence_Q = torch.repeat_interleave(torch.arange(len(whole)), whole_B)
    position_Q = torch.arange(int(whole_B.sum())) - start_B[sequence_Q]
    sample_Q = torch.cat([take, take.new_zeros(len(whole) - len(samples))])[sequence_Q]
    used_Q = torch.cat([used_B, used_B.new_zeros(len(whole) - len(samples))])[sequence_Q]
    real_Q = position_Q < used_Q
    tokens_Q = torch.where(
        real_Q, batch.generated_ids[sample_Q, position_Q.clamp(max=batch.generated_ids.size(1) - 1)], 0
    )
    if last_token:
        asked_Q, offset_Q = position_Q == used_Q - 1, position_Q
    else:
        offset_Q = torch.where(real_Q, position_Q + 1, 0)
        asked_Q = real_Q & batch.response_mask[sample_Q, offset_Q].bool()

    mine = (
        _context_parallel_part(position_Q, whole_B[sequence_Q], cp, cp_rank)
        if cp > 1
        else torch.arange(len(position_Q))
    )
    index = asked_Q[mine].nonzero().squeeze(1)
    sample, offset = sample_Q[mine][index], offset_Q[mine][index]
    return MicroBatch(
        tokens=tokens_Q[mine].unsqueeze(0),
        positions=position_Q[mine].unsqueeze(0),
        lengths=whole,
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), whole_B.cumsum(0)]).int(),
        index=index,
        labels=batch.generated_ids[sample, offset],
        sample=sample,
        offset=offset,
        fields={
            name: value[sample, offset] for name in fields if (value := getattr(batch, name)) is not None
        },
    )


def _context_parallel_part(position_Q: Tensor, length_Q: Tensor, cp: int, rank: int) -> Tensor:
    """Indices of the packed tokens on rank `rank`: chunks rank and 2·cp-1-rank of every sequence."""
    piece_Q = position_Q * (2 * cp) // length_Q
    return ((piece_Q == rank) | (piece_Q == 2 * cp - 1 - rank)).nonzero().squeeze(1)
