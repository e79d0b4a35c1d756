"""Settings of vLLM, and of the way of the weights into it."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from verl_megatron.config.older_names import OLDER_ROLLOUT, named
from verl_megatron.config.section import COUNT, LEAST_TEMPERATURE, POSITIVE, Section, accept, setting

# Values of reshard.offload with which each leaves the GPU.
GRADIENTS_LEAVE, OPTIMIZER_LEAVES = ("grads", "all", "steps"), ("optimizer", "all", "steps")
USUAL_TABLE = "0-63:greedy,64-511:as_set,512-:top_k:50+temperature:0.7"


def sampling_table(value: Any) -> Any:
    """Return a table of sampling by prompt length as one text; what is none, as it is.

    Args:
        value: True for the usual table, False for none, a text, a list of entries, or a mapping from ranges
            to their sampling; an entry may be such a mapping, too.
    """
    if isinstance(value, bool):
        return USUAL_TABLE if value else ""
    if isinstance(value, dict):
        return ",".join(f"{where}:{_sampling(how)}" for where, how in value.items())
    if isinstance(value, list | tuple):
        return ",".join(str(sampling_table(part) if isinstance(part, dict) else part) for part in value)
    return value


def _sampling(how: Any) -> str:
    return "+".join(f"{name}:{value}" for name, value in how.items()) if isinstance(how, dict) else str(how)


@accept({older: partial(named, setting=here) for older, here in OLDER_ROLLOUT.items()})
@dataclass(kw_only=True)
class RolloutConfig(Section):
    """vLLM and its sampling parameters."""

    tp: int = setting(
        1, "tensor-parallel size of a replica; there are world size / tp replicas", within="[1, 131072]"
    )
    devices: str = setting(
        "",
        "ranks that only generate, the last of the run: 2-3, or 2+3 for two worlds; empty, or all ranks from "
        "0 on: those that train",
    )
    # Log-probs are of softmax(logits / temperature); vLLM refuses temperatures above 2.
    temperature: float = setting(
        1.0,
        "sampling temperature; the trainer's log-probs use the same one",
        within=f"[{LEAST_TEMPERATURE}, 2]",
    )
    top_p: float = setting(1.0, "nucleus sampling threshold; 1: off", within="(0, 1]")
    top_k: int = setting(
        -1, "number of most likely tokens to sample from; -1: all", within="[-1, 2147483647]"
    )
    adaptive_sampling: str = setting(
        "",
        "sampling by prompt length: entries such as [0-63:greedy,64-:temperature:0.7+samples:4]; true: "
        "greedy below 64 tokens, top_k 50 and temperature 0.7 from 512 on; empty: off",
        many=sampling_table,
    )
    min_tokens: int = setting(
        0, "minimum response length before the end-of-sequence token is allowed", within=COUNT
    )
    max_tokens: int = setting(1024, "maximum response length", within=POSITIVE)
    stop: list[str] = setting([], "strings that end a response (they need a tokenizer)")
    stop_token_ids: list[int] = setting(
        [], "token ids that end a response, in addition to the end-of-sequence token"
    )
    ignore_eos: bool = setting(False, "always generate max_tokens tokens, for benchmarks")
    dtype: str = setting(
        "auto",
        "dtype of vLLM's weights; auto: the actor's",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    weight_dtype: str = setting(
        "auto",
        "dtype of the weights of vLLM's linear layers; fp8 takes half the memory, multiplies in fp8 and "
        "widens rollout/logprob_gap_mean; auto: rollout.dtype",
        choices=("auto", "fp8"),
    )
    # vLLM allocates a table row of max_model_len for each sample.
    max_num_seqs: int = setting(
        256, "maximum number of samples that a replica decodes concurrently", within="[1, 65536]"
    )
    dynamic_batching: bool = setting(
        False, "samples at once follow the use of the KV cache, between 60 and 90 %, up to max_num_seqs"
    )
    speculative: str = setting(
        "off",
        "drafts of tokens that the model verifies, with the same distribution of samples; ngram: what "
        "followed the last tokens where the sample had them before",
        choices=("off", "ngram"),
    )
    speculative_tokens: int = setting(4, "tokens of a draft at most", within="[1, 64]")
    speculative_max_seqs: int = setting(
        16,
        "samples at once up to which a replica drafts: above, a step takes longer the more it verifies",
        within="[1, 65536]",
    )
    gpu_memory_utilization: float = setting(
        0.5,
        "fraction of GPU memory for vLLM's weights and KV cache at most; the cache holds no more than a "
        "replica's samples at once",
        within="(0, 1]",
    )
    kv_cache_mib: int = setting(
        64, "KV cache per rank on CPUs at most, MiB", within="[1, 16777216]"
    )  # 16 TiB
    kv_cache_dtype: str = setting(
        "auto",
        "dtype of cached keys and values; fp8 takes half the memory and widens rollout/logprob_gap_mean; "
        "auto: that of vLLM's weights",
        choices=("auto", "fp8"),
    )
    enforce_eager: bool = setting(False, "run without CUDA graphs")
    sleep: bool = setting(True, "free vLLM's GPU memory during training (GPUs only)")
    record_interval: int = setting(
        10, "iterations between records of training samples in samples/; 0: none", within=COUNT
    )
    record_prompts: int = setting(2, "prompts of a record, each with all its samples", within=POSITIVE)


@dataclass(kw_only=True)
class ReshardConfig(Section):
    """Weight sync from Megatron's shards into vLLM's shards.

    Modes: `keep` gives vLLM its own copy. `share` lets equal shards share memory. `swap` writes vLLM's
    weights into Megatron's memory, whose weights are restored after rollout.

    Offloading frees the GPU memory of models that are not being updated: gradient buffers are dropped, and
    optimizer state is moved to pinned host memory.
    """

    mode: str = setting(
        "keep", "whose memory vLLM's weights use during rollout", choices=("keep", "share", "swap")
    )
    window_mib: int = setting(256, "staging memory per rank, MiB", within="[1, 65536]")  # 64 GiB
    verify: str = setting(
        "sample",
        "checksums at every sync: sample (a rotating sixteenth of the slices), all, none",
        choices=("sample", "all", "none"),
    )
    offload: str = setting(
        "none",
        "state to offload between updates; steps: all, with optimizer state on the GPU during optimizer "
        "steps only",
        choices=("none", "grads", "optimizer", "all", "steps"),
    )
