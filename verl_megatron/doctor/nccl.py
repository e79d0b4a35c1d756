"""Checks of environment variables: NCCL's and PyTorch's, those that are set and those known to hurt."""

import os
from collections.abc import Iterator
from pathlib import Path

from parallel.runtime.environment import check_environment
from parallel.runtime.refusal import short_repr
from verl_megatron.checks.problems import problem_of
from verl_megatron.doctor.finding import Case, Finding

PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_", "PYTORCH_", "TORCH_DISTRIBUTED_", "VLLM_", "UCX_")
INTERFACES = Path("/sys/class/net")
# Variable: a value that hurts ("*": any), and why.
HARMFUL = {
    "NCCL_P2P_DISABLE": ("1", "GPUs of a host no longer talk over NVLink"),
    "NCCL_SHM_DISABLE": ("1", "ranks of a host talk over sockets where GPUs have no direct link"),
    "NCCL_IB_DISABLE": ("1", "hosts talk over TCP, also where there is InfiniBand"),
    "NCCL_NET_GDR_LEVEL": ("0", "InfiniBand goes through host memory"),
    "NCCL_ALGO": ("*", "one algorithm is used for every size, which is seldom the best"),
    "NCCL_PROTO": ("*", "one protocol is used for every size; LL alone is slow for weights"),
    "NCCL_MAX_NCHANNELS": ("1", "one channel cannot fill the links"),
    "NCCL_BLOCKING_WAIT": ("1", "collectives block the CPU, which then launches nothing ahead"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "collectives block the CPU, which then launches nothing ahead"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "a failed collective hangs instead of ending the run"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked by another one"),
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel waits for the one before"),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "kernels of several communicators can block each other"),
    "NCCL_DEBUG": ("TRACE", "every call is logged"),
}
EXPANDABLE = "expandable_segments:true"


def check_nccl_environment(case: Case) -> Iterator[Finding]:
    """Which variables are set, and which of them are known to hurt."""
    present = {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
    shown = ", ".join(f"{name}={short_repr(value, limit=60)[1:-1]}" for name, value in present.items())
    harmful = {
        name: why
        for name, (value, why) in HARMFUL.items()
        if present.get(name, "").upper() == value or (value == "*" and present.get(name))
    }
    if EXPANDABLE in present.get("PYTORCH_CUDA_ALLOC_CONF", "").lower():
        harmful["PYTORCH_CUDA_ALLOC_CONF"] = (
            "expandable segments cannot be shared, so weights are sent as messages"
        )
    for name, why in harmful.items():
        yield Finding(
            check="environment",
            status="warning",
            found=f"{name}={short_repr(present[name], limit=60)[1:-1]}",
            why=why,
            remedy=f"unset {name}, unless it is there to find a fault",
        )
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if (value := present.get(name)) and (missing := _absent_interface(value)):
            yield Finding(
                check="environment",
                status="problem",
                found=f"{name}={short_repr(value, limit=60)[1:-1]}, and no interface begins with {missing}",
                why="ranks find no address to connect to",
                remedy=f"set it to one of {', '.join(_interfaces())}, or unset it",
            )
    if problems := problem_of(check_environment):
        yield Finding(
            check="environment",
            status="problem",
            found=problems[0],
            why="a run is refused with this message",
            remedy="set it to what the message says, or unset it",
        )
    if not harmful:
        yield Finding(
            check="environment", status="ok", found=shown or "no variable of NCCL, CUDA or PyTorch is set"
        )


def _absent_interface(value: str) -> str:
    """Return the first name of a list that fits no interface; empty if all fit or are exclusions."""
    if value.startswith("^"):
        return ""
    exact, names = value.startswith("="), value.lstrip("=").split(",")
    known = _interfaces()
    for name in names:
        fits = name in known if exact else any(interface.startswith(name) for interface in known)
        if known and not fits:
            return short_repr(name, limit=60)
    return ""


def _interfaces() -> list[str]:
    try:
        return sorted(path.name for path in INTERFACES.iterdir())
    except OSError:
        return []
