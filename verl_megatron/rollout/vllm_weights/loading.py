"""vLLM weights that alias external memory, and PyTorch's cached memory when it wakes up and sleeps."""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from parallel import device
from verl_megatron.rollout.engine import TAGS

_ALIGNMENT_BYTES = 16  # required by vector loads of kernels, assumed by torch.compile
_OWN_ALIGNMENT_BYTES = 256  # as for separate allocations
_MARGIN_BYTES = 2**28  # extra free memory for workspaces of CUDA libraries


@contextlib.contextmanager
def sharing(weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Context for starting an engine with load_format="dummy" whose parameters alias `weights`.

    A parameter's own memory is freed once its module is constructed, so the model is never allocated twice.
    `weights` are not written to. The other parameters get random values and share one allocation: vLLM wakes
    allocations one by one, and one is faster than hundreds.

    Raises:
        ValueError: while the engine starts, for an unknown parameter name, or another shape, dtype, stride or
            device.
    """
    loader = _sharing_loader()
    loader.weights = weights
    try:
        with _as_dummy_loader(loader):
            yield
    finally:
        loader.weights = {}


@contextlib.contextmanager
def packing() -> Iterator[None]:
    """Context for starting an engine with load_format="dummy" and fp8 weights.

    All parameters get random values and share one allocation, as in `sharing`. vLLM gives layers their fp8
    form when it loads them, not when it constructs them, so they move into the allocation afterwards.
    """
    with _as_dummy_loader(_packing_loader()):
        yield


@contextlib.contextmanager
def _as_dummy_loader(loader: type) -> Iterator[None]:
    from vllm.model_executor.model_loader import DummyModelLoader, register_model_loader

    # Not a new format: vLLM checks for "dummy" in several places (to keep a tied head tied, for example).
    register_model_loader("dummy")(loader)
    try:
        yield
    finally:
        register_model_loader("dummy")(DummyModelLoader)


@functools.cache
def _packing_loader() -> type:
    from vllm.model_executor.model_loader import DummyModelLoader
    from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

    class PackingLoader(DummyModelLoader):
        def load_weights(self, model: nn.Module, model_config) -> None:
            super().load_weights(model, model_config)
            for parameter in share(model, {}, set(model.parameters())):
                initialize_single_dummy_weight(parameter)

    return PackingLoader


@functools.cache
def _sharing_loader():
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
            """Alias the parameters; vLLM calls this after construction, before anything reads them."""
            self._hook.remove()
            for parameter in share(model, self.weights, self._emptying.emptied):
                initialize_single_dummy_weight(parameter)

    return SharingLoader


class Emptying:
    """A parameter registration hook that frees the memory of parameters.

    It does so when the next module registers a parameter, because constructors write initial values after
    registration.
    """

    def __init__(self):
        self.emptied: set[nn.Parameter] = set()
        self._module: nn.Module | None = None
        self._parameters: list[nn.Parameter] = []  # of `_module`, which may still be under construction

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
        ):  # not a view, and not freed before (tied parameters register twice)
            self.emptied.add(parameter)
            storage.resize_(0)


def share(model: nn.Module, weights: Mapping[str, Tensor], emptied: Set[nn.Parameter]) -> list[nn.Parameter]:
    """Alias the parameters named in `weights` to their memory, and put the others into one allocation.

    Args:
        weights: by name as in `model.named_parameters()`.
        emptied: parameters whose memory was freed.

    Returns:
        The parameters not in `weights`; the contents of those in `emptied` are undefined.

    Raises:
        ValueError: as in `sharing`; nothing is changed.
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
    """Empty PyTorch's cache if vLLM needs the memory to wake `tag`; return whether there is enough then.

    The cache is not always emptied, because the trainer would have to reallocate its blocks, which takes
    time.
    """
    try:
        from vllm.device_allocator import get_mem_allocator_instance

        allocator: Any = get_mem_allocator_instance()
        needed_bytes = sleeping_bytes(allocator.pointer_to_data.values(), tag)
    except (ImportError, AttributeError, TypeError, LookupError):  # another vLLM version with other records
        needed_bytes = None
    if needed_bytes is None or needed_bytes + _MARGIN_BYTES > torch.cuda.mem_get_info()[0]:
        device.release_cached_memory()
    return needed_bytes is not None and needed_bytes + _MARGIN_BYTES <= torch.cuda.mem_get_info()[0]


@contextlib.contextmanager
def keeping_cache() -> Iterator[None]:
    """Context for vLLM's sleep and wake-up: PyTorch's cached memory stays, for training is going to use it.

    vLLM would empty the cache; `make_room` does so where vLLM needs the memory to wake up.
    """
    emptying: tuple[Any, ...] = (torch.cuda, torch.accelerator)
    found = [(module, module.empty_cache) for module in emptying]
    for module, _ in found:
        module.empty_cache = lambda: None
    try:
        yield
    finally:
        for module, function in found:
            module.empty_cache = function


def sleeping_bytes(allocations: Iterable, tag: str) -> int:
    """Return the bytes of GPU memory that waking `tag` allocates.

    Args:
        allocations: vLLM's records (vllm.device_allocator.AllocationData).
    """
    return sum(
        allocation.handle[1]
        for allocation in allocations
        if allocation.is_asleep and (allocation.tag == tag or allocation.tag not in TAGS)
    )
