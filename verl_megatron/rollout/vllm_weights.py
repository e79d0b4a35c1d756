"""vLLM's weights in memory that belongs to somebody else, and room for what it wakes."""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import accumulate

import torch
from torch import Tensor, nn

from parallel import device
from verl_megatron.rollout.engine import TAGS

_ALIGNMENT_BYTES = 16  # what vector loads of the kernels need, and what torch.compile assumes
_OWN_ALIGNMENT_BYTES = 256  # as if each had an allocation of its own
_MARGIN_BYTES = 2**28  # beside what wakes: workspaces that CUDA's libraries take by themselves


@contextlib.contextmanager
def sharing(weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Around the start of one engine with load_format="dummy": its parameters of these names use these tensors' memory.

    Parameters have no memory of their own from the end of their module's construction until all modules
    exist, so the model never exists twice. The tensors are not written to; the other parameters get one
    allocation together (vLLM wakes one after the other, and hundreds take longer than one) and random values.

    Raises:
        ValueError: while the engine starts: a name that vLLM lacks, or a tensor of another shape, dtype,
            stride or device.
    """
    from vllm.model_executor.model_loader import DummyModelLoader, register_model_loader

    loader = _loader_class()
    loader.weights = weights
    # No format of its own: in several places vLLM knows that "dummy" reads no files (a tied head stays tied for that).
    register_model_loader("dummy")(loader)
    try:
        yield
    finally:
        register_model_loader("dummy")(DummyModelLoader)
        loader.weights = {}


@functools.cache
def _loader_class():
    from vllm.model_executor.model_loader import DummyModelLoader
    from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

    class SharingLoader(DummyModelLoader):
        weights: Mapping[str, Tensor] = {}

        def load_model(self, *args, **kwargs) -> nn.Module:
            self._emptying = Emptying()
            self._hook = nn.modules.module.register_module_parameter_registration_hook(self._emptying)
            try:
                return super().load_model(*args, **kwargs)
            finally:
                self._hook.remove()

        def load_weights(self, model: nn.Module, model_config) -> None:
            """Called between the model's construction and everything that reads its parameters."""
            self._hook.remove()
            for parameter in share(model, self.weights, self._emptying.emptied):
                initialize_single_dummy_weight(parameter)

    return SharingLoader


class Emptying:
    """A parameter registration hook that frees the memory of parameters.

    Not at once, but when the next module registers a parameter: constructors write initial values after
    registering.
    """

    def __init__(self):
        self.emptied: set[nn.Parameter] = set()
        self._module: nn.Module | None = None
        self._parameters: list[nn.Parameter] = []  # of that module, which may still be under construction

    def __call__(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if module is not self._module:
            for finished in self._parameters:
                self._empty(finished)
            self._module, self._parameters = module, []
        if parameter is not None:
            self._parameters.append(parameter)

    def _empty(self, parameter: nn.Parameter) -> None:
        storage = parameter.untyped_storage()
        if (
            storage.nbytes() == parameter.nbytes
        ):  # neither a part of another tensor nor emptied before (a tied one comes twice)
            self.emptied.add(parameter)
            storage.resize_(0)


def share(model: nn.Module, weights: Mapping[str, Tensor], emptied: Set[nn.Parameter]) -> list[nn.Parameter]:
    """Let the parameters that `weights` names use those tensors' memory, and give the others one allocation together.

    Args:
        weights: names as in `model.named_parameters()`.
        emptied: those whose memory was freed.

    Returns:
        The parameters that `weights` does not name; the contents of those in `emptied` are undefined.

    Raises:
        ValueError: as `sharing`; nothing is changed.
    """
    parameters = dict(model.named_parameters())
    for name, tensor in weights.items():
        if name not in parameters:
            raise ValueError(
                f"shared_weights: vLLM has no parameter {name} (tied ones go by the first of their names); "
                f"choose from {', '.join(parameters)}"
            )
        given, wanted = _describe(tensor), _describe(parameters[name])
        if given != wanted:
            raise ValueError(f"shared_weights: {name} is {given}, and vLLM's parameter is {wanted}")
        if tensor.data_ptr() % _ALIGNMENT_BYTES:
            raise ValueError(
                f"shared_weights: {name} starts at an address that is no multiple of {_ALIGNMENT_BYTES} "
                "bytes; pad what stands before it"
            )
    own = [
        parameter for name, parameter in parameters.items() if name not in weights and parameter in emptied
    ]
    starts = [
        0,
        *accumulate(-(-parameter.nbytes // _OWN_ALIGNMENT_BYTES) * _OWN_ALIGNMENT_BYTES for parameter in own),
    ]
    memory = torch.empty(starts[-1], dtype=torch.uint8, device=own[0].device if own else None)
    for start, parameter in zip(starts, own):
        flat = memory[start : start + parameter.nbytes].view(parameter.dtype)
        parameter.data = flat.as_strided(parameter.shape, parameter.stride())
    for name, tensor in weights.items():
        parameters[name].data = tensor.detach()
    return [parameter for name, parameter in parameters.items() if name not in weights]


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}, on {tensor.device}"


def make_room(tag: str) -> bool:
    """Before vLLM wakes `tag` on a GPU: PyTorch gives its cached blocks back if there is no room without that; is there room then?

    Emptying the cache always would cost the trainer its blocks, which take time to get again. (Newer engines
    empty it whenever they wake something, all the same.)
    """
    try:
        from vllm.device_allocator import get_mem_allocator_instance

        needed_bytes = sleeping_bytes(get_mem_allocator_instance().pointer_to_data.values(), tag)
    except (ImportError, AttributeError, TypeError, LookupError):  # a vLLM that keeps other records
        needed_bytes = None
    if needed_bytes is None or needed_bytes + _MARGIN_BYTES > torch.cuda.mem_get_info()[0]:
        device.release_cached_memory()
    return needed_bytes is not None and needed_bytes + _MARGIN_BYTES <= torch.cuda.mem_get_info()[0]


def sleeping_bytes(allocations: Iterable, tag: str) -> int:
    """Bytes that waking `tag` takes from the GPU.

    Args:
        allocations: vLLM's records (vllm.device_allocator.AllocationData).
    """
    return sum(
        allocation.handle[1]
        for allocation in allocations
        if allocation.is_asleep and (allocation.tag == tag or allocation.tag not in TAGS)
    )
