"""Predicted time of weight sync between training and rollout, and the bytes that it moves."""

from verl_megatron.planner.case import Case, PlannedRole
from verl_megatron.planner.machine import Machine
from verl_megatron.planner.memory import static_bytes
from verl_megatron.planner.serving import own_rollout_bytes


def moved_bytes(case: Case) -> float:
    """Bytes of actor weights that a rank receives: vLLM's shard minus its overlap with Megatron's shard.

    With t tensor-parallel ranks and p pipeline stages in training and t_g tensor-parallel ranks in vLLM, the
    share of the weights is (t·p - t_g) / (t_g·t·p) if t >= t_g, else (1/t_g)(1 - 1/p).
    """
    layout, tp = case.actor.layout, case.config.rollout.tp
    total = sum(case.actor.elements) * layout.tp * case.rollout_element_bytes
    if case.world_size > len(layout.ranks):
        return total / tp
    if layout.tp >= tp:
        return total * (layout.tp * layout.pp - tp) / (tp * layout.tp * layout.pp)
    return total / tp * (1 - 1 / layout.pp)


def reshard_seconds(case: Case, machine: Machine) -> float:
    """Seconds to map memory for vLLM's weights and KV cache and to transfer the weights.

    The transfer counts twice where memory is permuted in place.
    """
    moved = moved_bytes(case)
    copied = own_rollout_bytes(case, 0) if case.config.reshard.mode != "swap" else moved
    moving = (moved / _rate(case, machine) + 2 * copied / machine.copy_rate) * (
        2 if case.config.reshard.mode == "swap" else 1
    )
    share = (
        case.config.rollout.gpu_memory_utilization * machine.gpu_bytes if case.config.rollout.sleep else 0.0
    )
    return moving + share / machine.map_rate + leaving_seconds(case, machine, case.actor)


def return_seconds(case: Case, machine: Machine) -> float:
    """Seconds until vLLM's memory is freed and, with `swap`, Megatron's weights are back.

    Offloaded state returns concurrently with the next phases.
    """
    share = (
        case.config.rollout.gpu_memory_utilization * machine.gpu_bytes if case.config.rollout.sleep else 0.0
    )
    back = 2 * moved_bytes(case) / _rate(case, machine) if case.config.reshard.mode == "swap" else 0.0
    return share / machine.map_rate + back


def _rate(case: Case, machine: Machine) -> float:
    return machine.other_host_rate if case.resharding_crosses_hosts else machine.same_host_rate


def leaving_seconds(case: Case, machine: Machine, role: PlannedRole) -> float:
    """Seconds until a model's optimizer state is offloaded to host memory.

    The next user of the GPU memory waits for it: vLLM's KV cache, or another model's state.
    """
    if case.config.reshard.offload not in ("optimizer", "all"):
        return 0.0
    return (
        max(static_bytes(case, role, stage).optimizer for stage in range(role.layout.pp))
        / machine.pinned_rate
    )
