"""Machine models for plans: memory, rates, launch costs; built in or measured by `benchmark calibrate`."""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path

from parallel.runtime.refusal import nearest

GIB = 2**30
# Rate of matrix products inside layers relative to a large product alone: 640 of 790 TFLOP/s on an H200.
LAYER_SHARE = 0.81


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One GPU of a host and its links.

    Rates are those that programs achieve, per second; sizes in bytes; B bytes, s seconds.
    """

    name: str
    source: str  # where the numbers come from
    gpu_bytes: float  # as reported by CUDA
    host_bytes: float = 1024 * GIB  # memory of one host, for all its ranks
    peak_flops: float  # the vendor's dense bfloat16 rate: the divisor of MFU
    layer_flops: float  # matrix products inside layers under sustained load, which lowers clocks
    attention_flops: float  # causal attention forward, counting half of the score matrix
    copy_rate: float  # B/s read and written in the GPU's memory
    same_host_rate: float  # B/s to other GPUs of the host, each way
    other_host_rate: float = 50e9  # B/s of one GPU to other hosts, each way: one 400 Gbit/s adapter a GPU
    pinned_rate: float = 50e9  # B/s between GPU and pinned host memory
    collective_s: float = 2e-5  # to start a collective between GPUs
    forward_launch_s: float = 1.6e-3  # to launch a layer's forward pass: the floor for small models
    backward_launch_s: float = 2.6e-3  # to launch a layer's backward pass
    decode_step_s: float = 1.4e-3  # per step, of vLLM's scheduler and sampler, as far as it is not hidden
    decode_launch_s: float = 0.8e-3  # for vLLM to launch a layer without CUDA graphs
    decode_row_s: float = 1e-5  # per sample and step, of vLLM's bookkeeping
    decode_reduce_s: float = 8e-6  # of a small all-reduce between vLLM's tensor-parallel ranks
    prefill_tokens: float = 16_384  # vLLM's default per step: 8,192 on GPUs below 70 GiB and on an a100
    map_rate: float = 330e9  # B/s at which vLLM maps memory on wake-up and unmaps it on sleep
    phase_s: float = 0.04  # to dispatch an iteration's samples to a model and collect the results
    # CUDA context, kernels, workspaces, vLLM's CUDA graphs, blocks that PyTorch cannot free.
    process_bytes: float = 5 * GIB
    communicator_bytes: float = 0.4 * GIB  # of NCCL, for each group of several ranks
    process_host_bytes: float = 8 * GIB  # host memory of a rank without offload

    @classmethod
    def from_file(cls, path: str | Path) -> "Machine":
        """Read a machine file of verl-megatron benchmark calibrate.

        It is a JSON object with `base`, a built-in machine, and the fields that differ from it.

        Raises:
            ValueError: no such file, not JSON, an unknown base or field, or a value that is not a positive
                number.
        """
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else f"it is no JSON: {error}"
            raise ValueError(
                f"machine file {path} cannot be read ({why}); write one with `benchmark calibrate`"
            ) from None
        if not isinstance(given, dict) or given.get("base") not in MACHINES:
            raise ValueError(
                f"machine file {path} has to be a JSON object with base set to one of {', '.join(MACHINES)}"
            )
        known = {field.name for field in fields(cls)}
        values = {key: value for key, value in given.items() if key not in ("base", "measured")}
        for key, value in values.items():
            if key not in known:
                raise ValueError(
                    f"machine file {path}: {key}={value!r} is not known; known are {', '.join(sorted(known))}"
                )
            is_text = key in ("name", "source")
            is_number = isinstance(value, int | float) and 0 < value < float("inf")
            if not (isinstance(value, str) if is_text else is_number):
                raise ValueError(
                    f"machine file {path}: {key}={value!r}"
                    f" must be {'a text' if is_text else 'a positive number'}"
                )
        return replace(MACHINES[given["base"]], **values)


_H200 = Machine(
    name="h200",
    source="memory, links, copies and kernels measured;"
    " launch, decoding and process costs fitted to three 8B runs",
    gpu_bytes=139.8 * GIB,
    peak_flops=989e12,
    # transformer-engine layers reached 56 % MFU forward and backward, including attention and norms.
    layer_flops=LAYER_SHARE * 790e12,
    attention_flops=400e12,
    copy_rate=4.19e12,
    same_host_rate=342e9,
)
MACHINES: dict[str, Machine] = {
    "h200": _H200,
    "h100": replace(
        _H200, name="h100", source="the h200's with the memory of an h100, not measured",
        gpu_bytes=79.1 * GIB, copy_rate=2.9e12,
    ),
    "a100-80g": replace(
        _H200, name="a100-80g", source="vendor's numbers scaled as on the h200, not measured",
        gpu_bytes=79.2 * GIB, peak_flops=312e12, layer_flops=210e12, attention_flops=150e12,
        copy_rate=1.75e12, prefill_tokens=8192, same_host_rate=230e9, other_host_rate=25e9, pinned_rate=24e9,
    ),
    "b200": replace(
        _H200, name="b200", source="vendor's numbers scaled as on the h200, not measured",
        gpu_bytes=178 * GIB, peak_flops=2250e12, layer_flops=1400e12, attention_flops=900e12,
        copy_rate=6.9e12, same_host_rate=700e9,
    ),
}  # fmt: skip


def find_machine(name: str) -> Machine:
    """Return the built-in machine `name`, or the machine of a .json file.

    Raises:
        ValueError: neither, or a file that `Machine.from_file` rejects.
    """
    if name in MACHINES:
        return MACHINES[name]
    if name.endswith(".json"):
        return Machine.from_file(name)
    raise ValueError(
        f"gpu {name!r} is not known{nearest(name, MACHINES)}; choose one of {', '.join(MACHINES)}"
        ", or the .json file that verl-megatron benchmark calibrate wrote"
    )
