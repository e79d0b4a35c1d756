"""The table of checks, and the run through them."""

from collections.abc import Callable, Iterable, Iterator

from verl_megatron.doctor.disk import check_disk
from verl_megatron.doctor.finding import Case, Finding, first_line
from verl_megatron.doctor.gpus import (
    check_cuda_ipc,
    check_gpus,
    check_links,
    check_shared_prompts,
    check_users,
)
from verl_megatron.doctor.limits import (
    check_locked_memory,
    check_memory,
    check_open_files,
    check_processes,
    check_ptrace,
    check_shared_memory,
)
from verl_megatron.doctor.nccl import check_nccl_environment
from verl_megatron.doctor.network import check_hostname, check_port
from verl_megatron.doctor.packages import (
    check_compiled,
    check_flash_attention,
    check_import,
    check_packages,
    check_python,
    check_report,
    check_transformer_engine,
)
from verl_megatron.doctor.recipe import check_recipe_fits

Check = Callable[[Case], Iterable[Finding]]

# Part of the report: its checks; a later one is worth reading where the earlier ones are well.
CHECKS: dict[str, tuple[Check, ...]] = {
    "Packages": (
        check_python,
        check_packages,
        check_compiled,
        check_import,
        check_transformer_engine,
        check_flash_attention,
        check_report,
    ),
    "GPUs": (check_gpus, check_users, check_links, check_cuda_ipc, check_shared_prompts),
    "Environment": (check_nccl_environment, check_hostname, check_port),
    "System": (
        check_memory,
        check_shared_memory,
        check_open_files,
        check_locked_memory,
        check_processes,
        check_ptrace,
        check_disk,
    ),
    "Recipe": (check_recipe_fits,),
}


def examine(case: Case) -> Iterator[tuple[str, Finding]]:
    """Run all checks; yield each finding with its part of the report, as soon as it is there."""
    for part, checks in CHECKS.items():
        for check in checks:
            yield from ((part, finding) for finding in findings_of(check, case))


def findings_of(check: Check, case: Case) -> Iterator[Finding]:
    """Run one check; one that fails itself is a warning, and the others go on."""
    try:
        yield from check(case)
    except Exception as error:  # whatever a machine may hold in store
        name = check.__name__.removeprefix("check_").replace("_", " ")
        yield Finding(
            check=name,
            status="warning",
            found=f"this check failed itself: {type(error).__name__}: {first_line(str(error))}",
            why="nothing is known of what it looks at",
            remedy="report it with the output of verl-megatron doctor --json",
        )
