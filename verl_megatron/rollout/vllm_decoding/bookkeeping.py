"""Less Python in a step of vLLM, whose process sets the pace where many samples are decoded at once."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from verl_megatron.rollout.vllm_decoding.requests import Tokens, internal_id


@contextlib.contextmanager
def replaced(owner: Any, method: str, by: Callable) -> Iterator[None]:
    """Context in which an object has another method."""
    before = vars(owner).get(method)
    setattr(owner, method, by)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, method)  # the class's method is seen again
        else:
            setattr(owner, method, before)


class Bookkeeping:
    """Keeps the tokens of running requests, and saves vLLM work that changes nothing.

    - vLLM's output processor, which handles each token by itself, gets all tokens of a request at its end and
      no log-probs. It still sees every token of requests with stop strings.
    - The scheduler's cache manager is not asked for slots while a request has free ones in its last block.

    Args:
        engine: vLLM's LLMEngine.
    """

    def __init__(self, engine: Any):
        self._processor = engine.output_processor
        self._process: Callable = self._processor.process_outputs
        core = getattr(engine.engine_core, "engine_core", None)
        self._manager = getattr(getattr(core, "scheduler", None), "kv_cache_manager", None)
        self._tokens: dict[str, Tokens] = {}  # by the engine's id of their request
        self._names: dict[int, str] = {}  # these ids by sample

    def add(self, sample_id: int, *, has_stop: bool) -> None:
        """Keep the tokens of a request that has been submitted."""
        name = self._names[sample_id] = internal_id(self._processor, str(sample_id))
        self._tokens[name] = Tokens(has_stop)

    def tokens(self, sample_id: int) -> Tokens:
        """Return what a running request has generated so far."""
        return self._tokens[self._names[sample_id]]

    def remove(self, sample_id: int) -> Tokens:
        """Forget a request that has ended; return what it generated."""
        return self._tokens.pop(self._names.pop(sample_id))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Context in which vLLM's own methods are replaced."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(self._processor, "process_outputs", self._process_outputs))
            if slots := _SlotsInUse.of(self._manager):
                stack.enter_context(replaced(self._manager, "allocate_slots", slots.allocate_slots))
                stack.enter_context(replaced(self._manager, "cache_blocks", slots.cache_blocks))
            yield

    def _process_outputs(self, outputs: Sequence[Any], *args: Any, **options: Any) -> Any:
        """Take the tokens out of the outputs of a step, and hand on what vLLM has to see."""
        handed_on = []
        for output in outputs:
            tokens = self._tokens.get(output.request_id)
            if tokens is not None:
                token_ids, logprobs = output.new_token_ids, output.new_logprobs
                tokens.token_ids += token_ids
                if logprobs is not None:
                    tokens.logprobs += logprobs.logprobs[: len(token_ids), 0].tolist()
                    output.new_logprobs = None
                if not tokens.has_stop:
                    if output.finish_reason is None:
                        continue
                    output.new_token_ids = tokens.token_ids
            handed_on.append(output)
        return self._process(handed_on, *args, **options)


class _SlotsInUse:
    """The methods of vLLM's KVCacheManager for a step that changes nothing in its blocks.

    Args:
        manager: with one group of layers, all of full attention.
    """

    def __init__(self, manager: Any):
        self._allocate_slots, self._cache_blocks = manager.allocate_slots, manager.cache_blocks
        self._nothing = manager.empty_kv_cache_blocks
        (group,) = manager.coordinator.single_type_managers
        self._blocks, self._num_cached, self._block_size = (
            group.req_to_blocks,
            group.num_cached_block,
            group.block_size,
        )

    @classmethod
    def of(cls, manager: Any) -> "_SlotsInUse | None":
        """Return those of a manager; None if it has other layers or is of an unknown version."""
        groups = list(getattr(getattr(manager, "coordinator", None), "single_type_managers", ()))
        if [type(group).__name__ for group in groups] != ["FullAttentionManager"]:
            return None
        whole_blocks = getattr(groups[0].block_pool, "hash_block_size", None) in (None, groups[0].block_size)
        has_all = hasattr(manager, "empty_kv_cache_blocks") and hasattr(groups[0], "num_cached_block")
        return cls(manager) if whole_blocks and has_all else None

    def allocate_slots(
        self, request: Any, num_new_tokens: int, *args: Any, num_lookahead_tokens: int = 0, **options: Any
    ) -> Any:
        """As vLLM's; without other arguments, of a running request."""
        blocks = self._blocks.get(request.request_id)
        if blocks and not args and not options:
            end = request.num_computed_tokens + num_new_tokens
            if end + num_lookahead_tokens <= len(blocks) * self._block_size and self._is_cached(
                request, min(end, request.num_tokens)
            ):
                return self._nothing
        return self._allocate_slots(
            request, num_new_tokens, *args, num_lookahead_tokens=num_lookahead_tokens, **options
        )

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """As vLLM's."""
        if not self._is_cached(request, num_computed_tokens):
            self._cache_blocks(request, num_computed_tokens)

    def _is_cached(self, request: Any, num_tokens: int) -> bool:
        """Whether all full blocks of the first tokens are in the prefix cache."""
        return num_tokens < (self._num_cached.get(request.request_id, 0) + 1) * self._block_size
