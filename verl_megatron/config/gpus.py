"""The GPUs of this host by their names, without torch and without touching them."""

import os
import subprocess
from contextlib import suppress

from parallel.runtime.refusal import nearest, short_repr

# Machines of the planner, by a part of CUDA's names of their GPUs.
MACHINES = {"H200": "h200", "H100": "h100", "A100": "a100-80g", "B200": "b200"}
USUAL, ASKING_S = "h200", 20.0  # nvidia-smi takes seconds where the driver is not kept loaded


def check_machine(name: str) -> None:
    """Raise ValueError unless `name` is a machine of the planner's, or a .json file, which is read later."""
    names = list(MACHINES.values())
    written = "the .json file that verl-megatron benchmark calibrate wrote"
    if name.endswith(".json") and not os.path.isfile(name):
        raise ValueError(f"--gpu {short_repr(name)} does not exist or is no file; name {written}")
    if not name.endswith(".json") and name not in names:
        raise ValueError(
            f"--gpu {short_repr(name)} is not known{nearest(name, names)}; choose one of {', '.join(names)}, "
            f"or {written}"
        )


def machine_of(gpu: str) -> str | None:
    """Return the planner's machine of a GPU by CUDA's name of it; None if there is none."""
    return next((machine for part, machine in MACHINES.items() if part in gpu), None)


def machine_here() -> str:
    """Return the planner's machine of this host's GPUs; h200 without any, or if they are unknown."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=ASKING_S, check=True)
        return machine_of(found.stdout) or USUAL
    return USUAL
