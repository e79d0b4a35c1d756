"""The training world's link to one scoring world: a bridge with its jobs, samples and results.

Letters: O samples owned by this rank, T token positions.
"""

import gc
import pickle
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from parallel.bridge import Bridge, BridgeLostError
from parallel.layout import Layout
from parallel.parcels import Outbox, Parcels
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.collector import pad_to
from verl_megatron.data.sample_table import SampleTable, columns_of
from verl_megatron.model_specs import ServingWorld
from verl_megatron.separate.orders import STOP
from verl_megatron.separate.roster import Meeting
from verl_megatron.separate.scoring.jobs import (
    Job,
    Scores,
    answering_rank,
    columns_key,
    job_key,
    scores_label,
    workers_of,
)

KEPT = 4  # jobs whose keys stay in the store after their end; no rank is as far behind


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A job with this rank's samples."""

    job: Job
    batch: RolloutBatch  # what every pass needs, of the samples owned by this rank


class ScoringLink:
    """The exchange with a scoring world over one bridge, until either world ends.

    Construction is collective over both worlds.

    Args:
        layouts: of the world's models by name, on its ranks counted from 0.
        number: of the bridge.
        wait: called again and again while this rank waits.

    Raises:
        BridgeLostError: the scoring world ended meanwhile.
    """

    def __init__(
        self,
        meeting: Meeting,
        served_by: ServingWorld,
        layouts: Mapping[str, Layout],
        *,
        number: int,
        wait: Callable[[], None],
    ):
        self._layouts, self.served_by = layouts, served_by
        self.bridge = Bridge.join(
            meeting.world,
            meeting.store,
            served_by.name,
            num_other=len(served_by.ranks),
            number=number,
            wait=wait,
        )
        with self.bridge.abandoned_if_lost():
            self.bridge.agree_on(meeting.settings)
            self._parcels = Parcels(self.bridge, "scores")
        self._outbox = Outbox()
        self._tables: dict[str, SampleTable | None] = {}  # by name of the job; None: it is not known yet
        self._dropped: set[str] = set()  # names of jobs
        self._told: dict[str, list[str]] = {}  # keys in the store by name of the job
        self._done: deque[str] = deque()  # names of jobs whose keys are still there
        self._num_jobs = 0
        self.has_served = False

    def begin(self, asked: Asked) -> None:
        """Ask for a job; its samples are sent in the background.

        Raises:
            BridgeLostError: the scoring world has ended.
        """
        job, bridge, number = asked.job, self.bridge, self._num_jobs
        self._num_jobs += 1
        columns = columns_of(asked.batch, owner=bridge.rank)
        told: dict[str, object] = {columns_key(job.name, bridge.rank): columns}
        if bridge.rank == 0:
            told[job_key(number)] = job
        for key, value in told.items():
            bridge.put(key, pickle.dumps(value))
        self._told[job.name] = list(told)
        self._tables[job.name] = None
        self._outbox.add(partial(self._send, asked))

    def drop(self, job: str) -> None:
        """Forget a job whose results nobody wants; ranks that have not asked for it never will."""
        self._dropped.add(job)

    def _send(self, asked: Asked) -> bool:
        """Send this rank's samples to the ranks that work on them, once the table of all is known."""
        job, bridge = asked.job, self.bridge
        is_dropped = job.name in self._dropped
        keys = [columns_key(job.name, rank) for rank in bridge.training_ranks]
        if not all(bridge.has(key) for key in keys):
            return is_dropped  # nobody begins it
        table = job.table_of([pickle.loads(bridge.value(key)) for key in keys])
        layout = self._layouts[job.model]
        dp_B = table.assign(layout.dp)
        for dp in range(layout.dp):
            index = (dp_B[asked.batch.sample_id] == dp).nonzero().squeeze(1)
            if not len(index):
                continue
            samples = asked.batch.select(index)
            for rank in workers_of(layout, dp):
                self._parcels.post(self._outbox, samples, to=bridge.serving_ranks[rank], label=job.name)
        self._tables[job.name] = table
        return True

    def receive(self, asked: Asked) -> tuple[dict[str, Tensor], float]:
        """Wait for a job's results, [O, T] float32 by name, and the seconds that the model has computed.

        Raises:
            BridgeLostError: the scoring world has ended.
        """
        job, batch, bridge = asked.job, asked.batch, self.bridge
        if job.name not in self._tables:
            raise BridgeLostError(f"the {self.served_by.name} world has ended")  # when it was asked
        while (table := self._tables[job.name]) is None:
            self._outbox.check()
            bridge.check()
            bridge.pause()
        del self._tables[job.name]
        layout = self._layouts[job.model]
        dp_B = table.assign(layout.dp)
        outputs = {name: torch.zeros(batch.generated_ids.shape) for name in job.outputs}
        order, seconds = batch.sample_id.argsort(), 0.0
        for dp in dp_B[batch.sample_id].unique().tolist():
            source = bridge.serving_ranks[answering_rank(layout, dp)]
            scores: Scores = self._parcels.receive(source=source, label=scores_label(job.name))
            place = order[torch.searchsorted(batch.sample_id[order], scores.sample_id)]
            for name in job.outputs:
                outputs[name][place] = pad_to(scores.outputs[name], batch.generated_ids.size(1))
            seconds = max(seconds, scores.seconds)
            self.has_served = True
        self._forget(job.name)
        return outputs, seconds

    def _forget(self, job: str) -> None:
        """Drop the keys of an earlier job, which no rank reads any more."""
        self._done.append(job)
        while len(self._done) > KEPT:
            for key in self._told.pop(self._done.popleft()):
                self.bridge.drop(key)

    def abandon(self) -> None:
        """Let go of a scoring world that is lost."""
        self._outbox.close()
        self.bridge.abandon()
        del self._parcels
        gc.collect()  # closes the connections of the old groups

    def close(self) -> None:
        """Let the scoring world end."""
        try:
            if self.bridge.rank == 0:
                self.bridge.put(STOP, b"")
            self.bridge.await_leaving()  # it may still receive what the outbox has announced
        except BridgeLostError:
            pass  # it has ended, which is what is wanted
        self._outbox.close()
