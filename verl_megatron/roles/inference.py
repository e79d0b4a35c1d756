"""Forward passes: per-token results of one or several models on the same ranks.

Letters: B samples on this rank, T token positions.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import device
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.micro_batch import MicroBatch
from verl_megatron.models.build import frozen
from verl_megatron.roles.heads import Outputs
from verl_megatron.roles.schedule import ScheduledModel, pack_all, run_schedule


def infer_models(
    engines: Sequence[ScheduledModel],
    batch: RolloutBatch,
    micro_batches: Sequence[list[int]],
    names: Sequence[str],
    *,
    last_token: bool = False,
) -> list[dict[str, Tensor] | None]:
    """Run `Engine.infer` of several models under the same layout, in one pass over the samples."""
    groups = engines[0].groups
    if not groups.is_member:
        return [None] * len(engines)

    def on_last_stage(engine: ScheduledModel, outputs: Outputs, micro: MicroBatch):
        return engine, micro, outputs

    with ExitStack() as frozen_models:
        for engine in engines:
            frozen_models.enter_context(frozen(engine.chunks))
        # Some of the models may compute in fp8, which needs more padding.
        widest = max(engines, key=lambda engine: engine.compute.token_multiple)
        packed = pack_all(widest, batch, micro_batches, last_token=last_token)
        answers = run_schedule(engines, packed, on_last_stage, forward_only=True)
    if not groups.is_last_stage:
        return [None] * len(engines)
    results = []
    for engine in engines:
        own = [(micro, outputs) for owner, micro, outputs in answers if owner is engine]
        given = own[0][1] if own else names
        results.append(filled(engine, batch, own, [name for name in names if name in given]))
    return results


def filled(
    engine: ScheduledModel,
    batch: RolloutBatch,
    answers: Sequence[tuple[MicroBatch, Outputs]],
    names: Sequence[str],
) -> dict[str, Tensor]:
    """Scatter outputs of micro-batches to their samples: [B, T] float32 by name, 0 elsewhere, on the CPU.

    Called on the last stage; collective over its context-parallel ranks.
    """
    scattered = {name: torch.zeros(batch.generated_ids.shape, device=device.device()) for name in names}
    for micro, outputs in answers:
        for name in names:
            scattered[name][micro.sample, micro.offset] = outputs[name]
    if engine.layout.cp > 1:
        for value in scattered.values():
            dist.all_reduce(value, group=engine.groups.cp)
    return {name: value.cpu() for name, value in scattered.items()}
