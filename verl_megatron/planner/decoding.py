"""Predicted rollout time: compute-bound prefill, then memory-bound decoding token by token.

A decoding step reads vLLM's weights and the KV cache of all running samples, or computes if that takes
longer. It adds the process's cost of a scheduler step, sampling for every sample, and the small all-reduces
of each layer.
"""

from math import ceil, inf

from verl_megatron.planner.machine import Machine
from verl_megatron.planner.planned_run import PlannedRun, attention_channels, part_elements, served_elements
from verl_megatron.planner.serving import kv_bytes_per_token, samples_cached
from verl_megatron.planner.training import group_rate, slowdown
from verl_megatron.rollout.admission import HIGH


def rollout_seconds(run: PlannedRun, machine: Machine, kv_cache_bytes: float) -> float:
    """Seconds until the slowest replica has finished its samples.

    Each sample takes `response_tokens` steps.
    """
    samples, at_once = ceil(run.generated_samples / run.replicas), samples_at_once(run, kv_cache_bytes)
    if at_once < 1:
        return float("inf")
    full, rest = divmod(samples, at_once)
    waves = full * _wave_seconds(run, machine, at_once) + (_wave_seconds(run, machine, rest) if rest else 0.0)
    # A prompt is prefilled once; its other samples hit the prefix cache.
    prompts = ceil(run.config.data.prompts_per_iteration / run.replicas)
    return prompts * run.prompt_tokens * _prompt_token_seconds(run, machine) + waves


def samples_at_once(run: PlannedRun, kv_cache_bytes: float) -> int:
    """Samples that a replica decodes concurrently.

    The limits are vLLM's settings, its cache and the queue (rollout/dispatch.py).
    """
    rollout = run.config.rollout
    most = min(ceil(run.generated_samples / run.replicas), rollout.max_num_seqs)
    if rollout.dynamic_batching:
        kv_cache_bytes *= HIGH
    return (
        most
        if kv_cache_bytes == inf
        else max(0, min(most, samples_cached(run, kv_cache_bytes / kv_bytes_per_token(run))))
    )


def _wave_seconds(run: PlannedRun, machine: Machine, samples: int) -> float:
    """Seconds of `samples` concurrent samples from their first to their last token."""
    arch, tp = run.actor.arch, run.config.rollout.tp
    parts = served_elements(arch, tp)
    read = arch.num_layers * parts.layer + (parts.embedding if arch.tied else parts.output)
    cached = samples * (run.prompt_tokens + run.response_tokens / 2) * kv_bytes_per_token(run)
    products = 2 * samples * read / machine.layer_flops * slowdown(run.rollout_element_bytes)
    weights = max(read * run.rollout_element_bytes / machine.copy_rate, products)
    computed = weights + cached / machine.copy_rate + 2 * arch.num_layers * machine.decode_reduce_s * (tp > 1)
    if run.config.rollout.enforce_eager:  # without CUDA graphs
        computed = max(computed, arch.num_layers * machine.decode_launch_s)
    return run.response_tokens * (computed + machine.decode_step_s + samples * machine.decode_row_s)


def _prompt_token_seconds(run: PlannedRun, machine: Machine) -> float:
    """Seconds of a prompt token in all layers: products, attention over half the prompt, two all-reduces."""
    arch, tp = run.actor.arch, run.config.rollout.tp
    products = 2 * part_elements(arch, tp).layer / machine.layer_flops
    attention = 2 * attention_channels(arch)[0] * run.prompt_tokens / tp / machine.attention_flops
    reduces = (
        4 * (tp - 1) / tp * arch.hidden_size * run.rollout_element_bytes / group_rate(run, machine, span=tp)
    )
    return arch.num_layers * ((products + attention) * slowdown(run.rollout_element_bytes) + reduces)
