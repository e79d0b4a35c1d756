"""vLLM's memory on a rank: weights that it does not share with Megatron, working memory, KV cache."""

from math import ceil

from verl_megatron.model_specs import samples_at_most
from verl_megatron.planner.machine import Machine
from verl_megatron.planner.planned_run import PlannedRun, served_elements
from verl_megatron.rollout.admission import LOW

BLOCK_TOKENS = 16  # of the cache's blocks, vLLM's default on GPUs; each sample has one ahead (vllm_cache.py)


def own_rollout_bytes(run: PlannedRun, stage: int | None) -> float:
    """Bytes of vLLM's weights that share no memory with Megatron's, on a rank of the actor's stage `stage`.

    `stage` is None on a rank outside the actor. "share" aliases whole parameters whose rows are also
    consecutive in Megatron. At equal tensor-parallel sizes that is all but queries, keys and values (another
    row order). If vLLM splits finer, it is the embedding's and output's rows and the parameters that are not
    split; otherwise next to nothing. "swap" needs what vLLM has beyond Megatron's bytes.
    """
    arch, tp, layout = run.actor.arch, run.config.rollout.tp, run.actor.layout
    parts = served_elements(arch, tp)
    width, total = run.rollout_element_bytes, parts.embedding + arch.num_layers * parts.layer + parts.output
    if stage is None or run.config.reshard.mode == "keep":
        return width * total - run.fp8_saved_bytes
    if run.config.reshard.mode == "swap":
        return width * max(0, total - run.actor.elements[stage])
    layers, shared = run.actor.layers[stage], 0
    if tp == layout.tp:
        qkv = (
            (arch.num_heads // tp + 2 * max(1, arch.num_kv_heads // tp))
            * arch.head_dim
            * (arch.hidden_size + arch.qkv_bias)
        )
        # With one key-value group per rank both orders are the same.
        shared += layers * (parts.layer - qkv * (tp != arch.num_kv_heads))
    if tp % layout.tp == 0:
        shared += (stage == 0) * parts.embedding + (stage == layout.pp - 1) * parts.output
    return width * (total - shared)


def arriving_bytes(run: PlannedRun) -> float:
    """Bytes of vLLM's weights on a rank as they arrive, before its layers become fp8."""
    return own_rollout_bytes(run, None) + run.fp8_saved_bytes


def vllm_working_bytes(run: PlannedRun, machine: Machine) -> float:
    """Bytes that vLLM reserves in its share for a step's activations and the logits of all samples."""
    arch, config = run.actor.arch, run.config.rollout
    step = (
        machine.prefill_tokens
        * (3 * arch.intermediate_size / config.tp + 4 * arch.hidden_size)
        * run.rollout_element_bytes
    )
    return step + 3 * 4 * _samples_at_most(run) * arch.vocab_size


def _samples_at_most(run: PlannedRun) -> int:
    return samples_at_most(run.config, replicas=run.replicas, validation=None)


def kv_cache_bytes(run: PlannedRun, machine: Machine, own: float) -> float:
    """Bytes of a rank's KV cache: what vLLM's share leaves, and no more than all samples fill.

    Negative where the share has no room for weights and working memory.

    Args:
        own: bytes of vLLM's weights (`own_rollout_bytes`).
    """
    config = run.config.rollout
    room = config.gpu_memory_utilization * machine.gpu_bytes - own - vllm_working_bytes(run, machine)
    samples = _samples_at_most(run)
    if config.dynamic_batching:
        samples = ceil(samples / LOW)
    blocks = samples * (ceil((run.prompt_tokens + run.response_tokens) / BLOCK_TOKENS) + 1) + 1
    return min(room, blocks * BLOCK_TOKENS * kv_bytes_per_token(run))


def serving_bytes(run: PlannedRun, machine: Machine, own: float) -> dict[str, float]:
    """Bytes by part that vLLM holds while it is awake; the cache's with its working memory."""
    cache = kv_cache_bytes(run, machine, own) + vllm_working_bytes(run, machine)
    return {"vllm weights": own, "kv cache": cache}


def cached_tokens(run: PlannedRun, samples: int) -> float:
    """Tokens of `samples` whole samples of a replica in vLLM's KV cache.

    Samples of one prompt are consecutive and share the prompt's keys and values.
    """
    return (
        ceil(samples / run.config.data.samples_per_prompt) * run.prompt_tokens + samples * run.response_tokens
    )


def samples_cached(run: PlannedRun, tokens: float) -> int:
    """Maximum number of samples whose tokens all fit the cache."""
    samples = run.config.data.samples_per_prompt
    prompts, left = divmod(tokens, run.prompt_tokens + samples * run.response_tokens)
    return int(prompts * samples + max(0, left - run.prompt_tokens) // run.response_tokens)


def kv_bytes_per_token(run: PlannedRun) -> float:
    """Bytes of one token's keys and values on one rank."""
    arch = run.actor.arch
    return (
        2
        * arch.num_layers
        * max(1, arch.num_kv_heads // run.config.rollout.tp)
        * arch.head_dim
        * (1 if run.config.rollout.kv_cache_dtype == "fp8" else run.rollout_element_bytes)
    )
