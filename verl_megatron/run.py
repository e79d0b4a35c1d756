"""The parts of a run and how they are put together: groups, vLLM, models, data, rewards."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import device
from parallel.collectives import all_max
from parallel.layout import Layout
from parallel.placement import place
from parallel.reshard.execute import ReshardReport
from parallel.watchdog import Watchdog
from parallel.weights.architecture import Architecture, read_architecture
from verl_megatron.algorithms import Algorithm, get_algorithm
from verl_megatron.batch import RolloutBatch
from verl_megatron.config import ModelConfig, TrainerConfig
from verl_megatron.data import Prompt, PromptCursor, PromptDataset
from verl_megatron.kl import KLController, make_controller
from verl_megatron.metrics import PhaseTimer, Sums, reduce_over_world
from verl_megatron.models.build import Head
from verl_megatron.rewards.pool import RewardPool
from verl_megatron.roles.engine import Engine, check_weights, compute_of
from verl_megatron.roles.role import Role, layout_of, make_role
from verl_megatron.roles.rows import RowTable
from verl_megatron.rollout.generate import generate_rows
from verl_megatron.rollout.sampling import Sampling
from verl_megatron.rollout.vllm import VLLMActor
from verl_megatron.rollout.weights import WeightSync
from verl_megatron.tokenizer import Tokenizer, load_tokenizer


@dataclass(kw_only=True)
class Run:
    """Everything an iteration needs. Its methods are collective over the world."""

    config: TrainerConfig
    tokenizer: Tokenizer
    prompts: PromptDataset
    validation: PromptDataset | None
    cursor: PromptCursor
    vllm: VLLMActor
    actor: Role
    critic: Role | None
    reference: Role | None
    reward_model: Role | None
    pool: RewardPool | None  # on the first rank of each rollout replica
    sync: WeightSync
    algorithm: Algorithm
    kl: KLController
    watchdog: Watchdog
    clock: PhaseTimer
    built: dict[str, float]  # seconds that each part took
    stale: bool = True  # vLLM's weights are not the actor's
    shown_failures: set[str] = field(default_factory=set)

    @property
    def notes(self) -> list[str]:
        """What was left out of the data, for the user to read."""
        return list(dict.fromkeys(self.prompts.notes + (self.validation.notes if self.validation is not None else [])))

    @property
    def num_rows(self) -> int:
        return self.config.data.prompts_per_iteration * self.config.data.samples_per_prompt

    def table_of(self, batch: RolloutBatch) -> RowTable:
        """All rows of the iteration, from those at home here."""
        return RowTable.gather(batch, num_rows=self.num_rows, num_mini_batches=self.config.algorithm.mini_batches)

    def draw_prompts(self) -> list[Prompt]:
        return [self.prompts[i] for i in self.cursor.draw(self.config.data.prompts_per_iteration)]

    def generate(self, prompts: list[Prompt], *, iteration: int, samples: int = 0, sampling: Sampling | None = None) -> RolloutBatch:
        """Rows at home. Collective, as is `end_rollout()`, which has to follow before a model is used."""
        self.hand_over()
        return generate_rows(
            self.vllm,
            prompts,
            samples_per_prompt=samples or self.config.data.samples_per_prompt,
            sampling=sampling or Sampling.from_config(self.config.rollout),
            seed=self.config.run.seed,
            iteration=iteration,
            tokenizer=self.tokenizer,
            pool=self.pool,
            on_step=self.watchdog.beat,
        )

    def end_rollout(self) -> None:
        """The models have their weights again, and vLLM gives its memory back where it can."""
        self.stale |= self.sync.restore()
        if device.is_gpu() and self.config.rollout.sleep:
            self.vllm.sleep()
            self.stale = True

    def hand_over(self) -> ReshardReport:
        """From training to rollout: the actor's weights into vLLM, slice by slice, proved; nothing if vLLM has them."""
        if not self.stale:
            return ReshardReport()
        for engine in self.learning():
            engine.start_release(self.config.reshard.offload)  # where it has not begun
        if not self.vllm.has_room_for_weights():
            self._finish_release()
        self.vllm.wake_weights()
        report = self.sync.run(meanwhile=self._wake_kv_cache)
        self.stale = False
        return report

    def _finish_release(self) -> None:
        for engine in self.learning():
            engine.finish_release()

    def _wake_kv_cache(self) -> None:
        self._finish_release()
        self.vllm.wake_kv_cache()

    def turn_to(self, role: Role) -> None:
        """`role` learns next, or its state is wanted: what only learning needs of it begins to come back, that of the others has left."""
        for engine in self.learning():
            if engine is not role.engine:
                engine.start_release(self.config.reshard.offload)
                engine.finish_release(for_others=False)
        role.engine.start_restore()

    def weights_changed(self) -> None:
        """After the updates: vLLM's weights are old, and what only learning needs may begin to leave the GPU."""
        self.stale = True
        for engine in self.learning():
            engine.start_release(self.config.reshard.offload)

    def learning(self) -> list[Engine]:
        """The engines that are trained."""
        return [role.engine for role in (self.actor, self.critic) if role is not None]

    def score(self, batch: RolloutBatch, rows: RowTable, sums: Sums) -> Tensor:
        """[B] float32: what the reward function and the reward model give the rows at home."""
        rewards = torch.zeros(len(batch))
        if self.pool is not None:
            results = self.pool.results(progress=self.watchdog.beat)
            sums.add("reward/latency_ms", self.pool.total_ms, self.pool.calls)
            for b, row in enumerate(batch.row_id.tolist()):
                rewards[b] = results[row].score
                sums.add("reward/failed", float(results[row].failure is not None), 1)
                for name, value in results[row].metrics.items():
                    sums.add(f"reward/{name}", value, 1)
            for kind in self.pool.examples.keys() - self.shown_failures:
                print(f"{self.pool.examples[kind]} (counted as reward/failed; shown once)", flush=True)
                self.shown_failures.add(kind)
        if self.reward_model is not None:
            rewards += self.reward_model.infer(batch, rows, last_token=True)["values"].sum(1)
        return rewards

    def reduce(self, sums: Sums) -> dict[str, float]:
        """Means over all ranks, the same on each."""
        return reduce_over_world(sums)

    def adapt_kl(self, metrics: dict[str, float]) -> None:
        if "kl/ref" in metrics:
            self.kl.update(metrics["kl/ref"], self.num_rows)
            metrics["kl/coef"] = self.kl.coef

    def used_memory(self) -> dict[str, int]:
        """Bytes in use after each phase, on the fullest rank."""
        phases = self.clock.memory_bytes
        fullest = all_max(torch.tensor([float(value) for value in phases.values()], dtype=torch.float64))
        return dict(zip(phases, map(int, fullest.tolist())))

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self.vllm.close()


