"""Programs that the doctor starts, because a GPU that does not answer hangs the process that asks it.

Its arguments are `describe`, `attention`, `export GPU` or `read GPU`. `read` takes what `export` has printed
on its standard input, and `export` keeps the memory until its own standard input ends.
"""

import json
import sys

import torch
from torch.cuda import nccl

from parallel.reshard.ipc_tensors import exported_tensors, opened_tensors

KEY = (0, "probe")
VALUES = 1 << 20  # float32


def describe() -> str:
    """Compute on every GPU; return versions and the number of GPUs as JSON."""
    count = torch.cuda.device_count()
    for number in range(count):
        total = torch.ones(VALUES, device=f"cuda:{number}").sum().item()
        if total != VALUES:
            raise SystemExit(f"GPU {number} computes {total} where {VALUES} is right")
    if not count:
        raise SystemExit("torch sees no GPU")
    version = ".".join(map(str, nccl.version()))
    return json.dumps({"cuda": torch.version.cuda, "gpus": count, "nccl": version})


def attention() -> str:
    """Return the kernels of shared prompts' attention, and why they are not the fastest."""
    from verl_megatron.models.attention_kernels import Calls, cudnn_calls

    calls = cudnn_calls(torch.device("cuda", 0))
    if isinstance(calls, Calls):
        return "cuDNN, through Transformer Engine"
    return f"FlashAttention-2 of PyTorch: {calls}".replace("\n", " ")


def export(gpu: int) -> str:
    """Return the handles of a tensor on this GPU as JSON."""
    torch.cuda.set_device(gpu)
    tensor = torch.arange(VALUES, dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()
    found = exported_tensors({KEY: tensor})
    if found is None:
        raise SystemExit("GPU memory of PyTorch cannot be exported")
    handles, places = found
    base, offset, _, _ = places[KEY]
    print(json.dumps({"handle": handles[base].hex(), "offset": offset}), flush=True)
    sys.stdin.read()
    return ""


def read(gpu: int) -> str:
    """Map an exported tensor and compare it, copied to this GPU."""
    torch.cuda.set_device(gpu)
    torch.zeros(1, device="cuda")  # makes the context that the mapping needs
    said = json.loads(sys.stdin.readline())
    handles = {0: bytes.fromhex(said["handle"])}
    opened = opened_tensors(handles, {KEY: (0, said["offset"], (VALUES,), torch.float32)})
    if opened is None:
        raise SystemExit(f"the driver refuses to map GPU 0's memory for a process on GPU {gpu}")
    copy = torch.empty(VALUES, device="cuda").copy_(opened[KEY])
    if not torch.equal(copy.cpu(), torch.arange(VALUES, dtype=torch.float32)):
        raise SystemExit(f"a process on GPU {gpu} reads other values than GPU 0 holds")
    return "read"


if __name__ == "__main__":
    name, *gpus = sys.argv[1:]
    program = {"describe": describe, "attention": attention, "export": export, "read": read}[name]
    print(program(*map(int, gpus)))
