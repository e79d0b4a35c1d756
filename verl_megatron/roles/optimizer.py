"""Set-up of training: data-parallel wrappers with gradient buffers, and the optimizer."""

from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig

from parallel import megatron
from parallel.groups import ProcessGroups
from parallel.layout import Layout
from verl_megatron.config import EngineConfig
from verl_megatron.roles.full_sharding import FullySharded, SteppedParameters


def gathers_late(config: EngineConfig, layout: Layout) -> bool:
    """Whether parameters stay sharded over data-parallel ranks after a step.

    The next forward pass then gathers them layer by layer (overlap_param_gather).
    """
    return config.sharding != "full" and config.distributed_optimizer and layout.dp * layout.cp > 1


def wrap_data_parallel(chunks: list[Any], groups: ProcessGroups, config: EngineConfig) -> list[Any]:
    """Wrap the model chunks for data parallelism, with gradient buffers; set the hooks of their schedule."""
    layout, model_config = groups.layout, chunks[0].config
    if config.sharding == "full":
        for chunk in chunks:
            chunk.prepare_training()
        model_config.finalize_model_grads_func = _hand_over_gradients
        return chunks
    overlap = layout.dp * layout.cp > 1
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.distributed_optimizer,
        overlap_grad_reduce=overlap,
        overlap_param_gather=gathers_late(config, layout),
    )
    for module in (module for chunk in chunks for module in chunk.modules()):
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True  # transformer-engine adds weight gradients to the buffer
    view = megatron.collection(groups)
    wrapped = [
        DistributedDataParallel(model_config, ddp_config, chunk, disable_bucketing=i > 0, pg_collection=view)
        for i, chunk in enumerate(chunks)
    ]
    if overlap:
        no_sync = [chunk.no_sync for chunk in wrapped]
        start = [chunk.start_grad_sync for chunk in wrapped]
        model_config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        model_config.grad_sync_func = start if len(start) > 1 else start[0]
    # No gradient scaling: the loss is divided by the global token count before the backward pass.
    model_config.finalize_model_grads_func = lambda chunks, num_tokens=None, **kwargs: finalize_model_grads(
        chunks, None, **kwargs
    )
    return wrapped


def _hand_over_gradients(chunks: list[FullySharded], num_tokens=None, **_) -> None:
    """Take the place of Megatron-Core's reductions: torch's FSDP has reduced the gradients."""
    for chunk in chunks:
        chunk.hand_over_gradients()


def make_optimizer(
    chunks: list[Any],
    groups: ProcessGroups,
    config: EngineConfig,
    *,
    dtype: torch.dtype,
    lr: float,
    value_head_lr: float | None = None,
) -> Any:
    """Build Megatron-Core's Adam for wrapped chunks. Collective over `groups.world`.

    Args:
        dtype: of the parameters.
        lr: peak learning rate.
        value_head_lr: that of a value head on the actor's trunk.
    """
    is_full = config.sharding == "full"
    if value_head_lr is not None:
        _mark_value_head(chunks)
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        min_lr=lr * config.min_lr_ratio,
        decoupled_lr=value_head_lr,
        decoupled_min_lr=None if value_head_lr is None else value_head_lr * config.min_lr_ratio,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_betas[0],
        adam_beta2=config.adam_betas[1],
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        # Fully sharded weights are float32, their own master weights.
        bf16=dtype == torch.bfloat16 and not is_full,
        params_dtype=torch.float32 if is_full else dtype,
        use_distributed_optimizer=config.distributed_optimizer and not is_full,
        overlap_param_gather=gathers_late(config, groups.layout),
    )
    if is_full:
        chunks = [SteppedParameters(chunk) for chunk in chunks]
    return megatron.build_optimizer(optimizer_config, chunks, groups, divides_weights=is_full)


def _mark_value_head(chunks: list[Any]) -> None:
    """Give Megatron-Core's `decoupled_lr`, which it has for embedding and output layer, to the value head."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.is_embedding_or_output_parameter = "value_head." in name
