"""How a parameter on one rank covers the tensors of a Hugging Face folder.

The Hugging Face tensor is the common language: Megatron's shard and vLLM's shard of a weight are each described as
rectangles of Hugging Face tensors. Loading, exporting and resharding are intersections of such rectangles.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of a Hugging Face tensor and where it lies in a local parameter.

    A vector of n elements is n rows of one column.
    """

    tensor: str  # Hugging Face name
    rows: tuple[int, int]  # half-open, in the Hugging Face tensor
    cols: tuple[int, int]
    row: int = 0  # first row in the local parameter
    col: int = 0


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A rank's parameter: elements that no block covers are padding and hold zeros."""

    name: str  # in the module that holds it, Megatron's or vLLM's
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    owner: bool = True  # False: a synchronised copy (a tied output layer), never a source
    chunk: int = 0  # Megatron: which of the rank's model chunks (virtual stages) holds it
