"""The sample table of an iteration, identical on every rank, and the assignment of samples to ranks.

Letters: R samples of the whole iteration.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from parallel.rank_set import RankSet
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.packing import balance, micro_batches


@dataclass(frozen=True, slots=True)
class RowTable:
    """All samples of the iteration by `row_id`, the same on all ranks."""

    lengths_R: Tensor  # int64, tokens of prompt and response
    response_R: Tensor  # int64, response tokens
    home_R: Tensor  # int64, rank that generated the sample (its owner), numbered within the run's RankSet
    group_R: Tensor  # int64, index of the sample's prompt; 0 where samples have none
    mini_batches: list[range]  # sample indices of each optimizer step of an epoch

    @classmethod
    def gather(cls, batch: RolloutBatch, world: RankSet, *, num_mini_batches: int) -> "RowTable":
        """Gather the table. Collective over `world`.

        `batch` holds the samples owned by this rank; over all ranks their `row_id`s are 0, 1, ... without
        gaps. Mini-batches differ by one sample at most.
        """
        num_rows = int(world.all_sum(torch.tensor(len(batch))))
        table = torch.zeros(5, num_rows, dtype=torch.int64)
        home = torch.full_like(batch.row_id, world.rank)
        group = torch.zeros_like(home) if batch.group_id is None else batch.group_id
        table[:, batch.row_id] = torch.stack(
            [batch.lengths, batch.response_mask.sum(1), home, group, torch.ones_like(home)]
        )
        table = world.all_sum(table)
        assert (table[4] == 1).all(), "every row has one home"
        bounds = [num_rows * i // num_mini_batches for i in range(num_mini_batches + 1)]
        return cls(*table[:4], [range(first, end) for first, end in pairwise(bounds)])

    @property
    def num_groups(self) -> int:
        """Number of prompts of the iteration."""
        return int(self.group_R.max()) + 1 if len(self.group_R) else 0

    def assign(self, dp: int) -> Tensor:
        """Assign each sample to one of `dp` data-parallel indices; returns [R] int64.

        Every mini-batch is balanced by tokens over all of them.
        """
        index_R = torch.zeros_like(self.lengths_R)
        for rows in self.mini_batches:
            for place, members in enumerate(balance(self.lengths_R[rows.start : rows.stop].tolist(), dp)):
                index_R[torch.tensor(members, dtype=torch.int64) + rows.start] = place
        return index_R

    def micro_batches(
        self, row_id: Tensor, *, tokens_per_micro_batch: int, multiple_of: int
    ) -> list[list[list[int]]]:
        """Return the micro-batches of each mini-batch, each a list of indices into `row_id`.

        `row_id` lists the samples dispatched to this rank, sorted.
        """
        lengths, result = self.lengths_R[row_id].tolist(), []
        for rows in self.mini_batches:
            mine = ((row_id >= rows.start) & (row_id < rows.stop)).nonzero().squeeze(1).tolist()
            groups = micro_batches(
                [lengths[i] for i in mine],
                tokens_per_micro_batch=tokens_per_micro_batch,
                multiple_of=multiple_of,
            )
            result.append([[mine[i] for i in group] for group in groups] or [[] for _ in range(multiple_of)])
        return result
