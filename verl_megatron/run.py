"""Components of a run and their construction: process groups, vLLM, models, data, rewards."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from parallel import device
from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.placement import place
from parallel.rank_set import RankSet
from parallel.reshard.plan import Plan
from parallel.runtime.watchdog import Watchdog
from parallel.weights.architecture import Architecture, read_architecture
from verl_megatron.algorithms import get_algorithm
from verl_megatron.algorithms.correction import with_correction
from verl_megatron.algorithms.kl import make_controller
from verl_megatron.config import TrainerConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.order.curriculum import CurriculumCursor
from verl_megatron.data.prompts import PromptDataset, TrainingPrompts
from verl_megatron.data.sample_table import SampleTable
from verl_megatron.data.tokenizer import Tokenizer
from verl_megatron.learner import Learner
from verl_megatron.model_specs import (
    ModelSpec,
    has_worlds,
    is_separate,
    layout_of,
    models_of,
    samples_at_most,
)
from verl_megatron.observe.metrics import OVERLONG_PENALTY, PhaseTimer, Sums
from verl_megatron.observe.sources import Sources
from verl_megatron.preflight import Inputs
from verl_megatron.residency import Residency
from verl_megatron.rewards.plan import is_routed
from verl_megatron.rewards.shaping import has_variance, lacks_eos, overlong_penalty, take_baselines
from verl_megatron.roles.compute import rollout_dtype
from verl_megatron.roles.engine import Engine, EngineOptions
from verl_megatron.roles.role import Role, Training, make_role
from verl_megatron.roles.token_budget import LongestRows
from verl_megatron.rollout.adaptive import add_shares, parse_table
from verl_megatron.rollout.curriculum import Curriculum
from verl_megatron.rollout.engine import RolloutEngine, num_replicas
from verl_megatron.rollout.sampler import Draw, KeepGroup, Sampler, make_reward_pool
from verl_megatron.rollout.sampling import Sampling
from verl_megatron.rollout.vllm import Colocation, VLLMActor
from verl_megatron.rollout.weights import ColocatedChannel, WeightSync
from verl_megatron.separate.fleet import Fleet
from verl_megatron.separate.remote_sampler import RemoteSampler
from verl_megatron.separate.roster import Meeting
from verl_megatron.separate.scoring.side import ScoringFleet, remote_scorers
from verl_megatron.separate.training_side import RemoteEngine, SeparateChannel, rollout_side


@dataclass(kw_only=True)
class Run:
    """Components of a run."""

    config: TrainerConfig
    world: RankSet
    tokenizer: Tokenizer
    source: TrainingPrompts
    draw: Draw  # sampling plan of an iteration
    keep_group: KeepGroup | None  # dynamic sampling: which prompts to train on; None: all
    validation: PromptDataset | None
    sources: Sources  # of the prompts
    engine: RolloutEngine | RemoteEngine
    sampler: Sampler | RemoteSampler
    curriculum: Curriculum | None
    channel: ColocatedChannel | SeparateChannel
    residency: Residency
    scoring: ScoringFleet | None  # worlds of frozen models
    learner: Learner
    clock: PhaseTimer
    built: dict[str, float]  # build time of each component, seconds
    plan: Plan  # weight-sync plan

    def table_of(self, batch: RolloutBatch) -> SampleTable:
        """Gather the table of the iteration's samples from all ranks. Collective over `world`."""
        mini_batches, shared = self.config.algorithm.num_mini_batches, self.config.engine.shared_prompts
        return SampleTable.gather(batch, self.world, num_mini_batches=mini_batches, shared_prompts=shared)

    def shape_rewards(
        self, batch: RolloutBatch, table: SampleTable, sums: Sums
    ) -> tuple[RolloutBatch, SampleTable]:
        """Apply the penalties of responses and take the baselines' samples out. Collective over the world."""
        reward, max_tokens = self.config.reward, self.config.rollout.max_tokens
        lacks_eos_B = lacks_eos(batch, self.tokenizer.end_token_ids)
        sums.add("rollout/no_eos_fraction", lacks_eos_B.sum(), len(batch))
        if reward.missing_eos_penalty:
            batch.rewards = batch.required("rewards") - reward.missing_eos_penalty * lacks_eos_B
        if reward.overlong_tokens:
            penalty_B = reward.overlong_penalty * overlong_penalty(
                batch.response_mask.sum(1), max_tokens=max_tokens, overlong_tokens=reward.overlong_tokens
            )
            batch.rewards = batch.required("rewards") + penalty_B
            sums.add(OVERLONG_PENALTY, penalty_B.sum(), len(penalty_B))
        if self.draw.with_greedy:
            batch = take_baselines(batch, sums, num_groups=table.num_groups, all_sum=self.world.all_sum)
            table = self.table_of(batch)
        add_shares(self.draw.table, batch, sums)
        return batch, table

    def used_memory(self) -> dict[str, int]:
        """Return bytes in use after each phase, maximum over ranks. Collective over `world`."""
        phases = self.clock.memory_bytes
        used = torch.tensor([float(value) for value in phases.values()], dtype=torch.float64)
        fullest = self.world.all_max(used)
        return dict(zip(phases, map(int, fullest.tolist())))

    def close(self, *, failed: bool = False) -> None:
        """Stop the reward workers, free the engine and let other worlds end. Collective, unless `failed`.

        Args:
            failed: as of `BaseTrainer.close`.
        """
        if self.sampler.pool is not None:
            self.sampler.pool.close()
        if not (failed and isinstance(self.engine, RemoteEngine)):
            self.engine.close()
        if self.scoring is not None and not failed:
            self.scoring.close()


