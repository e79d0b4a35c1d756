"""The random states of a process, kept and put back, or begun anew from a seed and a step."""

import random

import numpy
import torch
import torch.distributed as dist

from parallel import megatron
from parallel.groups import ProcessGroups


def rng_state() -> dict:
    """All random states of this process, in what `torch.load(weights_only=True)` reads."""
    kind, keys, *rest = numpy.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": {
            name: state.clone() for name, state in megatron.get_cuda_rng_tracker().get_states().items()
        },
        "numpy": [kind, torch.from_numpy(keys.astype("int64")), *rest],
        "python": random.getstate(),
    }


def set_rng_state(state: dict) -> None:
    """Continue from `rng_state()`.

    Raises:
        RuntimeError: it is something else.
    """
    try:
        _set_rng_state(state)
    except Exception as error:  # torch, numpy and Python tell of it with any
        raise RuntimeError(
            f"not the random states of a process: {type(error).__name__} {str(error)[:200]}"
        ) from None


def _set_rng_state(state: dict) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    megatron.get_cuda_rng_tracker().set_states(state["megatron"])
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    random.setstate(state["python"])


def seed_anew(groups: ProcessGroups, *, seed: int, step: int) -> None:
    """Random states that depend on the seed, the step and this rank's place; tensor-parallel ranks agree outside their regions."""
    mixed = random.Random(f"{seed}/{step}").getrandbits(31)
    if groups.is_member:
        megatron.seed(groups, mixed)  # seeds random numbers of torch, too
    mine = random.Random(f"{mixed}/{dist.get_rank()}").getrandbits(31)
    random.seed(mine)
    numpy.random.seed(mine)
    if not groups.is_member:
        torch.manual_seed(mine)
