"""Sharded parameters: each parameter of a rank as rectangles of Hugging Face tensors.

The shards of Megatron and of vLLM are both described this way. Loading, exporting and resharding are
intersections of such rectangles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of a Hugging Face tensor and its position in a local parameter.

    A vector of n elements has n rows and one column.
    """

    tensor: str  # Hugging Face name
    rows: tuple[int, int]  # half-open, in the Hugging Face tensor
    cols: tuple[int, int]
    row: int = 0  # first row in the local parameter
    col: int = 0


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A parameter of one rank. Elements that no block covers are padding and hold zeros."""

    name: str  # in its module, Megatron's or vLLM's
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    owner: bool = True  # False: a synchronised copy (a tied output layer), never a source
    chunk: int = 0  # Megatron: index of the rank's model chunk (virtual stage) that holds it


Shards = Mapping[int, Sequence[ShardedParameter]]  # by world rank; ranks with the same shards share one list