def build_run(config: TrainerConfig, inputs: Inputs, watchdog: Watchdog, world: RankSet) -> Run:
    """Build all components of a run. Collective over `world`.

    Args:
        inputs: the files that `inspect_run` has read.
        watchdog: receives the run's phases and progress.
    """
    meeting = Meeting(config, world, watchdog.beat) if has_worlds(config) else None
    progress = watchdog.beat if meeting is None else meeting.work
    models = _Models(config, world, progress=progress, validation=len(inputs.validation or ()))
    source = TrainingPrompts(inputs.train, inputs.train.cursor(seed=config.run.seed))
    draw = _draw_of(config)
    generation = (
        _colocated(config, models, inputs, watchdog)
        if meeting is None or not is_separate(config)
        else _separate(config, models, source, draw, meeting)
    )
    scoring = ScoringFleet(config, meeting) if meeting is not None else None
    scorers = {}
    if scoring is not None:
        scorers = remote_scorers(scoring, generation.sampler)
    clock = PhaseTimer(
        device.synchronize_stream, device.used_memory_bytes, around=partial(phase_around, watchdog)
    )
    learner = Learner(
        models.roles | scorers,
        config=with_correction(config),
        max_tokens=config.rollout.max_tokens,
        kl=make_controller(config.algorithm),
        residency=generation.residency,
        clock=clock,
    )
    sampler, curriculum = generation.sampler, None
    if isinstance(source.cursor, CurriculumCursor):
        curriculum = Curriculum(source.cursor, sampler, hook=inputs.curriculum, with_greedy=draw.with_greedy)
    return Run(
        config=config,
        world=world,
        tokenizer=inputs.tokenizer,
        source=source,
        draw=draw,
        keep_group=has_variance if config.algorithm.dynamic_sampling else None,
        validation=inputs.validation,
        sources=sources_of(config, inputs),
        engine=generation.engine,
        sampler=sampler,
        curriculum=curriculum,
        channel=generation.channel,
        residency=generation.residency,
        scoring=scoring,
        learner=learner,
        clock=clock,
        built=models.clock.seconds,
        plan=generation.plan,
    )


@dataclass(frozen=True, kw_only=True)
class _Generation:
    """Components of a run that generate, or stand for a rollout world that does."""

    engine: RolloutEngine | RemoteEngine
    sampler: Sampler | RemoteSampler
    channel: ColocatedChannel | SeparateChannel
    residency: Residency
    plan: Plan


