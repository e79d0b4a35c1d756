"""What the training loop takes for frozen models that have ranks of their own.

Letters: O samples owned by this rank, T token positions.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial

from torch import Tensor

from parallel.bridge import BridgeLostError, together
from parallel.layout import Layout
from verl_megatron.config import TrainerConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.sample_table import SampleTable
from verl_megatron.model_specs import layout_of, models_of_world, scores_ahead, scoring_worlds
from verl_megatron.observe.metrics import Sums
from verl_megatron.roles.role import RemoteRole, token_fields
from verl_megatron.rollout.sampler import Sampler
from verl_megatron.separate.remote_sampler import Follower, RemoteSampler
from verl_megatron.separate.roster import Meeting, Roster
from verl_megatron.separate.scoring.jobs import Job
from verl_megatron.separate.scoring.link import Asked, ScoringLink


class ScoringFleet(Roster[ScoringLink]):
    """The scoring worlds. Construction waits for all; one that ends is waited for when it is needed.

    Jobs whose results are missing are asked again of the world that follows.
    """

    def __init__(self, config: TrainerConfig, meeting: Meeting):
        super().__init__(meeting, scoring_worlds(config))
        self.config = config
        self._layouts: list[Mapping[str, Layout]] = []
        self._asked: list[dict[str, Asked]] = []  # jobs without results by place and name, as they were asked
        for world in self.worlds:
            specs = models_of_world(config, world)
            self._layouts.append({spec.name: layout_of(spec.model, len(world.ranks)) for spec in specs})
            self._asked.append({})
        self.admit(until=lambda: len(self.links) == len(self.worlds))

    def close(self) -> None:
        """Let all worlds end, those of the rollout before; training meets none any more."""
        super().close()
        self._meeting.close()

    @property
    def models(self) -> list[str]:
        """Names of all models."""
        return [name for layouts in self._layouts for name in layouts]

    def place_of(self, model: str) -> int:
        """Return the place of the world that has a model."""
        return next(place for place, layouts in enumerate(self._layouts) if model in layouts)

    def _connect(self, place: int, number: int) -> ScoringLink:
        served_by, layouts = self.worlds[place], self._layouts[place]
        return ScoringLink(self._meeting, served_by, layouts, number=number, wait=self.work)

    def begin(self, asked: Asked) -> None:
        """Ask for a job; returns at once."""
        place = self.place_of(asked.job.model)
        self._asked[place][asked.job.name] = asked
        self._give(place, asked)

    def _give(self, place: int, asked: Asked) -> None:
        try:
            if place in self.links:
                self.links[place].begin(asked)
        except BridgeLostError:
            pass  # noticed on all ranks when its results are received

    def drop(self, asked: Asked) -> None:
        """Forget a job that not all ranks have asked for."""
        place = self.place_of(asked.job.model)
        self._asked[place].pop(asked.job.name, None)
        with suppress(BridgeLostError):
            if place in self.links:
                self.links[place].drop(asked.job.name)

    def receive(self, asked: Asked) -> tuple[dict[str, Tensor], float]:
        """Wait for a job's results; as of `ScoringLink.receive`. Collective over the training world."""
        place, since = self.place_of(asked.job.model), time.perf_counter()
        while True:
            for joined in self.admit(until=lambda: place in self.links):
                waited = f"training has waited {time.perf_counter() - since:.1f} s"
                self.say_joined(joined, f"{waited}, and missing scores are computed again")
                for missing in self._asked[joined].values():
                    self._give(joined, missing)
            try:
                results = together(self.world, partial(self.links[place].receive, asked))
            except BridgeLostError as error:
                self.lose(place, str(error))
                continue
            del self._asked[place][asked.job.name]
            return results


