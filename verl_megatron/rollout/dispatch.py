"""Rows go to replicas as they get free: a queue that all of them draw from, and how much a replica draws at a time."""

import itertools

import torch
import torch.distributed as dist

_queue_number = itertools.count()  # every rank makes its queues in the same order, so a number names the same queue everywhere


class WorkQueue:
    """The numbers 0 .. total-1, each given to one caller of one replica.

    The replicas share a counter in the store of the default process group (its `add` is atomic); alone it is a local
    number. Every rank of the world constructs it (the name comes from counting constructions); one rank of each replica
    draws.

    Args:
        total: how many numbers there are.
        num_replicas: how many will draw, each until it was given nothing.
    """

    def __init__(self, total: int, *, num_replicas: int = 1):
        self.total = total
        self.num_replicas = num_replicas
        self._key = f"verl_megatron/rows/{next(_queue_number)}"
        self._store = dist.distributed_c10d._get_default_store() if num_replicas > 1 else dist.HashStore()

    def take(self, count: int) -> range:
        """The next `count` numbers, fewer at the end; empty exactly once for each replica, as its last draw."""
        assert count > 0
        start = self._store.add(self._key, count) - count
        taken = range(min(start, self.total), min(start + count, self.total))
        if not taken and self._store.add(self._key + "/finished", 1) == self.num_replicas:
            self._store.delete_key(self._key)  # the last to find it empty clears up
            self._store.delete_key(self._key + "/finished")
        return taken


class Dispatcher:
    """Decides when a replica draws from the queue, and tells all its TP ranks what it drew.

    A replica first draws its fair share, or as many as it decodes at once; then one row for each that finished. Nothing
    is held back for those that get free early: a decoding step takes about as long with more rows, so that a row which
    starts late ends late. Only TP rank 0 asks the queue; a broadcast is spent only when there is room for rows and the
    queue is not known to be empty.

    Args:
        queue: on every rank, used by the first of `group`.
        limit: rows a replica decodes at once.
        group: CPU group of the replica's TP ranks; None: the replica is one rank.
    """

    def __init__(self, queue: WorkQueue, *, limit: int, group: dist.ProcessGroup | None):
        self.queue = queue
        self.group = group
        self.target = max(1, min(limit, -(-queue.total // queue.num_replicas)))
        self.exhausted = False

    def draw(self, running: int) -> range:
        """Numbers of the rows to start now that `running` rows are under way; the same on all ranks of `group`. Collective."""
        room = self.target - running
        if self.exhausted or room <= 0:
            return range(0)
        taken = self._take(room)
        self.exhausted = not taken
        return taken

    def _take(self, count: int) -> range:
        if self.group is None:
            return self.queue.take(count)
        bounds_2 = torch.zeros(2, dtype=torch.int64)
        if dist.get_rank(self.group) == 0:
            taken = self.queue.take(count)
            bounds_2[0], bounds_2[1] = taken.start, taken.stop
        dist.broadcast(bounds_2, group=self.group, group_src=0)
        return range(*bounds_2.tolist())
