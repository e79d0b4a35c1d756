"""Full sharding (ZeRO-3): weights, gradients and optimizer state divided among data-parallel ranks.

torch's FSDP (`fully_shard`) gathers the weights of one layer at a time, for its forward and its backward
pass. Final norm and heads are gathered for the whole pass, as the loss reads the output weight after the
model's forward pass. Each parameter's rows are divided as `parallel.weights.row_shards` says.
"""

import warnings
from dataclasses import replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from parallel import device
from parallel.checkpoint.optimizer_shards import Described, describe
from parallel.groups import ProcessGroups
from parallel.weights.row_shards import row_interval
from verl_megatron.models.heads import trunk


class FullySharded(_BaseDataParallel):
    """A model chunk whose parameters are divided by rows among the ranks of `groups.dp`.

    The weights have `dtype` until `prepare_training` makes them float32. They are then the optimizer's own
    master weights, and are rounded to `dtype` as they are gathered.
    """

    def __init__(self, module: Any, groups: ProcessGroups, dtype: torch.dtype):
        super().__init__(config=module.config, module=module)
        self.module: Any = module
        self.group, self._described = groups.dp, self._describe(module, groups)
        self.stepped: dict[str, torch.nn.Parameter] = {}  # what the optimizer steps on, by name
        self.ddp_config = DistributedDataParallelConfig()
        # The loss never changes the output in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        options: dict[str, Any] = dict(
            mesh=DeviceMesh.from_group(groups.dp, device.device().type),
            mp_policy=MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
        )
        # Megatron's attributes of the parameters, which torch does not carry over.
        self._marks = {name: dict(vars(parameter)) for name, parameter in module.named_parameters()}
        # A tied embedding is the output weight. Another one is gathered for itself: its gradient is reduced
        # in float32, and beside the output's that would be the peak of a step's memory.
        tied = module.share_embeddings_and_output_weights
        self._gathered: list[Any] = [*module.decoder.layers, *([] if tied else [module.embedding])]
        for part in self._gathered:
            fully_shard(part, **options, reshard_after_forward=True)
        fully_shard(module, **options, reshard_after_forward=False)
        self._gathered.append(module)
        for part in self._gathered if groups.dp.size() > 1 else ():  # alone, torch would divide a copy by 1
            # Losses are divided by their global divisor, so gradients are summed, which gloo can do, too.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        for name, parameter in module.named_parameters():
            self._mark(name, parameter)

    def _describe(self, module: Any, groups: ProcessGroups) -> dict[str, Described]:
        """Describe the parameters before they are sharded, by name, without keeping their memory."""
        names = {parameter: name for name, parameter in module.named_parameters()}
        return {
            names[one.weight]: replace(one, weight=torch.empty(0), sharded=one.sharded.without_data())
            for one in describe(module, groups)
        }

    def row_parts(self) -> list[Described]:
        """Return this rank's rows of each parameter for checkpoints, as the optimizer steps on them."""
        return [
            replace(one, weight=self.stepped[name], start=self._first_element(one.shape))
            for name, one in self._described.items()
        ]

    def local_tensors(self) -> dict[str, Tensor]:
        """Return this rank's rows of each parameter, by name."""
        return {name: local(parameter) for name, parameter in self.module.named_parameters()}

    def _first_element(self, shape: torch.Size) -> int:
        """Return where this rank's rows begin in a flat parameter of this shape."""
        first, _ = row_interval(shape[0], self.group.size(), self.group.rank())
        return first * shape[1:].numel()

    def prepare_training(self) -> None:
        """Make the weights float32, and offer them to an optimizer as `stepped`."""
        self.module.float()
        for name, parameter in self.module.named_parameters():
            stepped: Any = torch.nn.Parameter(local(parameter))
            self._mark(name, stepped)
            self.stepped[name] = stepped

    def _mark(self, name: str, parameter: Any) -> None:
        for mark, value in self._marks[name].items():
            setattr(parameter, mark, value)

    def reshard(self) -> None:
        """Free the gathered weights; called after each pass, as the optimizer may change the shards next."""
        for part in self._gathered:
            part.reshard()

    def zero_grad_buffer(self) -> None:
        """Free the gradients."""
        for parameter in (*self.module.parameters(), *self.stepped.values()):
            parameter.grad = None

    def hand_over_gradients(self) -> None:
        """Give the gradients of this rank's rows, float32, to the parameters that the optimizer steps on."""
        for name, parameter in self.module.named_parameters():
            stepped = self.stepped[name]
            assert stepped.data_ptr() == local(parameter).data_ptr(), f"{name} has moved"
            stepped.grad = None if parameter.grad is None else local(parameter.grad)


class SteppedParameters:
    """What Megatron-Core's optimizer needs of a chunk: named parameters, here plain tensors of this rank."""

    def __init__(self, chunk: FullySharded):
        self.ddp_config, self._parameters = chunk.ddp_config, chunk.stepped

    def named_parameters(self):
        return iter(self._parameters.items())


def tensors_of(chunks: list[Any]) -> dict[tuple[int, str], Tensor]:
    """Return what this rank holds of the parameters of model chunks, wrapped or not, by chunk and name."""
    tensors = {}
    for i, chunk in enumerate(chunks):
        if isinstance(chunk, FullySharded):
            named = chunk.local_tensors()
        else:
            named = {name: parameter.data for name, parameter in trunk(chunk).named_parameters()}
        tensors |= {(i, name): tensor for name, tensor in named.items()}
    return tensors


def local(tensor: Any) -> Tensor:
    """Return this rank's rows of a sharded tensor; they share its memory."""
    return tensor.detach()._local_tensor