def build_run(config: TrainerConfig, watchdog: Watchdog) -> Run:
    """All parts of a run from its (checked) settings; `watchdog` hears of its phases and its progress. Collective over the world.

    Where vLLM has weights of its own it comes first: it measures the free memory of an empty GPU. Where it uses Megatron's memory
    the actor comes first.
    """
    arch, tokenizer = read_architecture(config.actor.path), load_tokenizer(config.actor.path)
    if not config.critic.path:
        config.critic.path = config.actor.path
    prompts, validation = read_prompts(config, tokenizer, arch), read_prompts(config, tokenizer, arch, validation=True)
    algorithm = get_algorithm(config.algorithm.name)
    _check_weights_of(config, algorithm)
    parts = _Parts(config, watchdog, arch)
    if config.reshard.mode == "keep":
        vllm = parts.vllm()
        actor = parts.role("actor", config.actor, "lm", learns=True)
        sync = parts.weight_sync(actor)
    else:
        actor = parts.role("actor", config.actor, "lm", learns=True)
        sync = parts.weight_sync(actor)
        vllm = parts.vllm(sync.shared_weights)
    critic = parts.role("critic", config.critic, "token", learns=True) if algorithm.needs_critic else None
    reference = parts.role("reference", config.actor, "lm") if config.algorithm.kl_coef > 0 else None
    reward = config.reward
    reward_model = parts.role("reward", ModelConfig(path=reward.path, layout=reward.layout, devices=reward.devices), "sequence") if reward.path else None
    pool = None
    if reward.function and vllm.is_home:
        pool = RewardPool(reward.function, workers=reward.workers, timeout_s=reward.timeout_s, failure_score=reward.failure_score)
    with parts.clock.phase("reshard"):
        sync.attach(vllm)
    return Run(
        config=config,
        tokenizer=tokenizer,
        prompts=prompts,
        validation=validation,
        cursor=PromptCursor(num_prompts=len(prompts), seed=config.run.seed, shuffle=config.data.shuffle),
        vllm=vllm,
        actor=actor,
        critic=critic,
        reference=reference,
        reward_model=reward_model,
        pool=pool,
        sync=sync,
        algorithm=algorithm,
        kl=make_controller(config.algorithm),
        watchdog=watchdog,
        clock=PhaseTimer(device.synchronize_stream, device.used_memory_bytes, around=partial(phase_around, watchdog)),
        built=parts.clock.seconds,
    )


