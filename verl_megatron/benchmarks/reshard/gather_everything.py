"""Weight sync of colocated engines by gathering whole tensors, reimplemented for `bench/reshard.py`."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import device
from parallel.groups import ProcessGroups
from parallel.reshard.plan import matrix_shape
from parallel.reshard.transport import Parameters
from parallel.weights.rules import hf_shapes
from parallel.weights.shard import Block, ShardedParameter
from verl_megatron.benchmarks.case import ReshardCase, part


class GatherEverything:
    """Weight sync as colocated engines commonly do it: gather whole Hugging Face tensors on every rank.

    A bucket is broadcast from its stage, all-gathered over tensor-parallel ranks, merged and sliced for the
    engine. Unlike the originals, it prepares all views once.
    """

    def __init__(
        self,
        case: ReshardCase,
        groups: ProcessGroups,
        source: Parameters,
        destination: Parameters,
        bucket_bytes: int,
    ):
        self.case, self.groups, self.source, self.sizes = case, groups, source, hf_shapes(case.arch)
        # by tensor: the views of this rank's engine
        self.wanted: dict[str, list[tuple[Tensor, Block]]] = defaultdict(list)
        for parameter in case.rollout_shards(groups.rank):
            matrix_RC = destination[parameter.chunk, parameter.name].view(matrix_shape(parameter.shape))
            for block in parameter.blocks:
                self.wanted[block.tensor].append((part(matrix_RC, block), block))
        planned, tp = list(self._plan(bucket_bytes)), case.train.tp
        largest = max(_elements(bucket) for _, bucket in planned)
        self.shard, self.gathered, self.whole = (
            torch.empty(largest * copies, dtype=case.dtype, device=device.device()) for copies in (1, tp, tp)
        )
        self.staging_bytes = sum(buffer.nbytes for buffer in (self.shard, self.gathered, self.whole))
        self.buckets = [self._resolve(stage, bucket) for stage, bucket in planned]
        self.received_bytes = sum(
            shard.nbytes * ((root != groups.rank) + tp - 1) for root, shard, *_ in self.buckets
        )

    def _plan(self, bucket_bytes: int) -> Iterator[tuple[int, list[tuple[ShardedParameter, ...]]]]:
        """Return (stage, parameters with the shard of each tensor-parallel rank) for each bucket.

        A bucket has about `bucket_bytes` when gathered, and at least one parameter.
        """
        layout = self.case.train
        for stage in range(layout.pp):
            ranks = [layout.rank_of(tp=tp, pp=stage) for tp in range(layout.tp)]
            by_parameter = zip(*map(self.case.train_shards, ranks))
            owned = [shards for shards in by_parameter if shards[0].owner]
            ends = accumulate(
                prod(shards[0].shape) * layout.tp * self.case.dtype.itemsize for shards in owned
            )
            for _, bucket in groupby(zip(ends, owned), key=lambda pair: pair[0] // max(1, bucket_bytes)):
                yield stage, [shards for _, shards in bucket]

    def _resolve(self, stage: int, planned: list[tuple[ShardedParameter, ...]]) -> tuple:
        """Return a bucket's broadcast root, buffers, and the copies that pack, merge and slice it."""
        place, size, at, free = (
            self.groups.coordinates,
            _elements(planned),
            0,
            0,
        )
        root = self.case.train.rank_of(tp=place.tp, cp=place.cp, dp=place.dp, pp=stage)
        shard, gathered, pack, rebuild, cut = (
            self.shard[:size],
            self.gathered[: size * self.case.train.tp],
            [],
            [],
            [],
        )
        for shards in planned:
            span, shape_RC, whole = slice(at, at + prod(shards[0].shape)), matrix_shape(shards[0].shape), {}
            if stage == place.pp:
                pack.append(
                    (shard[span].view(shape_RC), self.source[shards[0].chunk, shards[0].name].view(shape_RC))
                )
            for name in {block.tensor: None for parameter in shards for block in parameter.blocks}:
                rows, cols = matrix_shape(self.sizes[name])
                whole[name] = self.whole[free : free + rows * cols].view(rows, cols)
                free += rows * cols
            for of_rank, parameter in zip(gathered.view(-1, size), shards):
                gathered_RC = of_rank[span].view(shape_RC)
                rebuild += [
                    (whole[block.tensor][slice(*block.rows), slice(*block.cols)], part(gathered_RC, block))
                    for block in parameter.blocks
                ]
            for name, tensor_RC in whole.items():
                cut += [
                    (target_RC, tensor_RC[slice(*block.rows), slice(*block.cols)])
                    for target_RC, block in self.wanted[name]
                ]
            at = span.stop
        return root, shard, gathered, *(tuple(map(list, zip(*pairs))) for pairs in (pack, rebuild, cut))

    def run(self) -> None:
        for root, shard, gathered, pack, rebuild, cut in self.buckets:
            if root == self.groups.rank:
                torch._foreach_copy_(*pack)
            if self.case.train.pp > 1:
                dist.broadcast(shard, src=root, group=self.groups.pp)
            dist.all_gather_into_tensor(gathered, shard, group=self.groups.tp)
            torch._foreach_copy_(*rebuild)
            torch._foreach_copy_(*cut)


def _elements(bucket: Sequence[tuple[ShardedParameter, ...]]) -> int:
    """Return the elements of a bucket on one tensor-parallel rank."""
    return sum(prod(shards[0].shape) for shards in bucket)