def _colocated(config: TrainerConfig, models: "_Models", inputs: Inputs, watchdog: Watchdog) -> _Generation:
    """Return the components of a rollout on the ranks that train."""
    engine, sync = models.engine, models.sync
    assert engine is not None and sync is not None
    residency = Residency(
        engine,
        sync,
        [role.engine for role in models.trainable],
        offload=config.reshard.offload,
        sleeps=device.is_gpu() and config.rollout.sleep,
    )
    sampler = Sampler(
        engine,
        tokenizer=inputs.tokenizer,
        pool=make_reward_pool(config, engine),
        seed=config.run.seed,
        sources=sources_of(config, inputs),
        on_step=watchdog.beat,
    )
    return _Generation(
        engine=engine,
        sampler=sampler,
        channel=ColocatedChannel(residency),
        residency=residency,
        plan=sync.plan,
    )


def _separate(
    config: TrainerConfig, models: "_Models", prompts: TrainingPrompts, draw: Draw, meeting: Meeting
) -> _Generation:
    """Join the rollout worlds of `rollout.devices`, and return what stands for them."""
    source = models.roles["actor"].engine.weight_source()
    with models.clock.phase("vllm"):
        fleet = Fleet(config, meeting, source, dtype=rollout_dtype(config))
    side = rollout_side(config, fleet, draw, prompts.cursor, gather=source.gather)
    trainable = [role.engine for role in models.trainable]
    residency = Residency(side.engine, side.engine, trainable, offload=config.reshard.offload, sleeps=False)
    return _Generation(
        engine=side.engine,
        sampler=side.sampler,
        channel=side.channel,
        residency=residency,
        plan=fleet.plan,
    )


def _draw_of(config: TrainerConfig) -> Draw:
    """Return the sampling plan of an iteration."""
    return Draw(
        num_prompts=config.data.prompts_per_iteration,
        samples_per_prompt=config.data.samples_per_prompt,
        sampling=Sampling.from_config(config.rollout),
        max_rounds=config.algorithm.max_sampling_rounds,
        with_greedy="greedy" in get_algorithm(config.algorithm).needs,
        table=parse_table(config.rollout.adaptive_sampling),
    )


def sources_of(config: TrainerConfig, inputs: Inputs) -> Sources:
    """Return the prompts' sources: they have metrics if there are several, or rewards differ by them."""
    files = filter(None, (inputs.train, inputs.validation))
    return Sources((file.sources for file in files), always=is_routed(config.reward.function))


