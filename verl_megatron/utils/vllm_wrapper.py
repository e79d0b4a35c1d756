"""vLLM alone, under the name of the older Python interface."""

from verl_megatron.rollout.vllm import VLLMActor

__all__ = ["VLLMActor"]
