"""Dynamic load balancing of rollout: replicas draw samples from a shared queue as they have room."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from parallel.rank_set import RankSet
from verl_megatron.rollout.admission import Admission
from verl_megatron.rollout.engine import RolloutEngine
from verl_megatron.rollout.sampling import Generation, Request, token_budget

# The sample so far → tokens to append after its turn, such as a tool's output; None: stop.
ContinueTurn = Callable[[Generation], Iterable[int] | None]

_queue_number = itertools.count()  # the same on every rank: all construct their queues in the same order


class WorkQueue:
    """A work queue of the indices 0 .. total-1, each drawn by exactly one replica.

    Replicas share an atomic counter in the store of `world`; a single replica uses a local one. Every rank of
    `world` constructs the queue (its key counts constructions); one rank per replica draws.

    Args:
        total: number of indices.
        num_replicas: number of replicas that draw, each until a draw is empty.
        world: the ranks of all replicas; None: there is one replica.
    """

    def __init__(self, total: int, *, num_replicas: int = 1, world: RankSet | None = None):
        self.total = total
        self.num_replicas = num_replicas
        self._key = f"samples/{next(_queue_number)}"
        assert world is not None or num_replicas == 1, "several replicas meet in the world's store"
        self._store = dist.HashStore() if world is None or num_replicas == 1 else world.store("verl_megatron")

    def take(self, count: int) -> range:
        """Draw the next `count` indices, fewer at the end; the last draw of each replica is empty."""
        assert count > 0
        start = self._store.add(self._key, count) - count
        drawn = range(min(start, self.total), min(start + count, self.total))
        if not drawn and self._store.add(self._key + "/finished", 1) == self.num_replicas:
            self._store.delete_key(self._key)  # the last replica deletes the keys
            self._store.delete_key(self._key + "/finished")
        return drawn


class Dispatcher:
    """Draws from the queue for a replica and broadcasts the result to its TP ranks.

    A replica first draws its fair share, up to the number of samples that it decodes concurrently. Then it
    draws as many as finish, several at a time; the number may change meanwhile. Nothing is reserved for
    replicas that finish early: a decoding step takes about as long with more samples, so a sample that starts
    late ends late. Only TP rank 0 accesses the queue. It broadcasts only if there is room for samples and the
    queue may not be empty.

    Args:
        queue: on every rank, used by the first of `group`.
        admission: how many samples the replica decodes concurrently.
        group: CPU group of the replica's TP ranks; None: the replica is one rank.
    """

    def __init__(self, queue: WorkQueue, *, admission: Admission, group: dist.ProcessGroup | None):
        self.queue = queue
        self.group = group
        self.admission = admission
        self.share = max(1, -(-queue.total // queue.num_replicas))
        self.exhausted = False

    def draw(self, running: int) -> range:
        """Draw the samples to start while `running` are in flight. Collective over `group`."""
        room = self.admission.to_start(running, most=self.share)
        if self.exhausted or room <= 0:
            return range(0)
        drawn = self._take(room)
        self.exhausted = not drawn
        return drawn

    def _take(self, count: int) -> range:
        if self.group is None:
            return self.queue.take(count)
        bounds_2 = torch.zeros(2, dtype=torch.int64)
        if dist.get_rank(self.group) == 0:
            drawn = self.queue.take(count)
            bounds_2[0], bounds_2[1] = drawn.start, drawn.stop
        dist.broadcast(bounds_2, group=self.group, group_src=0)
        return range(*bounds_2.tolist())


def generate(
    engine: RolloutEngine,
    requests: Sequence[Request],
    *,
    on_finish: Callable[[Generation], None] | None = None,
    on_step: Callable[[], None] = lambda: None,
    continue_turn: ContinueTurn | None = None,
    shared: bool = True,
) -> list[Generation]:
    """Generate `requests`, load-balanced over the replicas. Collective: every rank passes the same requests.

    Args:
        on_finish: called with each finished sample, on the replica's owner rank only.
        on_step: called on every rank before each decoding step.
        continue_turn: called on the owner rank after every turn.
        shared: False: every replica generates all requests.

    Returns:
        The samples that this replica generated, in the order of `requests`; the same on each of its ranks.

    Raises:
        ValueError: before generation, if a prompt is empty, too long or has ids outside the vocabulary, or
            there are stop strings without a tokenizer.
    """
    for request in requests:
        _check_request(request, engine)
    queue = WorkQueue(len(requests), num_replicas=engine.num_replicas if shared else 1, world=engine.world)
    admission = engine.admission
    if requests:
        admission.begin(requests, max_model_len=engine.max_model_len)
    dispatcher = Dispatcher(queue, admission=admission, group=engine.tp_group)
    place = {request.sample_id: index for index, request in enumerate(requests)}
    turns, done, num_running = _Turns(engine, continue_turn), {}, 0
    with engine.session():
        while True:
            drawn = dispatcher.draw(num_running)
            for index in drawn:
                engine.submit(requests[index])
                admission.start(requests[index])
            num_running += len(drawn)
            if not num_running:
                break
            on_step()
            finished = []
            for generation in engine.step():
                sample, next_request = turns.add(requests[place[generation.sample_id]], generation)
                if next_request is not None:
                    engine.submit(next_request)
                    continue
                finished.append(sample)
                done[place[sample.sample_id]] = sample
                if on_finish and engine.is_owner:
                    on_finish(sample)
            admission.observe(engine.read_cache(), finished)
            num_running -= len(finished)
    samples = [done[index] for index in sorted(done)]
    _check_same_samples(samples, engine)
    return samples


class _Turns:
    """Joins the turns of multi-turn samples."""

    def __init__(self, engine: RolloutEngine, continue_turn: ContinueTurn | None):
        self._engine, self._continue_turn = engine, continue_turn
        # Unfinished samples: their turns so far and the tokens to append.
        self._earlier: dict[int, tuple[Generation, Sequence[int]]] = {}
        self._num_turns: dict[int, int] = {}

    def add(self, request: Request, generation: Generation) -> tuple[Generation, Request | None]:
        """Return the sample so far and the request of its next turn, or None after the last.

        Args:
            request: of the first turn.
        """
        if generation.sample_id in self._earlier:
            earlier, between = self._earlier.pop(generation.sample_id)
            generation = earlier.then(between, generation)
        if self._continue_turn is None:
            return generation, None
        given = self._ask(generation)
        used = len(generation.token_ids) + len(given or ())
        prompt = [*request.prompt_token_ids, *generation.token_ids, *(given or ())]
        room = min(request.sampling.max_tokens - used, self._engine.max_model_len - len(prompt))
        if given is None or room < 1:
            return generation, None
        turn = self._num_turns[request.sample_id] = self._num_turns.get(request.sample_id, 0) + 1
        self._earlier[request.sample_id] = generation, given
        sampling = replace(request.sampling, max_tokens=room, min_tokens=0)
        next_turn = replace(request, prompt_token_ids=prompt, seed=request.seed + turn, sampling=sampling)
        return generation, next_turn

    def _ask(self, generation: Generation) -> Sequence[int] | None:
        """Call `continue_turn` on the owner rank and broadcast the result: calls may not be deterministic."""
        assert self._continue_turn is not None
        answer: list[Any] = [None, None]
        if self._engine.is_owner:
            try:
                given = self._continue_turn(generation)
                answer[0] = None if given is None else list(map(int, given))
            except Exception as error:
                if self._engine.tp_group is None:
                    raise
                answer[1] = error  # for the other ranks, which would wait
        if self._engine.tp_group is not None:
            own = answer[1]
            if own is not None:
                answer[1] = f"continue_turn failed on sample {generation.sample_id}: {own!r}"
            dist.broadcast_object_list(answer, group=self._engine.tp_group, group_src=0)
            if answer[1] is not None:
                raise RuntimeError(answer[1]) from own
        return answer[0]


def _check_request(request: Request, engine: RolloutEngine) -> None:
    stop = request.sampling.stop
    if stop and not engine.has_tokenizer:
        raise ValueError(
            f"rollout.stop={list(stop)!r} needs a tokenizer, and the model's folder has none; "
            "add its files or use rollout.stop_token_ids"
        )
    token_budget(request, max_model_len=engine.max_model_len, vocab_size=engine.vocab_size)


def _check_same_samples(samples: list[Generation], engine: RolloutEngine) -> None:
    """Check that the ranks of a replica, which sample independently, generated the same tokens."""
    if engine.tp_group is None:
        return
    text = json.dumps([(sample.sample_id, sample.token_ids) for sample in samples]).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
    own_1, all_R = (
        torch.tensor([digest]),
        torch.empty(dist.get_world_size(engine.tp_group), dtype=torch.int64),
    )
    dist.all_gather_into_tensor(all_R, own_1, group=engine.tp_group)
    assert (all_R == digest).all(), (
        f"the tensor-parallel ranks of rollout replica {engine.replica} generated different tokens"
    )
