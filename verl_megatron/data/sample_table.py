"""The sample table of an iteration, identical on every rank, and the assignment of samples to ranks.

Letters: B samples of the whole iteration, O samples owned by one rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from parallel.rank_set import RankSet
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.packing import Units, members_of

_COLUMNS = ("lengths", "response", "owner", "group", "is_cut", "prompt", "count")


def columns_of(batch: RolloutBatch, *, owner: int) -> Tensor:
    """Return what the table says of one rank's samples: [8, O] int64, first the sample_id of each."""
    owner_O = torch.full_like(batch.sample_id, owner)
    return torch.stack(
        [
            batch.sample_id,
            batch.lengths,
            batch.response_mask.sum(1),
            owner_O,
            torch.zeros_like(owner_O) if batch.group_id is None else batch.group_id,
            torch.zeros_like(owner_O) if batch.is_cut is None else batch.is_cut.long(),
            batch.prompt_lengths,
            torch.ones_like(owner_O),
        ]
    )


@dataclass(frozen=True, slots=True)
class SampleTable:
    """All samples of the iteration by `sample_id`, the same on all ranks."""

    lengths_B: Tensor  # int64, tokens of prompt and response
    response_B: Tensor  # int64, response tokens
    owner_B: Tensor  # int64, rank that generated the sample (its owner), numbered within the run's RankSet
    group_B: Tensor  # int64, index of the sample's prompt; 0 where samples have none
    mini_batches: list[range]  # sample indices of each optimizer step of an epoch
    unit: int = 1  # consecutive samples that stay in one micro-batch: 2 for pairs
    is_cut_B: Tensor | None = None  # bool, the response ended at its limit of tokens; None: not known
    # int64, tokens of each sample's prompt, where the samples of a group share them; None: they do not
    prompt_B: Tensor | None = None

    @classmethod
    def gather(
        cls,
        batch: RolloutBatch,
        world: RankSet,
        *,
        num_mini_batches: int,
        unit: int = 1,
        shared_prompts: bool = False,
    ) -> "SampleTable":
        """Gather the table. Collective over `world`.

        `batch` holds the samples owned by this rank; over all ranks their `sample_id`s are 0, 1, ... without
        gaps. Mini-batches differ by one unit at most: `unit` consecutive samples, which share a micro-batch.
        With `shared_prompts`, samples of a group are kept together, and their prompt counts once.
        """
        num_samples = int(world.all_sum(torch.tensor(len(batch))))
        table = torch.zeros(len(_COLUMNS), num_samples, dtype=torch.int64)
        sample_id, *columns = columns_of(batch, owner=world.rank)
        table[:, sample_id] = torch.stack(columns)
        return cls._of(
            world.all_sum(table), num_mini_batches=num_mini_batches, unit=unit, shared_prompts=shared_prompts
        )

    @classmethod
    def join(
        cls, parts: Sequence[Tensor], *, num_mini_batches: int, shared_prompts: bool = False
    ) -> "SampleTable":
        """Join the columns (`columns_of`) of all owners to the table that `gather` returns."""
        sample_id, *columns = torch.cat(list(parts), 1)
        table = torch.zeros(len(_COLUMNS), len(sample_id), dtype=torch.int64)
        table.index_add_(1, sample_id, torch.stack(columns))
        return cls._of(table, num_mini_batches=num_mini_batches, unit=1, shared_prompts=shared_prompts)

    @classmethod
    def _of(cls, table: Tensor, *, num_mini_batches: int, unit: int, shared_prompts: bool) -> "SampleTable":
        lengths, response, owner, group, is_cut, prompt, count = table
        assert (count == 1).all(), "every sample has one owner"
        num_units = len(count) // unit
        bounds = [num_units * i // num_mini_batches * unit for i in range(num_mini_batches + 1)]
        return cls(
            lengths_B=lengths,
            response_B=response,
            owner_B=owner,
            group_B=group,
            mini_batches=[range(*ends) for ends in pairwise(bounds)],
            unit=unit,
            is_cut_B=is_cut.bool(),
            prompt_B=prompt if shared_prompts else None,
        )

    @property
    def num_groups(self) -> int:
        """Number of prompts of the iteration."""
        return int(self.group_B.max()) + 1 if len(self.group_B) else 0

    def assign(self, dp: int) -> Tensor:
        """Assign each sample to one of `dp` data-parallel indices; returns [B] int64.

        Every mini-batch is balanced by tokens over all of them.
        """
        index_B = torch.zeros_like(self.lengths_B)
        for samples in self.mini_batches:
            index = index_B[samples.start : samples.stop]
            units = self._units(torch.arange(samples.start, samples.stop))
            for dp_index, places in enumerate(units.spread(dp)):
                index[places] = dp_index
        return index_B

    @property
    def largest_tokens(self) -> int:
        """Tokens of the largest mini-batch."""
        ids = [torch.arange(samples.start, samples.stop) for samples in self.mini_batches]
        return max(sum(self._units(sample_id).tokens()) for sample_id in ids)

    def micro_batches(
        self, sample_id: Tensor, *, tokens_per_micro_batch: int, multiple_of: int
    ) -> list[list[list[int]]]:
        """Return the micro-batches of each mini-batch, each a list of indices into `sample_id`.

        `sample_id` lists the samples dispatched to this rank, sorted. A mini-batch of which the rank has no
        samples has no micro-batches.
        """
        result = []
        for samples in self.mini_batches:
            local = ((sample_id >= samples.start) & (sample_id < samples.stop)).nonzero().squeeze(1)
            groups = self._units(sample_id[local]).micro_batches(
                tokens_per_micro_batch=tokens_per_micro_batch, multiple_of=multiple_of
            )
            result.append([local[places].tolist() for places in groups])
        return result

    def _units(self, sample_id: Tensor) -> Units:
        """Return the units of samples of a mini-batch, which are numbered by their places here."""
        lengths = self.lengths_B[sample_id].tolist()
        if self.prompt_B is None:
            return Units(torch.arange(len(sample_id)).view(-1, self.unit).tolist(), lengths)
        members = members_of(self.group_B[sample_id].tolist())
        return Units(members, lengths, self.prompt_B[sample_id].tolist())
