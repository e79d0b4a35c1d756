"""Numerics of a run's models on this machine, resolved from the settings."""

import torch

from parallel import device
from verl_megatron.config import EngineConfig, TrainerConfig
from verl_megatron.models.build import Compute, choose_spec


def compute_of(config: EngineConfig, *, fp8_weights_by: str = "") -> Compute:
    """Resolve `auto` settings for this machine: bfloat16 and transformer-engine on GPUs, float32 on CPUs.

    Args:
        fp8_weights_by: as of `ModelSpec`.

    Raises:
        ValueError: fp8 without a GPU that supports it, or without transformer-engine.
    """
    fp8_by = fp8_weights_by or "engine.dtype" * (config.dtype == "fp8")
    dtype = torch.bfloat16
    if not fp8_by and (config.dtype == "float32" or (config.dtype == "auto" and not device.is_gpu())):
        dtype = torch.float32
    compute = Compute(
        dtype=dtype,
        spec=choose_spec(config.transformer_impl),
        fp8=bool(fp8_by),
        fp8_weights=bool(fp8_weights_by),
        recompute=config.recompute,
        shared_prompts=config.shared_prompts,
    )
    if compute.fp8 and not (
        compute.spec == "te" and device.is_gpu() and torch.cuda.get_device_capability() >= (8, 9)
    ):
        raise ValueError(
            f"{fp8_by}=fp8 needs transformer-engine and GPUs that compute in fp8 (Hopper or newer); "
            f"{'leave it at auto' if fp8_weights_by else 'use bfloat16'} here"
        )
    return compute


def rollout_dtype(config: TrainerConfig) -> torch.dtype:
    """Return vLLM's dtype: rollout.dtype, or for auto that of the Megatron engine."""
    if config.rollout.dtype != "auto":
        return getattr(torch, config.rollout.dtype)
    return compute_of(config.engine).dtype
