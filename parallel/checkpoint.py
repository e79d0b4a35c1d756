"""Training state on disk: one file a rank and a manifest; a checkpoint is complete or it does not exist.

Resuming takes the same layouts and number of ranks and is exact to the bit.
"""

import json
import os
import random
import shutil
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from parallel.megatron import get_cuda_rng_tracker

MANIFEST, PARTIAL = "manifest.json", ".partial"


def newest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in `folder`."""
    found = {int(path.parent.name.removeprefix("step_")): path.parent for path in folder.glob(f"step_*/{MANIFEST}") if path.parent.suffix != PARTIAL}
    return found[max(found)] if found else None


def save(folder: Path, *, step: int, state: dict, manifest: dict) -> Path:
    """Write this rank's `state` (tensors, numbers, strings and containers of them) and, once all ranks have, the manifest."""
    path, scratch = folder / f"step_{step}", folder / f"step_{step}{PARTIAL}"
    if dist.get_rank() == 0:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    dist.barrier()
    torch.save(state, scratch / f"rank_{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        (scratch / MANIFEST).write_text(json.dumps({"step": step, "world_size": dist.get_world_size(), **manifest}, indent=1))
        shutil.rmtree(path, ignore_errors=True)
        os.replace(scratch, path)
    dist.barrier()
    return path


def load(path: Path, manifest: dict) -> tuple[int, dict]:
    """The step of a checkpoint and this rank's state.

    Raises:
        ValueError: it was saved with another number of ranks or another value of an entry of `manifest`.
    """
    saved = json.loads((path / MANIFEST).read_text())
    for name, value in {"world_size": dist.get_world_size(), **manifest}.items():
        if saved.get(name) != value:
            raise ValueError(f"checkpoint {path} was saved with {name}={saved.get(name)}, this run has {value}; resume with the same, or set run.resume=false")
    return saved["step"], torch.load(path / f"rank_{dist.get_rank()}.pt", map_location="cpu", weights_only=True)


def rng_state() -> dict:
    """All random states of this process."""
    kind, keys, *rest = numpy.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()},
        "numpy": [kind, torch.from_numpy(keys.astype("int64")), *rest],
        "python": random.getstate(),
    }


def set_rng_state(state: dict) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["megatron"])
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    random.setstate(state["python"])


def optimizer_state(optimizer) -> list[list[dict]]:
    """What each torch optimizer under Megatron's holds: by group its step, and of each parameter the value it keeps and its moments."""
    return [
        [
            {
                "step": {name: value for name, value in group.items() if name == "step"},  # rates and decays come from this run's settings
                "parameters": [{"value": p.data.cpu(), "moments": _moved(inner.state.get(p, {}), "cpu")} for p in group["params"]],
            }
            for group in inner.param_groups
        ]
        for inner in _inner(optimizer)
    ]


def set_optimizer_state(optimizer, state: list[list[dict]]) -> None:
    for inner, groups in zip(_inner(optimizer), state, strict=True):
        for group, saved in zip(inner.param_groups, groups, strict=True):
            group.update(saved["step"])
            for p, kept in zip(group["params"], saved["parameters"], strict=True):
                p.data.copy_(kept["value"])
                inner.state[p] = _moved(kept["moments"], p.device)


def _inner(optimizer) -> list[torch.optim.Optimizer]:
    return [chained.optimizer for chained in getattr(optimizer, "chained_optimizers", [optimizer])]


def _moved(moments: dict, device) -> dict:
    """Copies; AdamW keeps its step on the CPU wherever the parameter is."""
    return {name: value.to("cpu" if name == "step" else device, copy=True) if isinstance(value, torch.Tensor) else value for name, value in moments.items()}
