"""Predicted time of weight sync between training and rollout, and the bytes that it moves."""

from verl_megatron.config.rollout import OPTIMIZER_LEAVES
from verl_megatron.planner.machine import Machine
from verl_megatron.planner.planned_run import PlannedRole, PlannedRun
from verl_megatron.planner.rollout.serving import arriving_bytes, own_rollout_bytes, serving_bytes
from verl_megatron.planner.static import most_optimizer_bytes


def moved_bytes(run: PlannedRun) -> float:
    """Bytes of actor weights that a rank receives: vLLM's shard minus its overlap with Megatron's shard.

    With t tensor-parallel ranks and p pipeline stages in training and t_g tensor-parallel ranks in vLLM, the
    share of the weights is (t·p - t_g) / (t_g·t·p) if t >= t_g, else (1/t_g)(1 - 1/p). Fully sharded over d
    data-parallel ranks it is (1/t_g)(1 - 1/d).
    """
    layout, tp = run.actor.layout, run.config.rollout.tp
    total = sum(run.actor.elements) * layout.tp * run.rollout_element_bytes
    if run.gpus > len(layout.ranks):
        return total / tp
    if run.is_fully_sharded:
        return total / tp * (1 - 1 / layout.dp)
    if layout.tp >= tp:
        return total * (layout.tp * layout.pp - tp) / (tp * layout.tp * layout.pp)
    return total / tp * (1 - 1 / layout.pp)


def reshard_seconds(run: PlannedRun, machine: Machine) -> float:
    """Seconds to map memory for vLLM's weights and KV cache and to transfer the weights.

    The transfer counts twice where memory is permuted in place.
    """
    moved = moved_bytes(run)
    copied = own_rollout_bytes(run, 0) if run.config.reshard.mode != "swap" else moved
    copied += run.fp8_saved_bytes  # into staging memory
    moving = (moved / _rate(run, machine) + 2 * copied / machine.copy_rate) * (
        2 if run.config.reshard.mode == "swap" else 1
    )
    if run.fp8_saved_bytes:
        moving += adopt_seconds(run, machine)
    return moving + _mapped_bytes(run, machine) / machine.map_rate + leaving_seconds(run, machine, run.actor)


def publish_seconds(run: PlannedRun, machine: Machine) -> float:
    """Seconds of the snapshot that leaves for a rollout world while training goes on."""
    return 2 * max(map(run.snapshot_bytes, range(run.actor.layout.pp))) / machine.copy_rate


def arrival_seconds(run: PlannedRun, machine: Machine) -> float:
    """Seconds from the snapshot until a rollout world has the weights in its back buffer."""
    return moved_bytes(run) / _rate(run, machine)


def adopt_seconds(run: PlannedRun, machine: Machine) -> float:
    """Seconds in which a rollout world copies the weights out of its back buffer, or quantizes them."""
    return (arriving_bytes(run) + own_rollout_bytes(run, None)) / machine.copy_rate


def return_seconds(run: PlannedRun, machine: Machine) -> float:
    """Seconds until vLLM's memory is freed and, with `swap`, Megatron's weights are back.

    Offloaded state returns concurrently with the next phases.
    """
    back = 2 * moved_bytes(run) / _rate(run, machine) if run.config.reshard.mode == "swap" else 0.0
    return _mapped_bytes(run, machine) / machine.map_rate + back


def _mapped_bytes(run: PlannedRun, machine: Machine) -> float:
    """Bytes of vLLM on a rank that are mapped for a rollout and unmapped after it."""
    if not run.config.rollout.sleep:
        return 0.0
    return sum(serving_bytes(run.longest, machine, own_rollout_bytes(run, 0)).values())


def _rate(run: PlannedRun, machine: Machine) -> float:
    return machine.other_host_rate if run.resharding_crosses_hosts else machine.same_host_rate


def leaving_seconds(run: PlannedRun, machine: Machine, role: PlannedRole) -> float:
    """Seconds until a model's optimizer state is offloaded to host memory.

    The next user of the GPU memory waits for it: vLLM's KV cache, or another model's state.
    """
    if run.config.reshard.offload not in OPTIMIZER_LEAVES or run.steps_only:
        return 0.0
    return most_optimizer_bytes(run, role) / machine.pinned_rate
