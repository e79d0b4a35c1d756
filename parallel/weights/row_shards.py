"""Full sharding in the weight map: each parameter's rows divided among data-parallel ranks.

The intervals are those of `torch.chunk`, and so of torch's FSDP: all ranks but the last have equally many
rows, and the last ones may have fewer or none.
"""

from collections.abc import Sequence
from dataclasses import replace

from parallel.layout import Layout
from parallel.weights.shard import Block, ShardedParameter, Shards


def row_interval(rows: int, count: int, index: int) -> tuple[int, int]:
    """Return the half-open interval of rows that rank `index` of `count` holds; it may be empty."""
    step = -(-rows // count)
    return min(index * step, rows), min((index + 1) * step, rows)


def row_shard(parameter: ShardedParameter, count: int, index: int) -> ShardedParameter:
    """Return the part of a parameter that rank `index` of `count` data-parallel ranks holds."""
    first, last = row_interval(parameter.shape[0], count, index)
    blocks: list[Block] = []
    for block in parameter.blocks:
        top = block.rows[0]
        start, stop = max(first, block.row), min(last, block.row + block.rows[1] - top)
        if start < stop:
            rows = (top + start - block.row, top + stop - block.row)
            blocks.append(replace(block, rows=rows, row=start - first))
    return replace(parameter, shape=(last - first, *parameter.shape[1:]), blocks=tuple(blocks))


def row_shards(shards: Shards, layout: Layout) -> Shards:
    """Return the parameters of every rank of `layout`, of which its dp ranks hold the rows between them."""
    return {rank: _of_rank(parameters, layout, rank) for rank, parameters in shards.items()}


def _of_rank(parameters: Sequence[ShardedParameter], layout: Layout, rank: int) -> list[ShardedParameter]:
    index = layout.coordinates(rank).dp
    return [row_shard(parameter, layout.dp, index) for parameter in parameters]
