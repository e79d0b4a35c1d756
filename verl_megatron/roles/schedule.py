"""Megatron-Core's pipeline schedules over packed micro-batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from parallel import device, megatron
from parallel.groups import ProcessGroups
from parallel.layout import Layout
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.micro_batch import MicroBatch, TokenSplit, pack, to_device
from verl_megatron.data.shared_prompts import pack_shared
from verl_megatron.models.build import Compute, drop_fp8_weights
from verl_megatron.models.heads import trunk
from verl_megatron.roles.full_sharding import FullySharded


class ScheduledModel(Protocol):
    """The interface of a model to the pipeline schedule."""

    layout: Layout
    groups: ProcessGroups
    compute: Compute
    chunks: list[Any]  # GPTModel, wrapped in DDP for training
    model_config: TransformerConfig

    def progress(self) -> None: ...

    def outputs(self, output: Tensor, micro: MicroBatch, model: Any) -> dict[str, Tensor]:
        """Compute head outputs from the last chunk's output."""
        ...


def pack_all(
    engine: ScheduledModel,
    batch: RolloutBatch,
    micro_batches: Sequence[list[int]],
    *,
    fields: tuple[str, ...] = (),
    last_token: bool = False,
) -> list[MicroBatch]:
    """Pack micro-batches for the layout of `engine` and copy them to the device.

    Args:
        micro_batches: sample indices into `batch` of each micro-batch; equal on all ranks of one
            data-parallel index.
        fields, last_token: as in `pack`.
    """
    split = TokenSplit(
        cp=engine.layout.cp,
        cp_rank=engine.groups.coordinates.cp,
        multiple_of=engine.compute.token_multiple * _sequence_shards(engine.layout),
    )
    packer = pack_shared if engine.compute.shared_prompts else pack
    return to_device(
        [
            packer(batch, samples, fields=fields, last_token=last_token, split=split)
            for samples in micro_batches
        ]
    )


def _sequence_shards(layout: Layout) -> int:
    """Return the number of sequence-parallel shards of the activations between pipeline stages."""
    return layout.tp if layout.sequence_parallel else 1


def run_schedule(
    engines: Sequence[ScheduledModel],
    packed: Sequence[MicroBatch],
    on_last_stage: Callable,
    *,
    forward_only: bool,
) -> list:
    """Run a pipeline schedule over micro-batches, packed by `pack_all`.

    Collective over the layout: a rank without micro-batches takes part with passes over padding.

    Args:
        engines: models on the same groups. They alternate on each micro-batch, so that the pipeline fills and
            drains once for all of them. Training takes a single engine.
        on_last_stage: called as `on_last_stage(engine, outputs, micro_batch)`.

    Returns:
        The results of `on_last_stage` for each micro-batch and engine, on the last stage; empty on others.
    """
    assert forward_only or len(engines) == 1, "one model is trained at a time"
    first = engines[0]
    layout, groups = first.layout, first.groups
    idle = _idle_passes(first, len(packed))
    wanted = len(packed) * len(engines)
    packed = [*packed, *idle]
    work = [(engine, micro) for micro in packed for engine in engines]
    iterators = [iter(work) for _ in first.chunks]
    pipeline = {}
    if layout.pp > 1:
        shards = _sequence_shards(layout)
        pipeline["p2p_communicator"] = megatron.Pipeline(
            groups, first.model_config, [micro.tokens.size(1) // shards for _, micro in work]
        )
    run = get_forward_backward_func(pp_size=layout.pp, vp_size=layout.vpp if layout.vpp > 1 else None)
    with megatron.megatron_globals(groups):
        answers = run(
            forward_step_func=partial(_forward_step, first, _Answer(on_last_stage, idle)),
            data_iterator=iterators if layout.vpp > 1 else iterators[0],
            model=first.chunks if layout.vpp > 1 else first.chunks[0],
            num_microbatches=len(work),
            seq_length=packed[0].tokens.size(1),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            pg_collection=megatron.collection(groups),
            **pipeline,
        )
    for chunk in (chunk for engine in engines for chunk in engine.chunks):
        trunk(chunk).set_input_tensor(None)  # free the last received activations and their gradient
        drop_fp8_weights(chunk)  # Megatron rebuilds them in each pass for the first engine only
        if isinstance(chunk, FullySharded):
            chunk.reshard()
    return answers[:wanted]


def _idle_passes(engine: ScheduledModel, count: int) -> list[MicroBatch]:
    """Return micro-batches of padding alone that follow this rank's `count`, for its part in collectives.

    The first pass after a step gathers weights over the data-parallel ranks, and a backward pass reduces
    gradients: every rank makes one at least. Fully sharded weights are gathered in each pass, so that all
    ranks make as many.
    """
    layout = engine.layout
    passes = max(count, layout.pp if layout.vpp > 1 else 1)  # interleaved pipelines take a multiple of pp
    if isinstance(engine.chunks[0], FullySharded):
        most = torch.tensor(passes, device=device.device())
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=engine.groups.dp)
        passes = int(most)
    nothing = RolloutBatch.from_lists([], [], [])
    return pack_all(engine, nothing, [[]] * (passes - count))


@dataclass(frozen=True)
class _Answer:
    """What `run_schedule` calls with the outputs of a micro-batch; those of idle passes have no gradient."""

    on_last_stage: Callable
    idle: Sequence[MicroBatch]

    def __call__(self, engine: ScheduledModel, outputs: dict[str, Tensor], micro: MicroBatch):
        if not any(micro is one for one in self.idle):
            return self.on_last_stage(engine, outputs, micro)
        total = 0.0 * sum(value.sum() for value in outputs.values())
        return total, torch.zeros((), dtype=torch.int, device=device.device()), None


def _forward_step(
    first: ScheduledModel,
    on_last_stage: Callable,
    iterator: Iterator[tuple[ScheduledModel, MicroBatch]],
    chunk: torch.nn.Module,
):
    """Run a micro-batch through a chunk; return its output and the loss function.

    Megatron sets the received activations on the `chunk` of the first engine; other engines take them there.
    """
    engine, micro = next(iterator)
    engine.progress()
    if engine is not first:
        received, chunk = trunk(chunk).decoder.input_tensor, engine.chunks[first.chunks.index(chunk)]
        trunk(chunk).set_input_tensor(received)
    params = _shared_params(micro) if engine.compute.shared_prompts else _packed_params(micro)
    output = chunk(micro.tokens, micro.positions, None, packed_seq_params=params)

    def finish(output, non_loss_data=False):
        return on_last_stage(engine, engine.outputs(output, micro, chunk), micro)

    return output, finish


def _packed_params(micro: MicroBatch) -> PackedSeqParams:
    longest = max(micro.lengths)
    params: Any = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=micro.cu_seqlens,
        cu_seqlens_kv=micro.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    params.lengths = micro.lengths
    return params


def _shared_params(micro: MicroBatch) -> PackedSeqParams:
    """Parameters of `SharedPromptAttention` and `TokenRotaryEmbedding`.

    To Megatron all packed tokens are one sequence, so that it rotates each token by its own embedding.
    """
    total = micro.tokens.size(1)
    ends = micro.cu_seqlens[:: len(micro.lengths)].contiguous()
    params: Any = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=total, max_seqlen_kv=total
    )
    params.lengths, params.cu_sequences, params.shared = micro.lengths, micro.cu_seqlens, micro.shared
    params.positions = micro.positions.squeeze(0)
    return params
