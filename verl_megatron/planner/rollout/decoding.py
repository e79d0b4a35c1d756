"""Predicted rollout time: compute-bound prefill, then memory-bound decoding token by token.

A decoding step reads vLLM's weights, or computes if that takes longer, and the KV cache of all running
samples. Samples of one prompt find part of its keys and values in the GPU's L2 cache. A step adds the
process's cost of a scheduler step, sampling for every sample, and the small all-reduces of each layer.
"""

from collections.abc import Callable
from math import ceil, inf

from verl_megatron.planner.machine import Machine
from verl_megatron.planner.planned_run import PlannedRun, attention_channels, part_elements, served_elements
from verl_megatron.planner.rollout.serving import kv_bytes_per_token, samples_cached
from verl_megatron.planner.rollout.simulation import Costs, Decoding, Pipeline, pipeline
from verl_megatron.planner.training import FP8, group_rate, slowdown
from verl_megatron.planner.weight_sync import adopt_seconds
from verl_megatron.rollout.admission import HIGH

FP8_CACHE = 1.75  # time of a byte of an fp8 KV cache relative to bfloat16: 0.88 of an element's
L2_HITS = 0.4  # of the reads of a prompt's keys and values that other samples of the prompt read, too


def rollout_seconds(run: PlannedRun, machine: Machine, kv_cache_bytes: float) -> float:
    """Seconds until the slowest replica has finished its samples, each with a step for every token."""
    at_once = samples_at_once(run, kv_cache_bytes)
    if at_once < 1:
        return inf
    decoding = _decoding(run, machine, at_once)
    decoding.release(0, _lengths_of_replica(run))
    decoding.advance()
    return decoding.now


def pipeline_of(run: PlannedRun, machine: Machine, kv_cache_bytes: float, training_s: float) -> Pipeline:
    """Return seconds of async.buffer=window, where new samples take the places of finished ones.

    Args:
        training_s: seconds of an iteration without its rollout.
    """
    at_once = samples_at_once(run, kv_cache_bytes)
    if at_once < 1:
        return Pipeline(inf, inf)
    prompt_s, adopt_s = _prompt_token_seconds(run, machine), adopt_seconds(run, machine)
    continues = run.config.async_.partial == "continue"

    def on_version(decoding: Decoding) -> None:
        if continues:  # the new weights compute the cache of what is running
            prompts = decoding.num_running / run.config.data.samples_per_prompt * run.prompt_tokens
            decoding.spend((prompts + decoding.made_tokens) * prompt_s)
        decoding.spend(adopt_s)

    given = run.config.async_
    return pipeline(
        _decoding(run, machine, at_once),
        _lengths_of_replica(run) * given.sync_interval,
        training_s=training_s,
        staleness=given.max_staleness,
        interval=given.sync_interval,
        on_version=on_version,
    )


def _decoding(run: PlannedRun, machine: Machine, at_once: int) -> Decoding:
    costs = Costs(step_s=_step_seconds(run, machine), start_s=_start_seconds(run, machine))
    return Decoding(
        costs,
        at_once=at_once,
        prompt_tokens=run.prompt_tokens,
        samples_per_prompt=run.config.data.samples_per_prompt,
    )


def _samples_of_replica(run: PlannedRun) -> int:
    return ceil(run.generated_samples / run.replicas)


def _lengths_of_replica(run: PlannedRun) -> list[int]:
    """Return the lengths of the samples of the replica that finishes last, in the order of their starts."""
    count = _samples_of_replica(run)
    if run.lengths is None:
        return [run.config.rollout.max_tokens] * count
    return run.lengths.samples(count, of=run.generated_samples)


def samples_at_once(run: PlannedRun, kv_cache_bytes: float) -> int:
    """Samples that a replica decodes concurrently.

    The limits are vLLM's settings, its cache and the queue (rollout/dispatch.py).
    """
    rollout, given = run.config.rollout, run.config.async_
    iterations = given.sync_interval * (1 + given.max_staleness) if run.streams else 1
    in_flight = _samples_of_replica(run) * iterations
    most = min(in_flight, rollout.max_num_seqs)
    if rollout.dynamic_batching:
        kv_cache_bytes *= HIGH
    return (
        most
        if kv_cache_bytes == inf
        else max(0, min(most, samples_cached(run, kv_cache_bytes / kv_bytes_per_token(run))))
    )


def _step_seconds(run: PlannedRun, machine: Machine) -> Callable[[int, float], float]:
    """Return the seconds of a decoding step."""
    arch, tp = run.actor.arch, run.config.rollout.tp
    parts, kv_bytes = served_elements(arch, tp), kv_bytes_per_token(run)
    layers, output = arch.num_layers * parts.layer, parts.embedding if arch.tied else parts.output
    read = layers + output
    read_s = (read * run.rollout_element_bytes - run.fp8_saved_bytes) / machine.copy_rate
    multiplied = layers * _product_factor(run) + output
    product_s = 2 * multiplied / machine.layer_flops * slowdown(run.rollout_element_bytes)
    reduce_s = 2 * arch.num_layers * machine.decode_reduce_s * (tp > 1)
    cache_s = (
        kv_bytes / machine.copy_rate * (FP8_CACHE if run.config.rollout.kv_cache_dtype == "fp8" else 1.0)
    )
    # without CUDA graphs
    launch_s = arch.num_layers * machine.decode_launch_s if run.config.rollout.enforce_eager else 0.0

    again = L2_HITS * (1 - 1 / run.config.data.samples_per_prompt) * run.prompt_tokens  # tokens of a sample

    def step_s(samples: int, cached_tokens: float) -> float:
        read_tokens = cached_tokens - samples * again
        computed = max(read_s, samples * product_s) + read_tokens * cache_s + reduce_s
        return max(computed, launch_s) + machine.decode_step_s + samples * machine.decode_row_s

    return step_s


def _product_factor(run: PlannedRun) -> float:
    """Time of the layers' products relative to bfloat16; in fp8 as in training, with inputs scaled."""
    return FP8["products"] if run.config.rollout.weight_dtype == "fp8" else 1.0


def _start_seconds(run: PlannedRun, machine: Machine) -> Callable[[int, int, float], float]:
    """Return the further seconds of a step in which samples start.

    A prompt is prefilled once; its other samples hit the prefix cache. vLLM launches such a step layer by
    layer, without whole CUDA graphs.
    """
    prompt_s = run.prompt_tokens * _prompt_token_seconds(run, machine)
    step_s, launch_s = _step_seconds(run, machine), run.actor.arch.num_layers * machine.decode_launch_s

    def start_s(started: int, running: int, cached_tokens: float) -> float:
        prefill_s = started / run.config.data.samples_per_prompt * prompt_s
        return max(prefill_s, launch_s - step_s(running, cached_tokens))

    return start_s


def _prompt_token_seconds(run: PlannedRun, machine: Machine) -> float:
    """Seconds of a prompt token in all layers: products, attention over half the prompt, two all-reduces."""
    arch, tp = run.actor.arch, run.config.rollout.tp
    products = 2 * part_elements(arch, tp).layer / machine.layer_flops * _product_factor(run)
    attention = 2 * attention_channels(arch)[0] * run.prompt_tokens / tp / machine.attention_flops
    reduces = (
        4 * (tp - 1) / tp * arch.hidden_size * run.rollout_element_bytes / group_rate(run, machine, span=tp)
    )
    return arch.num_layers * ((products + attention) * slowdown(run.rollout_element_bytes) + reduces)
