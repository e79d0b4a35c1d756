"""The training world's link to one scoring world: a bridge with its jobs, samples and results.

Letters: O samples owned by this rank, T token positions.
"""

import gc
import pickle
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.bridge import Bridge, BridgeLostError
from parallel.layout import Layout
from parallel.parcels import Parcels
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

KEPT = 8  # jobs whose keys stay in the store after their end; no rank is as far behind


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

    Raises:
        BridgeLostError: the scoring world ended meanwhile.
    """

    def __init__(
        self, meeting: Meeting, served_by: ServingWorld, layouts: Mapping[str, Layout], *, number: int
    ):
        self._layouts, self.served_by = layouts, served_by
        self.bridge = Bridge.join(
            meeting.world,
            meeting.store,
            served_by.name,
            num_other=len(served_by.ranks),
            number=number,
            wait=meeting.beat,
        )
        self._parcels = Parcels(self.bridge, "scores")
        self._sender = ThreadPoolExecutor(1, "samples")
        self._sent: dict[str, Future[SampleTable]] = {}  # by name of the job
        self._told: deque[str] = deque()  # keys in the store
        self._num_jobs = 0
        self.has_served = False

    def begin(self, asked: Asked) -> None:
        """Ask for a job; its samples are sent in the background.

        Raises:
            BridgeLostError: the scoring world has ended.
        """
        job, bridge, number = asked.job, self.bridge, self._num_jobs
        self._num_jobs += 1
        self._tell(columns_key(job.name, bridge.rank), columns_of(asked.batch, owner=bridge.rank))
        if bridge.rank == 0:
            self._tell(job_key(number), job)
        self._sent[job.name] = self._sender.submit(self._send, asked)

    def _tell(self, key: str, value: object) -> None:
        self.bridge.put(key, pickle.dumps(value))
        self._told.append(key)
        while len(self._told) > 2 * KEPT:
            self.bridge.drop(self._told.popleft())

    def _send(self, asked: Asked) -> SampleTable:
        """Send this rank's samples to the ranks that work on them; return the table of all."""
        job, bridge = asked.job, self.bridge
        keys = [columns_key(job.name, rank) for rank in bridge.training_ranks]
        table = job.table_of([pickle.loads(bridge.value(key)) for key in keys])
        layout = self._layouts[job.model]
        dp_B = table.assign(layout.dp)
        for dp in range(layout.dp):
            index = (dp_B[asked.batch.sample_id] == dp).nonzero().squeeze(1)
            if not len(index):
                continue
            samples = asked.batch.select(index)
            for rank in workers_of(layout, dp):
                self._parcels.send(samples, to=bridge.serving_ranks[rank], label=job.name)
        return table

    def receive(self, asked: Asked) -> tuple[dict[str, Tensor], float]:
        """Wait for a job's results, [O, T] float32 by name, and the seconds that the model has computed.

        Raises:
            BridgeLostError: the scoring world has ended.
        """
        job, batch, bridge = asked.job, asked.batch, self.bridge
        if job.name not in self._sent:
            raise BridgeLostError(f"the {self.served_by.name} world has ended")  # when it was asked
        while not self._sent[job.name].done():
            bridge.check()
            bridge.pause()
        layout = self._layouts[job.model]
        dp_B = self._sent.pop(job.name).result().assign(layout.dp)
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
        return outputs, seconds

    def abandon(self) -> None:
        """Let go of a scoring world that is lost."""
        self._sender.shutdown(wait=False, cancel_futures=True)
        self.bridge.abandon()
        del self._parcels
        gc.collect()  # closes the connections of the old groups

    def close(self) -> None:
        """Let the scoring world end."""
        self._sender.shutdown(wait=False, cancel_futures=True)
        try:
            if self.bridge.rank == 0:
                self.bridge.put(STOP, b"")
        except BridgeLostError:
            pass  # it has ended, which is what is wanted