class _Models:
    """The models of a run, its rollout engine and the weight sync; `clock` records the seconds of each.

    With its own weights (`keep`) vLLM is built first, because it measures the free memory of an empty GPU.
    Where it uses Megatron's memory, the actor is built first.
    """

    def __init__(
        self, config: TrainerConfig, world: RankSet, *, progress: Callable[[], None], validation: int
    ):
        self.config, self.world, self._progress, self._validation = config, world, progress, validation
        self.clock, arch = PhaseTimer(device.synchronize), read_architecture(config.actor.path)
        self._actor_layout = self._train = layout_of(config.actor, world.size)
        specs = models_of(config)
        self.engine: RolloutEngine | None = None
        self.sync: WeightSync | None = None
        self.roles: dict[str, Role] = {}
        if is_separate(config):
            self._make_role(specs[0])
        else:
            self._make_colocated(specs[0], arch)
        for spec in specs[1:]:
            self._make_role(spec)
        self.trainable = [self.roles[spec.name] for spec in specs if spec.trainable]
        if self.sync is not None and self.engine is not None:
            with self.clock.phase("reshard"):
                self.sync.attach(self.engine)

    def _make_colocated(self, spec: ModelSpec, arch: Architecture) -> None:
        """Build engine, actor and the weight sync between them."""
        config, world = self.config, self.world
        serving = Layout.parse(f"tp{config.rollout.tp}", ranks=world.ranks)
        self._train, self._rollout = place(
            arch, self._actor_layout, serving, ranks_per_host=device.ranks_per_host()
        )
        if config.reshard.mode == "keep":
            self.engine = self._make_engine()
            self.sync = self._make_sync(self._make_role(spec))
        else:
            self.sync = self._make_sync(self._make_role(spec))
            self.engine = self._make_engine(self.sync.shared_weights)

    def _make_role(self, spec: ModelSpec) -> Role:
        config, layout = self.config, layout_of(spec.model, self.world.size)
        if layout == self._actor_layout:
            layout = self._train  # models with the actor's layout share its process groups
        options = EngineOptions(
            config=config.engine,
            critic=config.critic,
            seed=config.run.seed,
            temperature=config.rollout.temperature,
            progress=self._progress,
            fp8_weights_by=spec.fp8_weights_by,
            steps_only=config.reshard.offload == "steps",
            same_weights=self._same_weights(spec, layout),
        )
        with self.clock.phase(spec.name):
            role = make_role(
                spec.model,
                ProcessGroups(layout, self.world),
                arch=read_architecture(spec.model.path),
                head=spec.head,
                options=options,
                training=self._training(spec, layout) if spec.trainable else None,
            )
            role.engine.offload_async(config.reshard.offload)  # the next model, or vLLM, may need the memory
            role.engine.wait_offload()
        self.roles[spec.name] = role
        return role

    def _same_weights(self, spec: ModelSpec, layout: Layout) -> Engine | None:
        """Return the actor's engine for a model of the same files and layout."""
        is_same = layout == self._train and spec.model.path == self.config.actor.path
        return self.roles["actor"].engine if is_same and "actor" in self.roles else None

    def _training(self, spec: ModelSpec, layout: Layout) -> Training:
        data, algorithm = self.config.data, self.config.algorithm
        idle = algorithm.critic_warmup if spec.name == "actor" else 0
        iterations = max(self.config.run.iterations - idle, 1)
        samples = data.prompts_per_iteration * data.samples_per_prompt // algorithm.num_mini_batches
        return Training(
            steps=iterations * algorithm.epochs * algorithm.num_mini_batches,
            rows=LongestRows(
                prompt_tokens=data.max_prompt_tokens,
                response_tokens=self.config.rollout.max_tokens,
                count=-(-samples // layout.dp),
            ),
        )

    def _make_sync(self, actor: Role) -> WeightSync:
        with self.clock.phase("reshard"):
            return WeightSync(
                actor.engine.weight_source(),
                self._rollout,
                self.config.reshard,
                self.world,
                dtype=rollout_dtype(self.config),
            )

    def _make_engine(self, shared_weights: Mapping[str, Tensor] | None = None) -> RolloutEngine:
        with self.clock.phase("vllm"):
            replicas = num_replicas(world_size=self.world.size, tp=self.config.rollout.tp)
            samples = samples_at_most(self.config, replicas=replicas, validation=self._validation)
            return make_vllm(self.config, self._rollout, shared_weights, samples=samples)


@contextmanager
def phase_around(watchdog: Watchdog, name: str) -> Iterator[None]:
    """Name a phase for the watchdog and the profiler."""
    with watchdog.operation(name), device.named_range(name):
        yield


def make_vllm(
    config: TrainerConfig,
    rollout: Layout,
    shared_weights: Mapping[str, Tensor] | None = None,
    *,
    samples: int | None = None,
) -> VLLMActor:
    """Build a sleeping vLLM engine; no weights are loaded, or they alias `shared_weights`.

    Args:
        samples: as of `Colocation`.
    """
    vllm = VLLMActor(
        config.actor.path,
        config.rollout.tp,
        config=replace(config.rollout, dtype=str(rollout_dtype(config)).removeprefix("torch.")),
        max_model_len=config.data.max_prompt_tokens + config.rollout.max_tokens,
        seed=config.run.seed,
        colocation=Colocation(ranks=rollout.ranks, shared_weights=shared_weights or {}, samples=samples),
    )
    vllm.sleep()
    device.release_cached_memory()  # of vLLM's start, before lasting tensors come to lie in it
    return vllm
