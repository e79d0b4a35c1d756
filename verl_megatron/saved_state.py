"""Progress of an RL run: its checkpoints, with the samples collected after the newest one."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from parallel.checkpoint import folders as checkpoints
from parallel.checkpoint import resume
from parallel.checkpoint.folders import CheckpointError
from parallel.rank_set import RankSet
from verl_megatron.config import TrainerConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.learner import Collected
from verl_megatron.lifecycle.progress import Progress
from verl_megatron.manifest import samples_problem, with_present_names
from verl_megatron.observe.metrics import Sums
from verl_megatron.rewards.functions import options_of
from verl_megatron.rollout.sampling import Sampling
from verl_megatron.run import Run
from verl_megatron.separate.remote_sampler import RemoteSampler, Resumed

SAMPLES = "samples"  # attachment of a checkpoint, added in the next iteration
# Settings that samples depend on, too; only other values than the default are recorded.
OTHERS = (
    ("rollout", "adaptive_sampling"),
    ("rollout", "weight_dtype"),
    ("rollout", "kv_cache_dtype"),
    ("reward", "failure_score"),
    ("algorithm", "max_sampling_rounds"),
)


class SavedState(Progress):
    """Completed iterations, validation results and checkpoints. All methods are collective over `run.world`.

    The samples of the next iteration are attached to a checkpoint, so that a run that ends during that
    iteration resumes with the same samples.
    """

    compared = ("policy/", "critic/", "kl/", "reward/mean")
    repeated_on = " on the samples of that time"

    def __init__(self, run: Run, *, say: Callable[[str], None]):
        self.run = run
        self._resumed: Collected | None = None  # samples to resume with
        # The first rank's, because a reward function in Python may be stored under several names.
        self._made = run.world.broadcast_object(_made_by(run))
        super().__init__(
            run.config,
            run.world,
            trainable=run.learner.trainable,
            cursor=run.source.cursor,
            enter=run.residency.enter_training,
            say=say,
        )

    def _manifest(self) -> dict:
        return super()._manifest() | {"kl": self.run.learner.kl.state_dict()}

    def _restore(self, saved: dict) -> None:
        self.run.learner.kl.load_state_dict(saved["kl"])
        self.run.channel.publish(self.step)

    def _rank_state(self) -> dict:
        sampler = self.run.sampler
        in_flight = sampler.state_dict() if isinstance(sampler, RemoteSampler) else {}
        return super()._rank_state() | {"in_flight": in_flight, "made_with": self._made}

    def _restore_rank_state(self, saved: dict) -> None:
        super()._restore_rank_state(saved)
        if isinstance(self.run.sampler, RemoteSampler):
            if in_flight := saved.get("in_flight"):
                usable = "made_with" not in saved or _made_with(saved) == self._made
                self.run.sampler.load_state_dict(in_flight, usable=usable)

    def _restore_other_layout(self, path: Path, num_ranks: int) -> None:
        """Make the samples in flight again, whose owners were ranks of another layout."""
        sampler = self.run.sampler
        if not isinstance(sampler, RemoteSampler):
            return
        state: dict = {}
        if self.world.is_first:
            try:
                states = [resume.read_rank_state(path, rank).get("in_flight") for rank in range(num_ranks)]
                state = sampler.without_samples([each for each in states if each])
            except (OSError, ValueError) as error:
                self.say(f"warning: {error}; prompts whose samples were in flight are left out")
        if state := self.world.broadcast_object(state):
            counts = state["counts"] if self.world.is_first else {}
            sampler.load_state_dict(state | {"counts": counts})

    def done(self, metrics: dict[str, float]) -> None:
        """Count a completed iteration; see `Progress.done`."""
        self._resumed = None
        super().done(metrics)

    # ---- the iteration after a checkpoint ------------------------------------------------------------------

    def keep_samples(self, collected: Collected) -> None:
        """Attach the current iteration's samples to the checkpoint that it starts from, if there is one."""
        if self._newest is None or collected is self._resumed:
            return
        rank_state = {
            "made_with": self._made,
            "batch": collected.batch.tensors(),
            "sums": collected.sums.state_dict(),
            "reshard_bytes": collected.reshard_bytes,
            "seconds": dict(self.run.clock.seconds),
            "cursor": self.cursor.state_dict(),
        }
        if isinstance(self.run.sampler, RemoteSampler):
            rank_state["taken"] = self.run.sampler.spent()
        path = self._newest

        def add(ranks: RankSet) -> None:
            try:
                checkpoints.attach(path, SAMPLES, rank_state, ranks)
            except CheckpointError as error:
                self.say(f"warning: {error}; a run that ends now collects them again")

        self._background.submit(add)

    def collected(self) -> Collected | None:
        """Return the saved samples of the next iteration, once; their time counts towards that iteration."""
        return self._resumed

    def _resume_attached(self, path: Path) -> str:
        self._resume_samples(path)
        self._is_repeated = self._resumed is not None
        return ", with the samples collected for the next" if self._resumed else ""

    def _resume_samples(self, path: Path) -> None:
        attachment = resume.read_attachment(path, SAMPLES, self.world, say=self.say, check=samples_problem)
        if attachment is None or self.step == self.config.run.iterations:
            return
        parts, world_size = attachment
        differs = any(_made_with(part) != self._made for part in parts)
        if any(self.world.all_gather_object(differs)):
            return self.say(
                f"the samples in {path} were collected with other settings of data, rollout or reward, "
                "and are collected again"
            )
        self.cursor.load_state_dict(parts[0]["cursor"])
        self.run.clock.seconds = parts[0]["seconds"]
        batch, sums = RolloutBatch(**parts[0]["batch"]), Sums.from_state(parts[0]["sums"])
        if world_size != self.world.size:  # all samples are read here and redistributed
            batch, sums = (
                _dealt([RolloutBatch(**part["batch"]) for part in parts], self.world),
                _merged([Sums.from_state(part["sums"]) for part in parts], self.world),
            )
        self._resumed = Collected(
            batch=batch, table=self.run.table_of(batch), sums=sums, reshard_bytes=parts[0]["reshard_bytes"]
        )
        if isinstance(self.run.sampler, RemoteSampler):
            resumed = Resumed(num_samples=len(batch), groups=parts[0].get("taken", ()))
            self.run.sampler.begin(self.step + 2, self.cursor.state_dict(), resumed)


