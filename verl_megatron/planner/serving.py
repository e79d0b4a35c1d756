"""What vLLM holds on a rank: weights of its own, room to work in, keys and values."""

from math import ceil

from verl_megatron.planner.case import Case, served_elements
from verl_megatron.planner.machine import Machine


def own_rollout_bytes(case: Case, stage: int | None) -> float:
    """vLLM's weights that lie in no memory of Megatron's, on a rank of the actor's pipeline stage `stage` (None: outside the actor).

    share: whole parameters whose rows follow each other in Megatron's too. At equal tensor-parallel sizes that is all but queries, keys
    and values (other order); where vLLM cuts finer, the rows of embedding and output and what is not cut; else next to nothing.
    swap: what vLLM needs beyond Megatron's bytes.
    """
    arch, tp, layout = case.actor.arch, case.config.rollout.tp, case.actor.layout
    parts = served_elements(arch, tp)
    width, total = case.rollout_element_bytes, parts.embedding + arch.num_layers * parts.layer + parts.output
    if stage is None or case.config.reshard.mode == "keep":
        return width * total
    if case.config.reshard.mode == "swap":
        return width * max(0, total - case.actor.elements[stage])
    layers, shared = case.actor.layers[stage], 0
    if tp == layout.tp:
        qkv = (
            (arch.num_heads // tp + 2 * max(1, arch.num_kv_heads // tp))
            * arch.head_dim
            * (arch.hidden_size + arch.qkv_bias)
        )
        shared += layers * (
            parts.layer - qkv * (tp != arch.num_kv_heads)
        )  # with one group a rank both orders are the same
    if tp % layout.tp == 0:
        shared += (stage == 0) * parts.embedding + (stage == layout.pp - 1) * parts.output
    return width * (total - shared)


def vllm_working_bytes(case: Case, machine: Machine) -> float:
    """What vLLM keeps free of its share for the activations of a step and for the logits of all rows."""
    arch, config = case.actor.arch, case.config.rollout
    step = (
        machine.prefill_tokens
        * (3 * arch.intermediate_size / config.tp + 4 * arch.hidden_size)
        * case.rollout_element_bytes
    )
    return step + 3 * 4 * config.max_num_seqs * arch.vocab_size


def cached_tokens(case: Case, rows: int) -> int:
    """Tokens of `rows` whole rows of a replica in vLLM's cache: a prompt's samples, which follow each other, share its keys and values."""
    return ceil(rows / case.config.data.samples_per_prompt) * case.prompt_tokens + rows * case.response_tokens


def rows_cached(case: Case, tokens: float) -> int:
    """The most rows of which the cache holds all tokens."""
    samples = case.config.data.samples_per_prompt
    prompts, left = divmod(tokens, case.prompt_tokens + samples * case.response_tokens)
    return int(prompts * samples + max(0, left - case.prompt_tokens) // case.response_tokens)


def kv_bytes_per_token(case: Case) -> float:
    """Keys and values of one token on one rank."""
    arch = case.actor.arch
    return (
        2
        * arch.num_layers
        * max(1, arch.num_kv_heads // case.config.rollout.tp)
        * arch.head_dim
        * case.rollout_element_bytes
    )
