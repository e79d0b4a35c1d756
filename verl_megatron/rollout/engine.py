"""What every rollout engine does; `vllm.py` is one, and a scripted one serves fast tests."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch.distributed as dist
from torch import Tensor

from verl_megatron.rollout.sampling import Generation, Request

Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")  # what sleeps, in the order in which it wakes


class RolloutEngine(Protocol):
    """One replica that generates, or this rank's part of it.

    The tensor-parallel ranks of a replica call every method together, with the same arguments, and get the same results.
    """

    replica: int  # number of this replica
    num_replicas: int
    tp_rank: int  # of this rank in its replica
    tp_group: dist.ProcessGroup | None  # CPU group of the replica's ranks; None: it is one rank
    max_num_seqs: int  # requests that are decoded at once
    max_model_len: int  # tokens of prompt and response together
    vocab_size: int
    has_tokenizer: bool  # without one there are no stop strings

    @property
    def is_home(self) -> bool:
        """Whether this rank owns the samples of its replica."""
        ...

    @property
    def kv_cache_tokens(self) -> int:
        """How many tokens the replica's KV cache holds."""
        ...

    def session(self) -> AbstractContextManager[None]:
        """The block around `submit`, `step` and `abort`; at its end the process's environment, random states and threads are as before,
        and requests that are still under way are gone."""
        ...

    def submit(self, request: Request) -> None:
        """Start a request; `check_request` has accepted it."""
        ...

    def step(self) -> list[Generation]:
        """Decode one more token of every running request; the requests that finished by it."""
        ...

    def abort(self, request_ids: Sequence[int]) -> list[Generation]:
        """End running requests; what each has so far, with finish_reason "abort"."""
        ...

    def sleep(self) -> None:
        """Give the memory of weights and KV cache back to the GPU; their contents are lost. Nothing where memory is not given back."""
        ...

    def wake(self, tag: Tag) -> None:
        """Memory for what `tag` names again; weights have to be written before the next request."""
        ...

    def has_room(self, tag: Tag) -> bool:
        """Whether `wake(tag)` is known to find enough memory."""
        ...

    def reset_cache(self) -> None:
        """Forget the keys and values of cached prompts; needed after the weights changed."""
        ...

    def weight_target(self) -> dict[str, Tensor]:
        """This rank's parameters by the engine's names: what is written into them changes the model."""
        ...

    def close(self) -> None:
        """Free the engine. Collective over the world."""
        ...