def _made_by(run: Run) -> dict:
    """Return the settings that samples depend on; if they change, samples are collected again."""
    config = run.config
    sampling = dataclasses.asdict(Sampling.from_config(config.rollout))
    eos_penalty = [config.reward.missing_eos_penalty] * bool(config.reward.missing_eos_penalty)
    return {
        "data": dataclasses.asdict(config.data),
        "sampling": sampling,
        "reward": [config.reward.function, config.reward.path],
        "reward_options": options_of(config.reward),
        "shaping": [config.reward.overlong_tokens, config.reward.overlong_penalty, *eos_penalty],
        "with_greedy": run.draw.with_greedy,
        "dynamic_sampling": config.algorithm.dynamic_sampling,
        "seed": config.run.seed,
        **{f"{section}.{name}": value for section, name, value in _others(config)},
    }


def _made_with(part: dict) -> dict:
    """Return the settings that saved samples were collected with, under their present names."""
    made = part["made_with"]
    if isinstance(made.get("data"), dict):
        return made | {"data": with_present_names("data", made["data"])}
    return made


def _dealt(batches: list[RolloutBatch], world: RankSet) -> RolloutBatch:
    """Return this rank's share of the samples saved by all ranks of another world size."""
    return RolloutBatch.concatenate(
        [batch.select((batch.sample_id % world.size == world.rank).nonzero().squeeze(1)) for batch in batches]
    )


def _merged(parts: list[Sums], world: RankSet) -> Sums:
    """Merge all sums on the first rank; empty on others."""
    sums = Sums()
    for part in parts if world.is_first else []:
        sums.merge(part)
    return sums


def _others(config: TrainerConfig) -> Iterator[tuple[str, str, Any]]:
    """Yield section, name and value of each of `OTHERS` that is not the default."""
    default = TrainerConfig()
    for section, name in OTHERS:
        value = getattr(getattr(config, section), name)
        if value != getattr(getattr(default, section), name):
            yield section, name, value
