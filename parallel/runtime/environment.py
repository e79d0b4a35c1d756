"""Environment variables that a run reads, and their valid values."""

import os
import re

from parallel.runtime.refusal import short_repr

MOST_RANKS = 1 << 17  # upper bound on the world size: more than any cluster starts, few enough to list
BRIDGE = "VERL_MEGATRON_BRIDGE"  # HOST:PORT where worlds of a run meet
# Variable: smallest and largest integer.
NUMBERS = {
    "WORLD_SIZE": (1, MOST_RANKS),
    "LOCAL_WORLD_SIZE": (1, MOST_RANKS),
    "RANK": (0, MOST_RANKS - 1),
    "LOCAL_RANK": (0, MOST_RANKS - 1),
    "MASTER_PORT": (1, 65535),
    "TORCHELASTIC_RESTART_COUNT": (0, 1_000_000),
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": (0, 1_000_000),  # s
}
GPU = r"(-?[0-9]{1,4}|GPU-[-0-9a-fA-F]+|MIG-[-/0-9a-zA-Z]+)"
# Variable: regular expression, and a description for the error message.
TEXTS = {
    "OMP_NUM_THREADS": (r"[1-9][0-9]{0,4}(,[1-9][0-9]{0,4})*", "a number of threads such as 4"),
    "GRACE_S": (
        r"(?=.*[1-9])[0-9]{1,7}(\.[0-9]{1,9})?",
        "greater than 0: seconds from SIGTERM to the end by force",
    ),
    "CUDA_VISIBLE_DEVICES": (rf"NoDevFiles|{GPU}(, *{GPU})*,?", "a list of GPUs such as 0,1"),
    "MASTER_ADDR": (r"[0-9A-Za-z_.:%\[\]-]{1,253}", "the name or address of a host"),
}


def check_environment() -> None:
    """Raise ValueError naming every variable with an invalid value; empty variables count as unset."""
    problems = []
    for name, (low, high) in NUMBERS.items():
        if (text := os.environ.get(name)) and not (
            re.fullmatch("[0-9]{1,7}", text) and low <= int(text) <= high
        ):
            problems.append(
                f"{name}={short_repr(text)} must be a whole number from {low} to {high}; set it so, or "
                "unset it"
            )
    for name, (pattern, meaning) in TEXTS.items():
        if (text := os.environ.get(name)) and not re.fullmatch(pattern, text):
            problems.append(f"{name}={short_repr(text)} must be {meaning}; set it so, or unset it")
    problems = problems or _contradictions()
    if problems:
        raise ValueError("; ".join(problems))


def _contradictions() -> list[str]:
    found = []
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if os.environ.get(rank) and os.environ.get(size) and int(os.environ[rank]) >= int(os.environ[size]):
            found.append(
                f"{rank}={os.environ[rank]} must be below {size}={os.environ[size]}; start the ranks by "
                "torchrun, which sets both"
            )
    return found


def check_world() -> None:
    """Raise ValueError if this process cannot join the world that its environment describes.

    Without this check it would wait for hours.
    """
    check_environment()
    size = os.environ.get("WORLD_SIZE") or "1"
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if size != "1" and missing:
        raise ValueError(
            f"WORLD_SIZE={size} without {', '.join(missing)}: this process cannot find the others; start the "
            "ranks by torchrun, or unset WORLD_SIZE to run alone"
        )
