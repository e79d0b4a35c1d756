"""A rollout engine without a model: it answers as a script says, one token a step."""

from collections.abc import Callable, Sequence
from contextlib import contextmanager

import numpy as np

from tests.one_rank import ONE_RANK
from verl_megatron.rollout.admission import Admission, CacheReading, KVCache
from verl_megatron.rollout.sampling import Generation, Request


class RecordedSleeper:
    """The memory interface of a rollout engine; its calls are appended to `calls`."""

    calls: list[str]

    def sleep(self):
        self.calls.append("sleep")

    def wake(self, tag):
        self.calls.append(f"wake {tag}")

    def has_room(self, tag):
        return True


def admission_of(limit: int, *, tokens: int = 10_000, adaptive: bool = False) -> Admission:
    """Admission to a cache of blocks of four tokens."""
    return Admission(KVCache(num_blocks=tokens // 4, block_tokens=4), limit=limit, adaptive=adaptive)


class ScriptedEngine(RecordedSleeper):
    """One replica of one rank; `answer(request)` gives the response's tokens, each of log-probability -1."""

    world = ONE_RANK
    replica, num_replicas, tp_rank, tp_group, is_owner = 0, 1, 0, None, True
    kv_cache_tokens, has_tokenizer = 10_000, True

    def __init__(
        self,
        answer: Callable[[Request], Sequence[int]],
        *,
        max_num_seqs: int = 4,
        max_model_len: int = 64,
        vocab_size: int = 100,
        kv_cache_tokens: int = 10_000,
        dynamic_batching: bool = False,
    ):
        self.answer, self.max_model_len, self.vocab_size = answer, max_model_len, vocab_size
        self.kv_cache_tokens = kv_cache_tokens
        self.admission = admission_of(max_num_seqs, tokens=kv_cache_tokens, adaptive=dynamic_batching)
        self.preempted, self.readings = 0, []
        # By sample: request, whole answer, tokens so far.
        self.running: dict[int, tuple[Request, list[int], list[int]]] = {}
        self.submitted: list[Request] = []
        self.most_running = 0
        self.calls: list[str] = []

    @contextmanager
    def session(self):
        try:
            yield
        finally:
            self.running.clear()

    def submit(self, request):
        self.submitted.append(request)
        self.running[request.sample_id] = (
            request,
            list(self.answer(request))[: request.sampling.max_tokens],
            [],
        )
        self.most_running = max(self.most_running, len(self.running))

    def read_cache(self):
        """A step whose samples do not fit counts as a preemption, though none is stopped."""
        cache = self.admission.cache
        tokens = [len(r.prompt_token_ids) + len(so_far) for r, _, so_far in self.running.values()]
        held = int(cache.blocks(np.array(tokens)).sum())
        self.preempted += held > cache.num_blocks
        self.readings.append(min(1.0, held / cache.num_blocks))
        return CacheReading(used=self.readings[-1], preempted=self.preempted)

    def step(self):
        finished = []
        for sample_id, (_, whole, so_far) in list(self.running.items()):
            so_far.append(whole[len(so_far)])
            if len(so_far) == len(whole):
                finished.append(self._end(sample_id, "stop"))
        return finished

    def abort(self, request_ids):
        return [self._end(sample_id, "abort") for sample_id in request_ids]

    def num_generated(self, request_id):
        return len(self.running[request_id][2])

    def _end(self, sample_id, reason):
        request, _, tokens = self.running.pop(sample_id)
        return Generation(sample_id, request.prompt_token_ids, tokens, [-1.0] * len(tokens), reason)

    def reset_cache(self):
        self.calls.append("reset_cache")

    def weight_target(self):
        return {}

    def fp8_target(self):
        return {}

    def close(self):
        self.calls.append("close")
