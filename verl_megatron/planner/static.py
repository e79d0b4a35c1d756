"""Predicted bytes that a model keeps on a rank for the whole run.

A trained model of n parameters on a rank has 2n of weights, 4n of gradients (float32,
DistributedDataParallel's buffers) and 12n of optimizer state (master weights and two moments, float32). With
the distributed optimizer the state is divided by dp·cp. In float32 the weights are 4n and serve as their own
master weights. Frozen models have weights only, which take one byte each in layers with weights in fp8.
engine.sharding=full divides all by dp: 4n of weights, which are the master weights, 4n of gradients and 8n of
moments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.weights.architecture import Architecture
from parallel.weights.rules import Head
from verl_megatron.config import TrainerConfig
from verl_megatron.planner.machine import Machine
from verl_megatron.planner.planned_run import (
    ELEMENT_BYTES,
    PlannedRole,
    PlannedRun,
    part_elements,
    splits,
)


@dataclass(frozen=True, slots=True)
class StaticBytes:
    """Bytes that a model keeps on a rank for the whole run."""

    weights: float
    gradients: float = 0.0
    masters: float = 0.0
    moments: float = 0.0

    @property
    def optimizer(self) -> float:
        return self.masters + self.moments


def static_bytes(run: PlannedRun, role: PlannedRole, stage: int) -> StaticBytes:
    """Bytes that `role` keeps on a rank of pipeline stage `stage`."""
    count, mixed = role.elements[stage], run.element_bytes == 2
    count /= role.layout.dp if run.is_fully_sharded else 1
    if not role.trainable:
        saved = role.layers[stage] * part_elements(role.arch, role.layout.tp).layer * role.fp8_weights
        return StaticBytes(count * run.element_bytes - saved)
    if run.is_fully_sharded:
        return StaticBytes(4 * count, 4 * count, 0.0, 8 * count)
    replicas = role.layout.dp * role.layout.cp if run.config.engine.distributed_optimizer else 1
    return StaticBytes(
        count * run.element_bytes, 4 * count, 4 * count * mixed / replicas, 8 * count / replicas
    )


def most_optimizer_bytes(run: PlannedRun, role: PlannedRole) -> float:
    """Bytes of a model's optimizer state on the rank with the most."""
    return max(static_bytes(run, role, stage).optimizer for stage in range(role.layout.pp))


def smallest_tp(
    arch: Architecture,
    head: Head,
    sizes: Sequence[int],
    base: TrainerConfig,
    machine: Machine,
    *,
    share: float,
) -> int:
    """Choose the least of `sizes` under which a model takes at most a share of a GPU, or the largest.

    Sizes that do not split the model are left out. Full sharding divides weights among dp ranks alone.
    """
    if base.engine.sharding == "full":
        return 1
    sizes = [size for size in sizes if splits(part_elements, arch, size, head)]
    for tp in sizes:
        parts = part_elements(arch, tp, head)
        elements = parts.embedding + arch.num_layers * parts.layer + parts.output
        if ELEMENT_BYTES[base.engine.dtype] * elements <= share * machine.gpu_bytes:
            return tp
    return sizes[-1]
