"""Rollout engine interface, implemented by `vllm.py` and by a scripted engine for fast tests."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from parallel.rank_set import RankSet
from verl_megatron.residency import Tag
from verl_megatron.rollout.admission import Admission, CacheReading
from verl_megatron.rollout.sampling import Generation, Request
from verl_megatron.rollout.vllm_weights.fp8 import Fp8Weight

TAGS: tuple[Tag, ...] = ("weights", "kv_cache")  # in wake-up order


def num_replicas(*, world_size: int, tp: int) -> int:
    """Return the number of rollout replicas of `tp` ranks each.

    Raises:
        ValueError: they do not fill the world.
    """
    if tp < 1 or world_size % tp:
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise ValueError(
            f"rollout.tp={tp} must divide the number of ranks that generate, {world_size}; "
            f"choose one of {divisors} or another number of ranks"
        )
    return world_size // tp


class RolloutEngine(Protocol):
    """A rollout replica, or this rank's part of it.

    Methods are collective over the replica's tensor-parallel ranks, with the same arguments and results on
    each.
    """

    world: RankSet  # the ranks of all replicas
    replica: int  # index of this replica
    num_replicas: int
    tp_rank: int  # tensor-parallel index of this rank
    tp_group: dist.ProcessGroup | None  # CPU group of the replica's ranks; None: a single rank
    max_model_len: int  # maximum length of prompt and response together
    vocab_size: int
    has_tokenizer: bool  # required for stop strings
    admission: Admission  # how many requests are decoded concurrently

    @property
    def is_owner(self) -> bool:
        """Whether this rank is the owner rank of its replica's samples."""
        ...

    @property
    def kv_cache_tokens(self) -> int:
        """Capacity of the replica's KV cache, tokens."""
        ...

    def session(self) -> AbstractContextManager[None]:
        """Context required for `submit`, `step` and `abort`.

        On exit the process's environment, random states and threads are restored, and running requests are
        dropped.
        """
        ...

    def submit(self, request: Request) -> None:
        """Start a request that has passed `check_request`."""
        ...

    def step(self) -> list[Generation]:
        """Decode a token or more of every running request; return the requests that finished."""
        ...

    def read_cache(self) -> CacheReading:
        """Return the use of the KV cache after the last step; cheap, the same on each rank."""
        ...

    def abort(self, request_ids: Sequence[int]) -> list[Generation]:
        """Abort running requests; return their partial generations, with finish_reason "abort"."""
        ...

    def num_generated(self, request_id: int) -> int:
        """Return the tokens that a running request has generated so far."""
        ...

    def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache; contents are lost. No-op where unsupported."""
        ...

    def wake(self, tag: Tag) -> None:
        """Allocate the memory of `tag` again; weights must be written before the next request."""
        ...

    def has_room(self, tag: Tag) -> bool:
        """Whether there is certainly enough memory for `wake(tag)`."""
        ...

    def reset_cache(self) -> None:
        """Clear the prefix cache; required after the weights have changed."""
        ...

    def weight_target(self) -> dict[str, Tensor]:
        """Return this rank's parameters by the engine's names; writing into them changes the model.

        Those of `fp8_target` and their scales are not among them.
        """
        ...

    def fp8_target(self) -> dict[str, Fp8Weight]:
        """Return this rank's fp8 weights by the engine's names; empty unless rollout.weight_dtype=fp8."""
        ...

    def close(self) -> None:
        """Free the engine. Collective over `world`."""
        ...
