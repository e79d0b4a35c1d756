"""What stands for the rollout worlds' samplers in the training world, and what becomes of the samples."""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import Tensor

from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.order.cursor import PromptCursor
from verl_megatron.data.prompts import TrainingPrompts
from verl_megatron.observe.metrics import Sums
from verl_megatron.observe.rates import Rates
from verl_megatron.rewards.pool import RewardPool
from verl_megatron.rollout.sampler import Draw, KeepGroup, PromptSource
from verl_megatron.separate.fleet import Fleet


@dataclass(kw_only=True)
class Counts:
    """What has become of this rank's training samples since the run began.

    Each sample that has arrived was trained on, was dropped, or is in flight: waits for its iteration.
    """

    sampled: int = 0
    trained: int = 0
    dropped: int = 0  # by dynamic sampling, or older than allowed after a resumption
    dropped_tokens: int = 0  # response tokens of these

    def add(self, resumed: "Resumed") -> None:
        """Count the samples of a collection that a checkpoint holds: the next iteration trains on them."""
        self.sampled += resumed.num_samples
        self.trained += resumed.num_samples

    def drop(self, samples: int, tokens: int) -> None:
        """Count samples that nobody trains on, and their response tokens."""
        self.dropped += samples
        self.dropped_tokens += tokens

    def check(self, in_flight: int) -> None:
        """Raise a RuntimeError if a sample was lost or is counted twice."""
        if self.sampled != self.trained + self.dropped + in_flight:
            raise RuntimeError(
                f"{self.sampled} samples were made; {self.trained} were trained on, {self.dropped} dropped"
                f" and {in_flight} are in flight: samples were lost or used twice"
            )


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A collection that a checkpoint holds."""

    num_samples: int = 0  # of this rank
    groups: Sequence[int] = ()  # as of `RemoteSampler.spent`


NOTHING = Resumed()


class Follower(Protocol):
    """Works on samples that arrive before their iteration begins."""

    def arrived(self, iteration: int, batch: RolloutBatch, deal: int) -> None:
        """This rank has its samples of an iteration.

        Args:
            deal: another number on all ranks once some of the samples are made again.
        """

    def collected(self, iteration: int, batch: RolloutBatch, deal: int) -> None:
        """The iteration begins, on all ranks; arguments as of `arrived`."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a run's iterations ask of the rollout worlds."""

    draw: Draw  # of an iteration
    cursor: PromptCursor  # of the training prompts; orders name where to draw from
    max_staleness: int  # weight syncs that samples may lag behind
    last: int  # iteration of the run
    sync_interval: int = 1  # iterations between weight syncs


