"""Random states of a process: saved, restored, or seeded from a seed and a step."""

import random
from typing import Any

import numpy
import torch

from parallel import megatron
from parallel.groups import ProcessGroups


def rng_state() -> dict:
    """Return all random states of this process, of types that `torch.load(weights_only=True)` reads."""
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": {name: state.clone() for name, state in _tracker().get_states().items()},
        "numpy": [kind, torch.from_numpy(numpy.asarray(keys).astype("int64")), *rest],
        "python": random.getstate(),
    }


def _tracker() -> Any:
    """Return Megatron-Core's tracker, which it declares as optional but always makes."""
    return megatron.get_cuda_rng_tracker()


def set_rng_state(state: dict) -> None:
    """Restore the state that `rng_state()` returned.

    Raises:
        RuntimeError: it is not such a state.
    """
    try:
        _set_rng_state(state)
    except Exception as error:  # torch, numpy and Python raise different exceptions
        raise RuntimeError(
            f"not the random states of a process: {type(error).__name__} {str(error)[:200]}"
        ) from None


def _set_rng_state(state: dict) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    _tracker().set_states(state["megatron"])
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    random.setstate(state["python"])


def seed_anew(groups: ProcessGroups, *, seed: int, step: int) -> None:
    """Seed the random states from the seed, the step and this rank's position in the layout.

    Tensor-parallel ranks have the same torch state outside tensor-parallel regions.
    """
    mixed = random.Random(f"{seed}/{step}").getrandbits(31)
    if groups.is_member:
        megatron.seed(groups, mixed)  # also seeds torch
    mine = random.Random(f"{mixed}/{groups.rank}").getrandbits(31)
    random.seed(mine)
    numpy.random.seed(mine)
    if not groups.is_member:
        torch.manual_seed(mine)
