"""Output heads: next-token log-probabilities, or one value per token.

Letters: T packed tokens on this rank, H hidden size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor


class LanguageHead(ColumnParallelLinear):
    """Output layer that skips its matrix product: logits are computed in chunks by `log_probs.py`."""

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None, **_
    ):
        """[T, 1, H] (a slice of it under sequence parallelism) -> [T, 1, H], the same on every rank."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=self.tp_group
            ), None
        return copy_to_tensor_model_parallel_region(hidden, group=self.tp_group), None


class ValueHead(torch.nn.Module):
    """One float32 value per token; weight [1, H] (and bias [1]) are replicated over tensor-parallel ranks."""

    def __init__(self, config, tp_group, *, bias: bool):
        super().__init__()
        self.sequence_parallel, self.tp_group = config.sequence_parallel, tp_group
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device)
        )
        self.bias = (
            torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device)) if bias else None
        )
        parameters: Any = self.parameters()
        for parameter in parameters:
            parameter.sequence_parallel = config.sequence_parallel

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None, **_
    ):
        """[T, 1, H] -> [T, 1, 1] float32."""
        values = F.linear(
            hidden.float(), self.weight.float(), None if self.bias is None else self.bias.float()
        )
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None


class SharedTrunkValueHead(ValueHead):
    """Value head beside a `LanguageHead`: computes values from its input, before it runs.

    This is where a critic's own value head stands, so both give the same bits.
    """

    def __init__(self, config, tp_group, output_layer: LanguageHead):
        super().__init__(config, tp_group, bias=True)
        self.trains_trunk = True
        self._values: Tensor | None = None
        output_layer.register_forward_pre_hook(self._compute)

    def _compute(self, output_layer: LanguageHead, inputs: tuple[Tensor, ...]) -> None:
        hidden = inputs[0] if self.trains_trunk else inputs[0].detach()
        self._values, _ = self(hidden)

    def take_values(self) -> Tensor:
        """Return the values of the latest forward pass [T, 1, 1] float32, once."""
        assert self._values is not None, "values come from the model's forward pass"
        values, self._values = self._values, None
        return values


def trunk(chunk: Any) -> Any:
    """Return the GPTModel of a chunk, which may be wrapped for data parallelism."""
    while not hasattr(chunk, "share_embeddings_and_output_weights"):
        chunk = chunk.module
    return chunk


def head_weight(chunk: torch.nn.Module) -> Tensor:
    """Return the output weight of the last stage's chunk.

    It is the output layer's own, or the embedding's where the two are tied and on this stage.
    """
    model = trunk(chunk)
    return (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else model.output_layer.weight
    )