class RemoteScorer(RemoteRole):
    """A frozen model of a scoring world.

    Args:
        outputs: of its head, "logprobs" or "values".
    """

    def __init__(self, fleet: ScoringFleet, name: str, outputs: tuple[str, ...], *, last_token: bool):
        self._fleet, self._name, self._outputs, self._last_token = fleet, name, outputs, last_token
        self._asked: Asked | None = None
        # By iteration, whose samples have arrived before it began, with the deal that made them.
        self._early: dict[int, tuple[int, Asked]] = {}
        self._count = 0  # jobs
        self._waited_s = self._seconds = 0.0

    def begin_early(self, iteration: int, batch: RolloutBatch, deal: int) -> None:
        """Start the pass of an iteration as soon as this rank has its samples; arguments as of `Follower`."""
        known, asked = self._early.get(iteration, (-1, None))
        if known == deal:
            return
        if asked is not None:  # other ranks may never ask for it: their samples were made again
            self._fleet.drop(asked)
        num_mini_batches = self._fleet.config.algorithm.num_mini_batches
        self._early[iteration] = deal, self._ask(f"iteration {iteration}/{deal}", batch, num_mini_batches)

    def take_early(self, iteration: int, batch: RolloutBatch, deal: int) -> None:
        """Take the pass that was started before the iteration began, or start it.

        Collective over the training world: samples that were made again may differ in their last bits.
        """
        self.begin_early(iteration, batch, deal)
        _, asked = self._early.pop(iteration)
        known, found = asked.batch.generated_ids, batch.generated_ids
        is_same = known.shape == found.shape and bool((known == found).all())
        if all(self._fleet.world.all_gather_object(is_same)):
            self._asked = asked
        else:
            self._fleet.receive(asked)  # nobody waits for it any more

    def begin(self, batch: RolloutBatch, table: SampleTable) -> None:
        if self._asked is None:
            self._count += 1
            self._asked = self._ask(str(self._count), batch, len(table.mini_batches))

    def _ask(self, name: str, batch: RolloutBatch, num_mini_batches: int) -> Asked:
        engine = self._fleet.config.engine
        job = Job(
            name=f"{self._name}/{name}",
            model=self._name,
            outputs=self._outputs,
            last_token=self._last_token,
            num_mini_batches=num_mini_batches,
            shared_prompts=engine.shared_prompts,
        )
        names = ("sample_id", "is_cut", "group_id", *token_fields(engine))
        fields = {name: value for name, value in batch.tensors().items() if name in names}
        no_prompts = batch.input_ids[:, :0]  # they are in generated_ids, too
        asked = Asked(job=job, batch=RolloutBatch(input_ids=no_prompts, **fields))
        self._fleet.begin(asked)
        return asked

    def infer(
        self, batch: RolloutBatch, table: SampleTable, names: Sequence[str], *, last_token: bool = False
    ) -> dict[str, Tensor]:
        assert tuple(names) == self._outputs and last_token == self._last_token
        self.begin(batch, table)
        asked, since = self._asked, time.perf_counter()
        assert asked is not None and asked.batch.sample_id.equal(batch.sample_id)
        self._asked = None
        results, seconds = self._fleet.receive(asked)
        self._waited_s += time.perf_counter() - since
        self._seconds += seconds
        return results

    def add_metrics(self, sums: Sums) -> None:
        sums.add(f"async/{self._name}_wait_s", self._waited_s, 1)
        sums.max(f"async/{self._name}_s", self._seconds)
        self._waited_s = self._seconds = 0.0


class Ahead(Follower):
    """Lets scoring worlds work on samples that wait for their iteration."""

    def __init__(self, scorers: Collection[RemoteScorer]):
        self._scorers = scorers

    def arrived(self, iteration: int, batch: RolloutBatch, deal: int) -> None:
        for scorer in self._scorers:
            scorer.begin_early(iteration, batch, deal)

    def collected(self, iteration: int, batch: RolloutBatch, deal: int) -> None:
        for scorer in self._scorers:
            scorer.take_early(iteration, batch, deal)


def remote_scorers(fleet: ScoringFleet, sampler: Sampler | RemoteSampler) -> dict[str, RemoteScorer]:
    """Return what stands for each model of the scoring worlds, by name.

    Args:
        sampler: tells which samples have arrived ahead of their iteration.
    """
    scorers = {}
    for name in fleet.models:
        scores = name == "reward"
        outputs = ("values",) if scores else ("logprobs",)
        scorers[name] = RemoteScorer(fleet, name, outputs, last_token=scores)
    if isinstance(sampler, RemoteSampler) and scores_ahead(fleet.config):
        sampler.follower = Ahead(scorers.values())
    return scorers
