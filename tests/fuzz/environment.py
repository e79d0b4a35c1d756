"""Variables of the environment with nonsense in them, in right runs and in refused ones."""

import random
from functools import partial

from tests.fuzz.case import EITHER, REFUSED, Case, Mutation
from tests.fuzz.job import Job

NAMES = (
    *(
        "RANK",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GRACE_S",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        "NODE_RANK",
        "GROUP_RANK",
    ),
    *(
        "HOME",
        "TMPDIR",
        "PATH",
        "PYTHONPATH",
        "CUDA_VISIBLE_DEVICES",
        "VLLM_CPU_KVCACHE_SPACE",
        "OMP_NUM_THREADS",
        "HYDRA_FULL_ERROR",
        "LANG",
        "TORCH_COMPILE_DISABLE",
    ),
)
VALUES = (
    "",
    " ",
    "abc",
    "-1",
    "1e9",
    "9" * 40,
    "ü",
    "/no/such/folder",
    "\udcff",
    "1,2",
    "null",
    "0.5",
    "$HOME",
    "x" * 5000,
    None,
)


def mutations() -> list[Mutation]:
    return [
        partial(mutation, name=name, value=value)
        for name in NAMES
        for value in VALUES
        for mutation in (beside, beside_an_error)
    ]


def beside(job: Job, rng: random.Random, *, name: str, value: str | None) -> Case:
    """A dry run needs none of these: it may refuse what is no value of the variable, and names it then."""
    return Case(name=f"{name}={str(value)[:40]!r}", expected=EITHER, act=job.dry_run(env={name: value}))


def beside_an_error(job: Job, rng: random.Random, *, name: str, value: str | None) -> Case:
    """The error is said, though the variable is nonsense."""
    return Case(
        name=f"{name}={str(value)[:40]!r} and run.seed=abc",
        expected=REFUSED,
        names=(("run.seed", name),),
        act=job.dry_run("run.seed=abc", env={name: value}),
    )
