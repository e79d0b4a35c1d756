"""Tensors of a Megatron-Core checkpoint, as rectangles of Hugging Face tensors.

Megatron stacks equal layers along a first axis and splits nothing else. With one tensor-parallel rank and one
stage, a parameter is the checkpoint's global tensor, with gate above up in `linear_fc1`. Both specs use
transformer-engine's keys.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from parallel.layout import Layout
from parallel.weights.architecture import Architecture
from parallel.weights.rules import Head, megatron_parameters
from parallel.weights.shard import Block

Spec = Literal["te", "local"]
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# the padding of their rows varies
VOCAB_KEYS = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
)
# Modules with an `_extra_state` (FP8 scales; None without FP8) that Megatron requests on load.
LAYER_STATES = {
    "local": ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"),
    "te": (
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "self_attention.core_attention",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    ),
}


@dataclass(frozen=True, slots=True)
class GlobalTensor:
    """One key of the checkpoint: `blocks[layer]` are rectangles of whole rows; uncovered rows are padding."""

    key: str
    stacked: bool  # whether the shape begins with the number of layers
    shape: tuple[int, ...]  # of one layer
    blocks: tuple[tuple[Block, ...], ...]

    @property
    def layers(self) -> int:
        return len(self.blocks)

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def cols(self) -> int:
        return self.shape[1] if len(self.shape) == 2 else 1

    @property
    def full_shape(self) -> tuple[int, ...]:
        return (self.layers, *self.shape) if self.stacked else self.shape

    @property
    def needed_rows(self) -> int:
        """Number of rows that hold weights; later rows pad the vocabulary."""
        return max(block.row + block.rows[1] - block.rows[0] for block in self.blocks[0])


@dataclass(frozen=True, slots=True)
class RowsInTensor:
    """Interval of rows of a Hugging Face tensor and its first row in a layer of a global tensor."""

    key: str
    layer: int
    rows: tuple[int, int]
    row: int


def global_tensors(arch: Architecture, head: Head) -> dict[str, GlobalTensor]:
    """Return a checkpoint's tensors by key, in the model's order, without a tied output layer."""
    parts: dict[str, list] = {}
    for parameter in megatron_parameters(arch, Layout(), 0, spec="te", head=head):
        match = LAYER.fullmatch(parameter.name)
        parts.setdefault(f"decoder.layers.{match[2]}" if match else parameter.name, []).append(parameter)
    tensors = {}
    for key, layers in parts.items():
        blocks = tuple(parameter.blocks for parameter in layers)
        tensors[key] = GlobalTensor(key, key.startswith("decoder.layers."), layers[0].shape, blocks)
    return tensors


def rows_by_name(tensors: Mapping[str, GlobalTensor]) -> dict[str, list[RowsInTensor]]:
    """Return where the rows of each Hugging Face tensor are, from the first row on."""
    by_name: dict[str, list[RowsInTensor]] = {}
    for tensor in tensors.values():
        for layer, blocks in enumerate(tensor.blocks):
            for block in blocks:
                rows = RowsInTensor(tensor.key, layer, block.rows, block.row)
                by_name.setdefault(block.tensor, []).append(rows)
    return {name: sorted(parts, key=lambda part: part.rows) for name, parts in by_name.items()}


def extra_states(arch: Architecture, spec: Spec) -> list[str]:
    """Return the keys of the checkpoint's objects, with Megatron's suffix for shard and shard count."""
    modules = LAYER_STATES[spec]
    if spec == "te" and arch.qk_norm:
        modules += ("self_attention.q_layernorm", "self_attention.k_layernorm")
    keys = [
        f"decoder.layers.{module}._extra_state/shard_{layer}_{arch.num_layers}"
        for layer in range(arch.num_layers)
        for module in modules
    ]
    return keys + ["decoder.final_layernorm._extra_state/shard_0_1"] * (spec == "te")
