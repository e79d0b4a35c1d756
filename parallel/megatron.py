"""Megatron-Core with explicit process groups: its group collection, its globals, pipeline and optimizer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from parallel import device
from parallel.groups import ProcessGroups

device.prepare()

from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,  # noqa: F401
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer import TransformerConfig


def collection(groups: ProcessGroups) -> ProcessGroupCollection:
    """Return a member's groups as Megatron's collection.

    For dense models: every expert group is a single rank or its dense counterpart.
    """
    view: Any = ProcessGroupCollection()
    for name in ("tp", "cp", "dp", "pp", "dp_cp", "tp_cp", "mp", "tp_dp_cp"):
        setattr(view, name, getattr(groups, name))
    view.embd, view.pos_embd = groups.embedding, groups.alone
    view.intra_dp_cp, view.intra_dist_opt = groups.dp_cp, groups.members.device_group
    view.ep = view.expt_tp = view.tp_ep = groups.alone
    view.tp_ep_pp = groups.pp
    view.expt_dp = view.intra_expt_dp = groups.tp_dp_cp
    return view


# parallel_state's variable -> the corresponding field of the collection
_GLOBALS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_EMBEDDING_GROUP": "embd",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp_cp",  # 0.19
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
}


@contextmanager
def megatron_globals(groups: ProcessGroups) -> Iterator[None]:
    """Set Megatron's `parallel_state` globals to these groups within the block; restore them afterwards.

    Needed by attention with fewer key/value heads than tensor-parallel ranks (0.16) and by scratch memory
    that is looked up globally. `parallel_state` itself is never initialised.
    """
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    state, view = parallel_state.__dict__, collection(groups)
    values = {name: getattr(view, field) for name, field in _GLOBALS.items() if name in state}
    values["_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"] = dist.get_process_group_ranks(groups.tp)
    values["_PIPELINE_GLOBAL_RANKS"] = dist.get_process_group_ranks(groups.pp)
    before = {name: state[name] for name in values}
    state.update(values)
    try:
        yield
    finally:
        state.update(before)


class Pipeline(P2PCommunicator):
    """Megatron's messages between pipeline stages, with sequence lengths that differ between micro-batches.

    Megatron sends the shape before each message. A process then waits until its neighbour has reached that
    message, and so on through the pipeline. No process gets ahead of its GPU, which idles while the next
    kernels are queued. Here every stage computes the shapes itself: it has all micro-batches, and messages
    arrive in the order of the schedule.
    """

    def __init__(self, groups: ProcessGroups, config: TransformerConfig, lengths: Sequence[int]):
        """
        Args:
            lengths: tokens of each micro-batch in this rank's activations between stages.
        """
        super().__init__(pp_group=groups.pp, config=config)
        passes = get_schedule_table(
            len(lengths),
            config.virtual_pipeline_model_parallel_size or 1,
            config.microbatch_group_size_per_vp_stage,
        )
        shapes = [[length, 1, config.hidden_size] for length in lengths]
        # Neither the first chunk of the first stage nor, in the backward pass, the last chunk of the last
        # stage receives anything: the table numbers both as chunk 0.
        self._from_previous = iter(
            [shapes[micro] for micro, chunk in passes if chunk or not groups.is_first_stage]
        )
        self._from_next = iter(
            [shapes[micro] for micro, chunk in passes if chunk or not groups.is_last_stage]
        )

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[list[int] | None, list[int] | None]:
        """Return the shapes [3] of the tensors received from the previous and the next stage."""
        return next(self._from_previous) if recv_prev else None, next(self._from_next) if recv_next else None


def seed(groups: ProcessGroups, value: int) -> None:
    """Seed Megatron's random states.

    Tensor-parallel ranks have different states inside tensor-parallel regions and equal ones outside.
    """
    place = groups.coordinates
    model_parallel_cuda_manual_seed(
        value + 100 * place.pp, tp_rank=place.tp, ep_rank=0, etp_rank=0, force_reset_rng=True
    )


def build_optimizer(
    config: OptimizerConfig, chunks: list, groups: ProcessGroups, *, divides_weights: bool = False
) -> MegatronOptimizer | None:
    """Build Megatron's optimizer of a member's model chunks.

    Every rank of `groups.world` calls this; non-members get None. Megatron compares parameter groups over
    torch's default group meanwhile, once for dense and once for expert parameters.

    Args:
        divides_weights: data-parallel ranks step on different parts of the weights, so that the norm of the
            gradients is summed over all ranks of the layout.
    """
    if not groups.is_member:
        for _ in range(2):
            groups.world.all_gather_object([])
        return None
    view: Any = collection(groups)
    if divides_weights:
        view.mp = groups.members.device_group
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False, pg_collection=view)
