"""Which rows of an iteration go where: known alike on every rank, whatever the layouts.

Letters: R rows of the whole iteration.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.collectives import all_sum
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.packing import balance, micro_batches


@dataclass(frozen=True, slots=True)
class RowTable:
    """Every row of the iteration by its number, the same on all ranks."""

    lengths_R: Tensor  # int64, tokens of prompt and response
    response_R: Tensor  # int64, response tokens
    home_R: Tensor  # int64, world rank that generated the row
    group_R: Tensor  # int64, number of the row's prompt; 0 where rows have none
    mini_batches: list[range]  # row numbers of each optimizer step of a pass

    @classmethod
    def gather(cls, batch: RolloutBatch, *, num_mini_batches: int) -> "RowTable":
        """Collective over the world; `batch` holds the rows at home on this rank, which number them 0, 1, ... together.

        Mini-batches differ by one row at most.
        """
        num_rows = int(all_sum(torch.tensor(len(batch))))
        table = torch.zeros(5, num_rows, dtype=torch.int64)
        home = torch.full_like(batch.row_id, dist.get_rank())
        group = torch.zeros_like(home) if batch.group_id is None else batch.group_id
        table[:, batch.row_id] = torch.stack(
            [batch.lengths, batch.response_mask.sum(1), home, group, torch.ones_like(home)]
        )
        table = all_sum(table)
        assert (table[4] == 1).all(), "every row has one home"
        bounds = [num_rows * i // num_mini_batches for i in range(num_mini_batches + 1)]
        return cls(*table[:4], [range(first, end) for first, end in pairwise(bounds)])

    @property
    def num_groups(self) -> int:
        """Prompts of the iteration."""
        return int(self.group_R.max()) + 1 if len(self.group_R) else 0

    def assign(self, dp: int) -> Tensor:
        """[R] int64: the data-parallel index that works on each row; every mini-batch is balanced by tokens over all of them."""
        index_R = torch.zeros_like(self.lengths_R)
        for rows in self.mini_batches:
            for place, members in enumerate(balance(self.lengths_R[rows.start : rows.stop].tolist(), dp)):
                index_R[torch.tensor(members, dtype=torch.int64) + rows.start] = place
        return index_R

    def micro_batches(
        self, row_id: Tensor, *, tokens_per_micro_batch: int, multiple_of: int
    ) -> list[list[list[int]]]:
        """For each mini-batch the micro-batches, each a list of places in `row_id` (this rank's borrowed rows, sorted)."""
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
