"""A scoring world: computes what training asks of its frozen models, job after job."""

import pickle
import time
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from parallel.bridge import POLL_S, Bridge, together
from parallel.parcels import Outbox, Parcels
from parallel.rank_set import RankSet
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.sample_table import SampleTable
from verl_megatron.observe.activity import ActivityLog
from verl_megatron.roles.inference import infer_models
from verl_megatron.roles.role import DispatchedBatch, Role
from verl_megatron.separate.orders import STOP
from verl_megatron.separate.scoring.jobs import (
    Job,
    Scores,
    answering_rank,
    columns_key,
    job_key,
    scores_label,
    turn_key,
)

Work = tuple[Job, SampleTable, DispatchedBatch]  # and the samples that this rank works on


class ScoringServer:
    """Does the jobs of one bridge. Construction is collective over both worlds, all else over the scoring.

    Args:
        world: all ranks of the scoring world.
        roles: its models by name.
        beat: called again and again while this rank waits.
    """

    def __init__(
        self,
        world: RankSet,
        roles: Mapping[str, Role],
        bridge: Bridge,
        *,
        beat: Callable[[], None],
        activity: ActivityLog,
    ):
        self._world, self._roles, self._bridge, self._beat = world, roles, bridge, beat
        self._activity = activity
        self._parcels = Parcels(bridge, "scores")
        self._outbox = Outbox()  # training takes results when it needs them
        self._waiting: dict[int, Job] = {}  # jobs that nobody has begun, on the first rank
        self._num_jobs = 0  # that have been asked for

    def serve(self) -> None:
        """Do jobs until the training world ends.

        Raises:
            BridgeLostError: it ended by a fault.
        """
        turn = 0
        try:
            while (found := self._agreed(turn)) is not None:
                answers = self._do(*found)
                together(self._world, partial(self._answer, found[0], answers))
                turn += 1
        finally:
            self._outbox.close()

    def _agreed(self, turn: int) -> Work | None:
        """Return the next job and its samples for this rank; None on all ranks at the end."""
        found = together(self._world, partial(self._next, turn))
        return found if all(self._world.all_gather_object(found is not None)) else None

    def _next(self, turn: int) -> Work | None:
        """Wait for the next job and its samples for this rank; None at the end."""
        bridge = self._bridge
        self._activity.enter()
        while not bridge.has(turn_key(turn)):
            if bridge.has(STOP):
                return None
            if self._world.is_first and (job := self._choose()) is not None:
                bridge.put(turn_key(turn), pickle.dumps(job))
                bridge.drop(turn_key(turn - 2))  # all have begun the one after it
                continue
            self._outbox.check()
            self._beat()
            time.sleep(POLL_S)
        job = pickle.loads(bridge.value(turn_key(turn)))
        keys = [columns_key(job.name, rank) for rank in bridge.training_ranks]
        columns = [pickle.loads(bridge.value(key)) for key in keys]
        table = job.table_of(columns)
        samples = self._receive(job, table, columns)
        return None if samples is None else (job, table, samples)

    def _choose(self) -> Job | None:
        """Return the first job whose samples are all known; None if there is none yet."""
        bridge = self._bridge
        while bridge.has(job_key(self._num_jobs)):
            self._waiting[self._num_jobs] = pickle.loads(bridge.value(job_key(self._num_jobs)))
            self._num_jobs += 1
        for number, job in self._waiting.items():
            if all(bridge.has(columns_key(job.name, rank)) for rank in bridge.training_ranks):
                return self._waiting.pop(number)
        return None

    def _receive(self, job: Job, table: SampleTable, columns: list[Tensor]) -> DispatchedBatch | None:
        """Receive what this rank works on from the owners; None if the run ends before they have sent it."""
        role = self._roles[job.model]
        layout = role.engine.layout
        dp_B = table.assign(layout.dp)
        own = layout.coordinates(self._world.global_rank).dp
        owners = [rank for rank, (sample_id, *_) in enumerate(columns) if (dp_B[sample_id] == own).any()]
        parts = []
        for rank in owners:
            while not self._parcels.has_come(source=rank, label=job.name):
                if self._bridge.has(STOP):
                    return None
                self._beat()
                time.sleep(POLL_S)
            parts.append(self._parcels.receive(source=rank, label=job.name))
        here = RolloutBatch.concatenate(parts) if parts else RolloutBatch.from_lists([], [], [])
        fields = {name: value for name, value in here.tensors().items() if name != "input_ids"}
        return role.arrived(fields, table, dp_B)

    def _do(self, job: Job, table: SampleTable, samples: DispatchedBatch) -> dict[int, Scores]:
        """Compute a job; return what to send to each owner, empty on ranks that do not answer."""
        begin, role = time.perf_counter(), self._roles[job.model]
        self._activity.enter("reward" if job.model == "reward" else "log_probs")
        flat = [micro for mini_batch in samples.micro_batches for micro in mini_batch]
        (outputs,) = infer_models([role.engine], samples.batch, flat, job.outputs, last_token=job.last_token)
        layout, rank = role.engine.layout, self._world.global_rank
        if outputs is None or rank != answering_rank(layout, layout.coordinates(rank).dp):
            return {}
        seconds, sample_id = time.perf_counter() - begin, samples.batch.sample_id
        owner_W, found = table.owner_B[sample_id], {}
        for owner in owner_W.unique().tolist():
            place = (owner_W == owner).nonzero().squeeze(1)
            own = {name: outputs[name][place] for name in job.outputs}
            found[owner] = Scores(sample_id=sample_id[place], outputs=own, seconds=seconds)
        return found

    def _answer(self, job: Job, answers: dict[int, Scores]) -> None:
        for owner, scores in answers.items():
            self._parcels.post(self._outbox, scores, to=owner, label=scores_label(job.name))
