"""fp8 weights of vLLM's linear layers: one scale per output channel, written in place from the actor's.

    W_nk ≈ s_n q_nk,    s_n = max_k |W_nk| / 448

A row of a layer has a scale of its own, so fused layers (queries, keys and values; gate and up) need nothing
else. Embeddings, norms, biases and the output layer keep vLLM's dtype, and so do inputs and outputs of the
layers; vLLM scales each token's inputs.

Letters: N output channels of a layer, K input channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel import device
from parallel.reshard.staged import StagedParameters
from parallel.reshard.transport import Parameters
from parallel.weights.architecture import Architecture
from parallel.weights.rules import vllm_parameters

FP8 = torch.float8_e4m3fn
MAX = torch.finfo(FP8).max  # 448
LEAST_SCALE = 1 / (512 * MAX)  # vLLM's, for rows of zeros
QUANTIZATION = "fp8_per_channel"  # vLLM's name of this form
CAPABILITY = (8, 9)  # of GPUs that compute in fp8
SIDES = 16  # vLLM's kernels pad other sides
PIECE = 2**22  # elements that a CPU widens to float32 at a time


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """The weight of a linear layer as vLLM holds it."""

    weight_NK: Tensor  # `FP8`, contiguous: the transpose of vLLM's parameter
    scale_N1: Tensor  # float32

    @property
    def nbytes(self) -> int:
        return self.weight_NK.nbytes + self.scale_N1.nbytes

    def write(self, values_NK: Tensor) -> None:
        """Quantize values into this memory, on a GPU by vLLM's own kernel.

        Args:
            values_NK: bfloat16 or float16, on any device.
        """
        values_NK = values_NK.to(self.weight_NK.device)
        if values_NK.is_cuda:
            from vllm._custom_ops import scaled_fp8_quant

            _, scale_N1 = scaled_fp8_quant(values_NK, use_per_token_if_dynamic=True, output=self.weight_NK)
            self.scale_N1.copy_(scale_N1)
        else:
            quantize(values_NK, self.weight_NK, self.scale_N1)


def quantize(values_NK: Tensor, weight_NK: Tensor, scale_N1: Tensor) -> None:
    """Write the fp8 form of `values_NK` into `weight_NK` and `scale_N1`, with the bits of vLLM's kernel."""
    most = torch.tensor(MAX, device=values_NK.device)  # by a number, torch would multiply by its reciprocal
    torch.div(values_NK.abs().amax(1, keepdim=True).float(), most, out=scale_N1).clamp_(min=LEAST_SCALE)
    rows = max(1, PIECE // values_NK.shape[1])
    for values_RK, weight_RK, scale_R1 in zip(
        values_NK.split(rows), weight_NK.split(rows), scale_N1.split(rows)
    ):
        weight_RK.copy_((values_RK / scale_R1).clamp_(-MAX, MAX))


def split_parameters(parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Fp8Weight]]:
    """Split vLLM's parameters into plain ones and fp8 weights with their scales, both by the weight's name.

    Raises:
        ValueError: a weight is in another fp8 form.
    """
    plain, weights = dict(parameters), {}
    for name in [name for name, tensor in parameters.items() if tensor.dtype == FP8]:
        weight_NK, scale_N1 = plain.pop(name).t(), plain.pop(f"{name}_scale", None)
        num_rows = len(weight_NK)
        if scale_N1 is None or scale_N1.shape != (num_rows, 1) or not weight_NK.is_contiguous():
            form = "no scale" if scale_N1 is None else f"scales {tuple(scale_N1.shape)}"
            raise ValueError(
                f"vLLM holds {name} as {tuple(weight_NK.t().shape)} in fp8 with {form}, where rows of "
                "float8_e4m3fn with a scale each are known; set rollout.weight_dtype=auto, or use a GPU that "
                "computes in fp8 (Ada, Hopper or newer) and a tested version of vLLM"
            )
        weights[name] = Fp8Weight(weight_NK, scale_N1)
    return plain, weights


def staged(weights: Mapping[str, Fp8Weight]) -> StagedParameters:
    """Return the weights as parameters of a reshard that are quantized once they have arrived."""

    def write(values: Parameters) -> None:
        for (_, name), values_NK in values.items():
            weights[name].write(values_NK)

    return StagedParameters(
        shapes={(0, name): tuple(weight.weight_NK.shape) for name, weight in weights.items()}, write=write
    )


def is_quantized(name: str) -> bool:
    """Return whether vLLM holds this parameter in fp8 with rollout.weight_dtype=fp8."""
    return name.endswith("_proj.weight")


def check_fp8(arch: Architecture, tp: int, dtype: torch.dtype, *, aliases: bool) -> None:
    """Check a model and this machine before vLLM starts.

    Args:
        dtype: of vLLM's other weights.
        aliases: whether vLLM's weights are to lie in memory of the trainer's.

    Raises:
        ValueError: vLLM cannot hold this model's linear layers in fp8 here.
    """
    problems = fp8_problems(arch, tp, dtype)
    if aliases:
        problems.append(
            "rollout.weight_dtype=fp8 cannot share memory with bfloat16 weights; give no shared_weights"
        )
    if device.is_gpu() and torch.cuda.get_device_capability() < CAPABILITY:
        problems.append(
            "rollout.weight_dtype=fp8 needs a GPU that computes in fp8 (Ada, Hopper or newer), and this is a "
            f"{torch.cuda.get_device_name()}; set weight_dtype=auto"
        )
    if problems:
        raise ValueError(problems[0])


def fp8_problems(arch: Architecture, tp: int, dtype: torch.dtype) -> list[str]:
    """Return why vLLM cannot hold this model's linear layers in fp8.

    Args:
        dtype: of vLLM's other weights.
    """
    named, problems = "rollout.weight_dtype=fp8", []
    if dtype not in (torch.bfloat16, torch.float16):
        problems.append(
            f"{named} quantizes weights of two bytes, and vLLM's are {str(dtype).removeprefix('torch.')}; "
            "set rollout.dtype=bfloat16"
        )
    for parameter in vllm_parameters(arch, tp, 0):
        if is_quantized(parameter.name) and any(side % SIDES for side in parameter.shape):
            problems.append(
                f"{named} needs layers whose sides are multiples of {SIDES}, and {parameter.name} is "
                f"{' x '.join(map(str, parameter.shape))} on a rank; use another rollout.tp, or "
                "weight_dtype=auto"
            )
            break
    return problems
