"""Size of a vLLM engine's KV cache, readings of it and of its scheduler: preemptions, drafts."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from verl_megatron.config import RolloutConfig
from verl_megatron.rollout.admission import LOW, CacheReading, KVCache
from verl_megatron.rollout.vllm_decoding.drafts import read_drafts
from verl_megatron.rollout.vllm_decoding.requests import internal_id


def limited(config: RolloutConfig, *, samples: int | None) -> RolloutConfig:
    """Return the settings for at most the next power of two of `samples`.

    vLLM compiles the model anew for another number of CUDA graphs, which follows from `max_num_seqs`.
    """
    most = 2 ** ((samples or config.max_num_seqs) - 1).bit_length()
    return replace(config, max_num_seqs=min(most, config.max_num_seqs))


@contextlib.contextmanager
def no_larger_than_needed(samples: int, *, adaptive: bool) -> Iterator[None]:
    """Let engines that start here have no more KV cache than `samples` samples at full length fill.

    Mapping and unmapping memory that is never used takes time in every iteration.

    Args:
        adaptive: `rollout.dynamic_batching`, which starts samples only while a share of the cache is free.
    """
    from vllm.v1.executor.abstract import Executor

    found = Executor.determine_available_memory
    spare = 1 / LOW if adaptive else 1.0

    def determine(self: Executor) -> list[int]:
        tokens, workers = self.vllm_config.model_config.max_model_len, self.get_kv_cache_specs()
        needed = [_needed_bytes(specs, tokens, ceil(samples * spare)) for specs in workers]
        return list(map(min, found(self), needed))

    Executor.determine_available_memory = determine
    try:
        yield
    finally:
        Executor.determine_available_memory = found


def _needed_bytes(specs: Mapping[str, Any], tokens: int, samples: int) -> int:
    """Bytes of whole samples, with an empty block, and one ahead of each; `specs` are those of the layers."""
    return sum(
        (samples * (ceil(tokens / spec.block_size) + 1) + 1) * spec.page_size_bytes for spec in specs.values()
    )


def cache_of(llm: Any) -> KVCache:
    """Return the size of an engine's KV cache, without the block that vLLM keeps empty."""
    cache = llm.llm_engine.vllm_config.cache_config
    return KVCache(num_blocks=cache.num_gpu_blocks - 1, block_tokens=cache.block_size)


class CacheGauge:
    """Reads how much of the cache running requests hold, and counts preemptions of requests.

    Args:
        required: whether the use must be known.

    Raises:
        ValueError: it must be, and this vLLM has no such reading.
    """

    def __init__(self, llm: Any, *, required: bool):
        self._processor = llm.llm_engine.output_processor
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        self._scheduler = getattr(core, "scheduler", None)
        self._manager = getattr(self._scheduler, "kv_cache_manager", None)
        self._requests: dict[int, Any] = {}  # the scheduler's records of running requests, by sample
        self._samples: dict[str, int] = {}  # by the name of their requests
        self._preempted = 0
        if required and self.read().used is None:
            import vllm

            raise ValueError(
                f"rollout.dynamic_batching=true needs the use of the KV cache, which vLLM {vllm.__version__} "
                "does not tell; set it to false"
            )

    def add(self, sample_id: int) -> None:
        """Watch a request that has been submitted."""
        name = internal_id(self._processor, str(sample_id))
        self._requests[sample_id] = getattr(self._scheduler, "requests", {}).get(name)
        self._samples[name] = sample_id

    def remove(self, sample_id: int) -> None:
        """Count the preemptions of a request that has ended."""
        request = self._requests.pop(sample_id)
        self._preempted += getattr(request, "num_preemptions", 0)
        self._samples.pop(getattr(request, "request_id", ""), None)

    def read(self) -> CacheReading:
        """Return the present reading."""
        drafts = read_drafts(self._scheduler, self._samples)
        return CacheReading(
            used=getattr(self._manager, "usage", None), preempted=self._preempted, drafts=drafts
        )
