"""Predicted rollout time: compute-bound prefill, then memory-bound decoding token by token.

A decoding step reads vLLM's weights and the KV cache of all running samples, or computes if that takes
longer. It adds the process's cost of a scheduler step, sampling for every sample, and the small all-reduces
of each layer.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf

from verl_megatron.planner.machine import Machine
from verl_megatron.planner.planned_run import PlannedRun, attention_channels, part_elements, served_elements
from verl_megatron.planner.rollout.serving import kv_bytes_per_token, samples_cached
from verl_megatron.planner.training import FP8, group_rate, slowdown
from verl_megatron.rollout.admission import HIGH

StepSeconds = Callable[[int, float], float]  # of running samples, and of their tokens in the KV cache


def rollout_seconds(run: PlannedRun, machine: Machine, kv_cache_bytes: float) -> float:
    """Seconds until the slowest replica has finished its samples, each with a step for every token."""
    at_once = samples_at_once(run, kv_cache_bytes)
    if at_once < 1:
        return inf
    lengths = _lengths_of_replica(run)
    return _prefill_seconds(run, machine) + drain_seconds(
        lengths, at_once, run.prompt_tokens, _step_seconds(run, machine)
    )


@dataclass(frozen=True, slots=True)
class Stream:
    """A replica that generates without pause."""

    seconds: float  # in which it makes as many samples as an iteration takes
    longest: float  # seconds of the longest response
    drained: float  # seconds of an iteration's samples if none started before all have ended


def stream_of(run: PlannedRun, machine: Machine, kv_cache_bytes: float) -> Stream:
    """Return seconds of async.buffer=window, where new samples take the places of finished ones.

    As many samples run as there is room for, but no more than are ordered while an iteration trains:
    max_staleness times those of an iteration. The lead (`Lead` of `separate/group_table.py`) reaches that
    where training would wait; elsewhere fewer run, and the rollout is as fast as training. A running sample
    that is met at random is one of E[L²] / E[L] tokens on average, half of which it has made. With
    async.partial=continue new weights compute the cache of these tokens again.
    """
    samples, length = _samples_of_replica(run), run.response_tokens
    at_once = samples_at_once(run, kv_cache_bytes)
    if at_once < 1:
        return Stream(inf, inf, inf)
    square = length**2 if run.lengths is None else run.lengths.mean_square
    made = at_once * square / length / 2
    step_s = _step_seconds(run, machine)(at_once, at_once * run.prompt_tokens + made)
    again = 0.0
    if run.config.async_.partial == "continue":
        prompts = at_once / run.config.data.samples_per_prompt * run.prompt_tokens
        again = (prompts + made) * _prompt_token_seconds(run, machine)
    seconds = _prefill_seconds(run, machine) + samples * length / at_once * step_s + again
    longest = max(_lengths_of_replica(run)) * step_s
    return Stream(seconds, longest, rollout_seconds(run, machine, kv_cache_bytes))


def drain_seconds(lengths: Iterable[int], at_once: int, prompt_tokens: int, step_s: StepSeconds) -> float:
    """Seconds until all samples are finished, of which at most `at_once` run at a time, in this order.

    Between two ends nothing but the tokens in the cache changes; half way they have their mean.
    """
    waiting, running = deque(lengths), []  # running: (step after which a sample ends, step before its first)
    seconds, step, begun = 0.0, 0, 0  # begun: sum over the running samples
    while waiting or running:
        while waiting and len(running) < at_once:
            heappush(running, (step + waiting.popleft(), step))
            begun += step
        end, count = running[0][0], len(running)
        cached = count * (prompt_tokens + (step + end) / 2) - begun
        seconds += (end - step) * step_s(count, cached)
        step = end
        while running and running[0][0] == end:
            begun -= heappop(running)[1]
    return seconds


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
    rollout = run.config.rollout
    in_flight = _samples_of_replica(run) * (run.config.async_.max_staleness if run.streams else 1)
    most = min(in_flight, rollout.max_num_seqs)
    if rollout.dynamic_batching:
        kv_cache_bytes *= HIGH
    return (
        most
        if kv_cache_bytes == inf
        else max(0, min(most, samples_cached(run, kv_cache_bytes / kv_bytes_per_token(run))))
    )


def _step_seconds(run: PlannedRun, machine: Machine) -> StepSeconds:
    """Return the seconds of a decoding step."""
    arch, tp = run.actor.arch, run.config.rollout.tp
    parts, kv_bytes = served_elements(arch, tp), kv_bytes_per_token(run)
    layers, output = arch.num_layers * parts.layer, parts.embedding if arch.tied else parts.output
    read = layers + output
    read_s = (read * run.rollout_element_bytes - run.fp8_saved_bytes) / machine.copy_rate
    multiplied = layers * _product_factor(run) + output
    product_s = 2 * multiplied / machine.layer_flops * slowdown(run.rollout_element_bytes)
    reduce_s = 2 * arch.num_layers * machine.decode_reduce_s * (tp > 1)
    # without CUDA graphs
    launch_s = arch.num_layers * machine.decode_launch_s if run.config.rollout.enforce_eager else 0.0

    def step_s(samples: int, cached_tokens: float) -> float:
        computed = max(read_s, samples * product_s) + cached_tokens * kv_bytes / machine.copy_rate + reduce_s
        return max(computed, launch_s) + machine.decode_step_s + samples * machine.decode_row_s

    return step_s


def _product_factor(run: PlannedRun) -> float:
    """Time of the layers' products relative to bfloat16; in fp8 as in training, with inputs scaled."""
    return FP8["products"] if run.config.rollout.weight_dtype == "fp8" else 1.0


def _prefill_seconds(run: PlannedRun, machine: Machine) -> float:
    """Seconds of a replica's prompts. One is prefilled once; its other samples hit the prefix cache."""
    prompts = ceil(run.config.data.prompts_per_iteration / run.replicas)
    return prompts * run.prompt_tokens * _prompt_token_seconds(run, machine)


def _prompt_token_seconds(run: PlannedRun, machine: Machine) -> float:
    """Seconds of a prompt token in all layers: products, attention over half the prompt, two all-reduces."""
    arch, tp = run.actor.arch, run.config.rollout.tp
    products = 2 * part_elements(arch, tp).layer / machine.layer_flops * _product_factor(run)
    attention = 2 * attention_channels(arch)[0] * run.prompt_tokens / tp / machine.attention_flops
    reduces = (
        4 * (tp - 1) / tp * arch.hidden_size * run.rollout_element_bytes / group_rate(run, machine, span=tp)
    )
    return arch.num_layers * ((products + attention) * slowdown(run.rollout_element_bytes) + reduces)
