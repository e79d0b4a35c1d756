"""Trains a step of a small model on two gloo ranks, once with all of `CPU_PATCHES` and once without each.

Modules that Megatron-Core imports anyway are imported here once; every case is a pair of forked processes.
"""

import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy  # noqa: F401
import torch
import torch.distributed.checkpoint  # noqa: F401
import torch.utils.cpp_extension  # noqa: F401

from parallel import device
from parallel.layout import Layout
from parallel.rank_set import world
from parallel.weights.rules import hf_shapes
from parallel.weights.writing import write_json, write_safetensors
from tests.tiny import tiny_architecture

ARCH = tiny_architecture(hidden_size=32, head_dim=8, intermediate_size=48, tied=True)
CUDA_ERRORS = ("cuda", "CUDA", "NVIDIA")


def write_model(folder: Path) -> None:
    torch.manual_seed(1)
    write_safetensors(
        folder / "model.safetensors",
        {
            name: 0.1 * torch.randn(shape)
            for name, shape in hf_shapes(ARCH).items()
            if name != "lm_head.weight"
        },
    )
    write_json(folder / "config.json", ARCH.to_hf())


def train_a_step(folder: Path) -> None:
    """Two pipeline stages that share an embedding, two micro-batches, one optimizer step."""
    device.initialize()
    from parallel.groups import ProcessGroups
    from verl_megatron.algorithms.losses import cross_entropy
    from verl_megatron.algorithms.normalizers import LossScale
    from verl_megatron.config import EngineConfig
    from verl_megatron.data.batch import RolloutBatch
    from verl_megatron.roles.engine import Engine, EngineOptions

    groups = ProcessGroups(Layout.parse("pp2", (0, 1)), world())
    options = EngineOptions(config=EngineConfig(), seed=1)
    engine = Engine(arch=ARCH, folder=str(folder), groups=groups, head="lm", options=options)
    engine.prepare_training(lr=1e-2, total_steps=1)
    before = {key: tensor.clone() for key, tensor in engine.tensors.items()}
    batch = RolloutBatch.from_lists([0, 1], [[5, 6, 7], [8]], [[9, 10], [11, 12, 13]])
    engine.train_step(
        batch,
        [[0], [1]],
        lambda outputs, micro: cross_entropy(outputs["logprobs"]),
        fields=(),
        scale=LossScale(5),
    )
    assert all(
        torch.isfinite(tensor).all() and not tensor.equal(before[key])
        for key, tensor in engine.tensors.items()
    ), "a parameter was not trained"


def without(leave_out: str, folder: Path) -> None:
    device.prepare(leave_out=leave_out)
    train_a_step(folder)


def nothing_on_gpus() -> None:
    """Where there are GPUs prepare() leaves torch and the import system as they are."""
    device.is_gpu = lambda: True
    before = dict(vars(torch.cuda)), dict(vars(torch.Tensor)), list(sys.meta_path), dict(os.environ)
    device.prepare()
    assert before == (dict(vars(torch.cuda)), dict(vars(torch.Tensor)), list(sys.meta_path), dict(os.environ))
    assert "megatron.core" not in sys.modules


def fork(case, *args, rank: int, log: Path) -> int:
    """Run `case` in a new process with its output in `log`; it exits with 0 or 1. Returns its process id."""
    if child := os.fork():
        return child
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 1
    try:
        case(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run_case(case, *args, nproc: int, folder: Path) -> str:
    """What the first process to fail has written; empty if none fails. The others are ended with it."""
    os.environ |= {
        "WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(device._free_port()),
    }
    logs = {
        fork(case, *args, rank=rank, log=folder / f"rank_{rank}.log"): folder / f"rank_{rank}.log"
        for rank in range(nproc)
    }
    running, error = set(logs), ""
    while running:
        child, status = os.waitpid(-1, 0)
        running.discard(child)
        if status and not error:
            error = logs[child].read_text() or f"status {status}"
            for other in running:
                os.kill(other, 9)
    return error


def main() -> None:
    folder = Path(tempfile.mkdtemp(dir=sys.argv[1]))
    write_model(folder)
    wrong = []
    for name in ["", *device.CPU_PATCHES]:
        started = time.perf_counter()
        error = run_case(without, name, folder, nproc=2, folder=folder)
        last = error.strip().splitlines()[-1] if error else "trained"
        print(
            f"without {name or 'leaving anything out'}: {last} ({time.perf_counter() - started:.1f} s)",
            flush=True,
        )
        if bool(error) != bool(name) or (error and not any(word in last for word in CUDA_ERRORS)):
            wrong.append(f"{name or 'all patches'}: {error or 'not needed: training works without it'}")
    if error := run_case(nothing_on_gpus, nproc=1, folder=folder):
        wrong.append(f"with GPUs: {error}")
    assert not wrong, "\n".join(wrong)
    print("every patch is needed")


if __name__ == "__main__":
    main()
