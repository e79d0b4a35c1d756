"""Dispatch of samples from their owner ranks to the ranks of a role, and collection of the results.

Letters: B samples of the iteration, O samples owned by this rank, W samples that this rank works on,
T positions of prompt and response.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from parallel.layout import Layout
from parallel.rank_set import RankSet
from parallel.redistribute import exchange_samples
from verl_megatron.data.batch import RolloutBatch


class DataCollector:
    """Dispatches, pads and aligns samples between their owner ranks and the ranks of one layout.

    All ranks of `world` call its methods together. A rank outside the layout sends the samples it owns and
    works on none.

    Args:
        layout: of the role; its ranks are ranks of `world`.
        world: all ranks that own or work on samples.
        device: where exchanges run: the GPU under NCCL. Results are returned on the device of the input
            samples.
    """

    def __init__(
        self,
        layout: Layout,
        world: RankSet,
        *,
        device: torch.device | str = "cpu",
    ):
        self.layout, self.world, self.device = layout, world, device
        self._workers: list[list[int]] = [[] for _ in range(layout.dp)]  # numbered within `world`
        for rank in sorted(layout.ranks):
            self._workers[layout.coordinates(rank).dp].append(world.ranks.index(rank))
        last = layout.pp - 1
        self._answers = world.global_rank in [layout.rank_of(pp=last, dp=dp) for dp in range(layout.dp)]

    def to_role(
        self, batch: RolloutBatch, dp_of_sample: Tensor, fields: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Dispatch samples to their data-parallel ranks.

        Args:
            batch: the samples owned by this rank, possibly none; the same fields are set on every rank.
            dp_of_sample: [B] int64, data-parallel index that works on each sample, the same on every rank.
            fields: names of the fields to send; those that are not set are skipped. None: all.

        Returns:
            The fields, with "sample_id", of the samples of this rank's data-parallel index, in that order.
        """
        destinations = [self._workers[dp] for dp in dp_of_sample[batch.sample_id.cpu()].tolist()]
        sent = {
            name: value
            for name, value in batch.tensors().items()
            if fields is None or name == "sample_id" or name in fields
        }
        received = exchange_samples(sent, destinations, self.world, device=self.device)
        order = received["sample_id"].argsort()
        return {name: value[order].to(batch.sample_id.device) for name, value in received.items()}

    def to_owner(
        self,
        names: Sequence[str],
        values: Mapping[str, Tensor] | None,
        sample_id: Tensor,
        owner_of_sample: Tensor,
        batch: RolloutBatch,
    ) -> dict[str, Tensor]:
        """Send per-token results back to the owner ranks of the samples, all in one exchange.

        Args:
            names: of the results, the same on every rank.
            values: by name, [W, T'] results in the order of `sample_id`. Read only on the first rank (tp 0,
                cp 0) of the last pipeline stage of each data-parallel index; elsewhere it may be None.
            sample_id: [W] int64, the samples that this rank works on.
            owner_of_sample: [B] int64, owner rank of each sample, numbered within `world`.
            batch: the samples owned by this rank.

        Returns:
            By name, [O, T] float32 aligned with the samples of `batch`, 0 after the end of a sample.
        """
        if self._answers:
            assert values is not None and all(len(values[name]) == len(sample_id) for name in names), (
                "the last stage has a result for each sample that it works on"
            )
            sent = {"sample_id": sample_id} | {name: values[name].float() for name in names}
        else:
            sent = {"sample_id": sample_id.new_zeros(0)} | {
                name: torch.zeros(0, 0, device=sample_id.device) for name in names
            }
        destinations = [[owner] for owner in owner_of_sample[sent["sample_id"].cpu()].tolist()]
        received = exchange_samples(sent, destinations, self.world, device=self.device)
        order, place = received["sample_id"].argsort(), batch.sample_id.argsort()
        found = received["sample_id"][order].to(batch.sample_id.device)
        assert torch.equal(found, batch.sample_id[place]), "each owned sample gets its results once"
        returned = {
            name: torch.zeros(batch.generated_ids.shape, device=batch.sample_id.device) for name in names
        }
        for name in names:
            returned[name][place] = pad_to(received[name][order], returned[name].size(1)).to(
                batch.sample_id.device
            )
        return returned


def trim(fields: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """Cut per-token fields [B, T] to `width` positions; return other fields unchanged."""
    return {name: value[:, :width] if value.dim() > 1 else value for name, value in fields.items()}


def pad_to(values_BT: Tensor, length: int) -> Tensor:
    """Truncate or zero-pad to [B, length]."""
    return torch.nn.functional.pad(values_BT, (0, length - values_BT.size(1)))