class _Parts:
    """Makes the parts of a run that take memory and time; `clock` has the seconds of each."""

    def __init__(self, config: TrainerConfig, watchdog: Watchdog, arch: Architecture):
        self.config, self.watchdog, self.clock = config, watchdog, PhaseTimer(device.synchronize)
        self.usual = layout_of(config.actor)
        serving = Layout.parse(f"tp{config.rollout.tp}", ranks=tuple(range(dist.get_world_size())))
        self.train, self.rollout = place(arch, self.usual, serving, ranks_per_host=device.ranks_per_host())

    def role(self, name: str, model: ModelConfig, head: Head, *, learns: bool = False) -> Role:
        config, layout = self.config, layout_of(model)
        steps = config.run.iterations * config.algorithm.epochs * config.algorithm.mini_batches if learns else 0
        common = dict(engine=config.engine, seed=config.run.seed, temperature=config.rollout.temperature, train_steps=steps, progress=self.watchdog.beat)
        layout = self.train if layout == self.usual else layout  # what is split like the actor shares its groups
        with self.clock.phase(name):
            made = make_role(model, layout, arch=read_architecture(model.path), head=head, **common)
            made.engine.start_release(config.reshard.offload)  # the next model, or vLLM, may need the room
            made.engine.finish_release()
        return made

    def weight_sync(self, actor: Role) -> WeightSync:
        with self.clock.phase("reshard"):
            return WeightSync(actor.engine, self.rollout, self.config.reshard, dtype=_rollout_dtype(self.config))

    def vllm(self, shared_weights: Mapping[str, Tensor] | None = None) -> VLLMActor:
        with self.clock.phase("vllm"):
            return make_vllm(self.config, self.rollout, shared_weights)


def _check_weights_of(config: TrainerConfig, algorithm: Algorithm) -> None:
    for model, head in ((config.actor, "lm"), (config.critic if algorithm.needs_critic else None, "token"), (config.reward, "sequence")):
        if model is not None and model.path:
            check_weights(model.path, head)


@contextmanager
def phase_around(watchdog: Watchdog, name: str) -> Iterator[None]:
    """What a phase is known by to those who look from outside."""
    with watchdog.operation(name), device.named_range(name):
        yield


def make_vllm(config: TrainerConfig, rollout: Layout, shared_weights: Mapping[str, Tensor] | None = None) -> VLLMActor:
    """A sleeping engine without weights, or with these."""
    vllm = VLLMActor(
        config.actor.path,
        config.rollout.tp,
        config=config.rollout,
        max_model_len=config.data.max_prompt_tokens + config.rollout.max_tokens,
        dtype=str(_rollout_dtype(config)).removeprefix("torch."),
        seed=config.run.seed,
        load_weights=False,
        ranks=rollout.ranks,
        shared_weights=shared_weights,
    )
    vllm.sleep()
    return vllm


def read_prompts(config: TrainerConfig, tokenizer: Tokenizer, arch: Architecture, *, validation: bool = False) -> PromptDataset | None:
    """The prompts to learn from or to validate with (None: none are given).

    Raises:
        ValueError: as PromptDataset.
    """
    path = config.data.validation if validation else config.data.train
    if validation and not path:
        return None
    return PromptDataset(path, tokenizer, config.data, vocab_size=arch.vocab_size)


def _rollout_dtype(config: TrainerConfig) -> torch.dtype:
    """vLLM's dtype: as set, else the engine's."""
    if config.rollout.dtype != "auto":
        return getattr(torch, config.rollout.dtype)
    return compute_of(config.engine).dtype