class RemoteSampler(ABC):
    """Stands for the rollout worlds' samplers. All methods are collective over the training world."""

    pool: RewardPool | None = None  # the reward workers are in the rollout worlds

    def __init__(self, fleet: Fleet, demand: Demand):
        self._fleet, self._draw, self.world = fleet, demand.draw, fleet.world
        self._ahead = demand.cursor.fork()  # where the next order draws from
        self._max_staleness, self._last = demand.max_staleness, demand.last
        self._newest = 0  # published version
        self._rates = Rates(self.world)
        self._counts = Counts()
        self._dealt_again = (
            0  # prompts whose samples a world that ended has not made, since the last collection
        )
        self._iteration = 0  # of the last collection; 0: validation's
        self._untrained = 0  # this rank's samples of it that are not trained on
        self.scores_of_group: list[list[float]] = []  # as of `Sampler`: the batch has them all
        self.follower: Follower | None = None

    @abstractmethod
    def needs(self, version: int) -> bool:
        """Whether samples will be made with this version."""

    def published(self, version: int, *, is_sent: bool) -> None:
        """Order what this version is for.

        Args:
            is_sent: to the rollout worlds.
        """
        self._newest, self._untrained = version, 0

    def collect(
        self,
        source: PromptSource,
        draw: Draw,
        *,
        iteration: int,
        version: int,
        keep_group: KeepGroup | None = None,
    ) -> RolloutBatch:
        """Receive this rank's share of an iteration's samples; arguments and result as of `Sampler.collect`.

        Args:
            source: the training prompts; any other stands for the validation prompts.
            version: of the weights that validation uses.
            keep_group: not read: the run's demand says how prompts are chosen.
        """
        self._iteration = iteration
        if not isinstance(source, TrainingPrompts):
            return self._collect_validation(draw, version)
        batch = self._collect_training(source.cursor)
        self._untrained = len(batch)
        self._counts.trained += len(batch)
        self._counts.check(self._in_flight())
        return batch

    @abstractmethod
    def _collect_training(self, cursor: PromptCursor) -> RolloutBatch:
        """Receive this rank's samples of the present iteration; move `cursor` behind their prompts."""

    @abstractmethod
    def _collect_validation(self, draw: Draw, version: int) -> RolloutBatch:
        """Receive this rank's samples of the validation prompts, made with weights of this version."""

    @abstractmethod
    def score(self, batch: RolloutBatch, sums: Sums) -> Tensor:
        """Return the rewards of the last collection, [B] float32; 0 without a reward function."""

    @abstractmethod
    def begin(self, iteration: int, cursor: dict[str, Any], resumed: Resumed = NOTHING) -> None:
        """Order the first samples.

        Args:
            iteration: the next one to collect.
            cursor: where to draw its prompts from.
            resumed: the collection of the iteration before.
        """

    def spent(self) -> list[int]:
        """Return the numbers of groups that nobody needs any more, where it is not known which they are.

        These are the groups of the last collection, and those that were dropped since the one before it.
        """
        return []

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs of samples in flight on this rank.

        It is that before the last collection, if this is not trained on: a checkpoint is of the end of an
        iteration.
        """

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any], *, usable: bool = True) -> None:
        """Go on with the samples of a checkpoint, unless they are older than allowed now.

        Args:
            usable: whether samples would be made alike now; if not, they are made again.
        """

    def without_samples(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return one state for `load_state_dict` from those of all ranks of another layout.

        It has no samples: those in flight are made again. The counts are of all ranks together. Empty without
        states.
        """
        if not states:
            return {}
        counts = Counter[str]()
        for state in states:
            counts.update(state["counts"])
        made = {"sampled": counts["trained"] + counts["dropped"]}
        return self._emptied(states[0]) | {"counts": dict(counts) | made}

    @abstractmethod
    def _emptied(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state without its samples; that of another async.buffer as it is."""

    def _saved_counts(self) -> dict[str, int]:
        """Return the counts for `state_dict`."""
        return asdict(self._counts) | {"trained": self._counts.trained - self._untrained}

    @abstractmethod
    def _in_flight(self) -> int:
        """This rank's training samples that have arrived and wait for their iteration."""

    def _add_rate(self, place: int, replica: int, *, tokens: int, seconds: float) -> None:
        """Note what a replica of a world has made."""
        name = f"replica {replica} of the {self._fleet.worlds[place].name} world"
        self._rates.add(name, tokens=tokens, seconds=seconds)

    def _add_counts(self, sums: Sums) -> None:
        """Add what was counted since the iteration before, validations included."""
        if not self._iteration:
            return
        sums.add("async/dealt_again", self._dealt_again, 1)
        sums.add("async/worlds_lost", self._fleet.num_ended, 1)
        self._dealt_again = self._fleet.num_ended = 0
        self._rates.review(sums)
        self._add_transfers(sums)
        share = 1 / self.world.size  # the sums of all ranks
        counts = asdict(self._counts) | {"in_flight": self._in_flight()}
        sums.add("async/tokens_dropped", counts.pop("dropped_tokens"), share)
        for name, count in counts.items():
            sums.add(f"async/samples_{name}", count, share)

    def _add_transfers(self, sums: Sums) -> None:
        """Add how long weights and samples were on their way."""
        links = self._fleet.links.values()
        sums.max("async/weights_transfer_s", max((link.transfer_s for link in links), default=0.0))
        # Those that came earlier were on their way while others were still generated.
        sums.max("async/sample_transfer_s", sum(link.received_s for link in links))

    def _joined(self, joined: Sequence[int], since: float | None = None) -> Sequence[int]:
        """Say that worlds have joined; return their places.

        Args:
            since: since when training has waited for samples of a world that was lost.
        """
        for place in joined:
            said = "it generates"
            if since is not None:
                waited = f"training has waited {time.perf_counter() - since:.1f} s"
                said = f"{waited}, and missing samples are made again"
            self._fleet.say_joined(place, said)
        return joined
