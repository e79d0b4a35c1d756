"""The parts of a run and how they are put together: groups, vLLM, models, data, rewards."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from parallel import device
from parallel.collectives import all_max
from parallel.reshard.execute import ReshardReport
from parallel.weights.architecture import Architecture, read_architecture
from verl_megatron.algorithms import Algorithm, get_algorithm
from verl_megatron.batch import RolloutBatch
from verl_megatron.config import ModelConfig, TrainerConfig
from verl_megatron.data import Prompt, PromptCursor, PromptDataset
from verl_megatron.kl import KLController, make_controller
from verl_megatron.metrics import PhaseTimer, Sums, reduce_over_world
from verl_megatron.rewards.pool import RewardPool
from verl_megatron.roles.engine import check_weights
from verl_megatron.roles.role import Role, make_role
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
    clock: PhaseTimer = field(default_factory=lambda: PhaseTimer(device.synchronize, device.used_memory_bytes))
    stale: bool = True  # vLLM's weights are not the actor's
    shown_failures: set[str] = field(default_factory=set)

    @property
    def num_rows(self) -> int:
        return self.config.data.prompts_per_iteration * self.config.data.samples_per_prompt

    def draw_prompts(self) -> list[Prompt]:
        return [self.prompts[i] for i in self.cursor.draw(self.config.data.prompts_per_iteration)]

    def generate(self, prompts: list[Prompt], *, iteration: int, samples: int = 0, sampling: Sampling | None = None) -> RolloutBatch:
        """Rows at home; vLLM gives its memory back afterwards where it can."""
        if self.stale:
            self.hand_over()
        self.vllm.wake_kv_cache()
        batch = generate_rows(
            self.vllm,
            prompts,
            samples_per_prompt=samples or self.config.data.samples_per_prompt,
            sampling=sampling or Sampling.from_config(self.config.rollout),
            seed=self.config.run.seed,
            iteration=iteration,
            tokenizer=self.tokenizer,
            pool=self.pool,
        )
        if device.is_gpu() and self.config.rollout.sleep:
            self.clock.note_memory()
            self.vllm.sleep()
            self.stale = True
        return batch

    def hand_over(self) -> ReshardReport:
        """The actor's weights into vLLM, slice by slice, proved."""
        device.release_cached_memory()
        self.vllm.wake_weights()
        report = self.sync.run()
        self.stale = False
        return report

    def score(self, batch: RolloutBatch, rows: RowTable, sums: Sums) -> Tensor:
        """[B] float32: what the reward function and the reward model give the rows at home."""
        rewards = torch.zeros(len(batch))
        if self.pool is not None:
            results = self.pool.results()
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


def build_run(config: TrainerConfig) -> Run:
    """All parts of a run from its (checked) settings. Collective over the world.

    vLLM comes first: it measures the free memory of an empty GPU.
    """
    arch = read_architecture(config.actor.path)
    tokenizer = load_tokenizer(config.actor.path)
    if not config.critic.path:
        config.critic.path = config.actor.path
    prompts, validation = read_prompts(config, tokenizer, arch), read_prompts(config, tokenizer, arch, validation=True)
    seed, algorithm = config.run.seed, get_algorithm(config.algorithm.name)
    for model, head in ((config.actor, "lm"), (config.critic if algorithm.needs_critic else None, "token"), (config.reward, "sequence")):
        if model is not None and model.path:
            check_weights(model.path, head)
    vllm = VLLMActor(
        config.actor.path,
        config.rollout.tp,
        config=config.rollout,
        max_model_len=config.data.max_prompt_tokens + config.rollout.max_tokens,
        dtype=_rollout_dtype(config),
        seed=seed,
        load_weights=False,
    )
    vllm.sleep()
    steps = config.run.iterations * config.algorithm.epochs * config.algorithm.mini_batches
    common = dict(engine=config.engine, seed=seed, temperature=config.rollout.temperature)
    actor = make_role(config.actor, arch=arch, head="lm", train_steps=steps, **common)
    critic = reference = reward_model = None
    if algorithm.needs_critic:
        critic = make_role(config.critic, arch=read_architecture(config.critic.path), head="token", train_steps=steps, **common)
    if config.algorithm.kl_coef > 0:
        reference = make_role(config.actor, arch=arch, head="lm", **common)
    if config.reward.path:
        model = ModelConfig(path=config.reward.path, layout=config.reward.layout, devices=config.reward.devices)
        reward_model = make_role(model, arch=read_architecture(model.path), head="sequence", **common)
    pool = None
    if config.reward.function and vllm.is_home:
        reward = config.reward
        pool = RewardPool(reward.function, workers=reward.workers, timeout_s=reward.timeout_s, failure_score=reward.failure_score)
    return Run(
        config=config,
        tokenizer=tokenizer,
        prompts=prompts,
        validation=validation,
        cursor=PromptCursor(num_prompts=len(prompts), seed=seed, shuffle=config.data.shuffle),
        vllm=vllm,
        actor=actor,
        critic=critic,
        reference=reference,
        reward_model=reward_model,
        pool=pool,
        sync=WeightSync(actor.engine, vllm, config.reshard),
        algorithm=algorithm,
        kl=make_controller(config.algorithm),
    )


def read_prompts(config: TrainerConfig, tokenizer: Tokenizer, arch: Architecture, *, validation: bool = False) -> PromptDataset | None:
    """The prompts to learn from or to validate with (None: none are given).

    Raises:
        ValueError: as PromptDataset, or a token that the model has no embedding for.
    """
    path = config.data.validation if validation else config.data.train
    if validation and not path:
        return None
    prompts = PromptDataset(path, tokenizer, config.data)
    largest = max(max(prompt.prompt_token_ids) for prompt in prompts)
    if largest >= arch.vocab_size:
        raise ValueError(f"the tokenizer in {config.actor.path} gives token {largest} for {path}, and the model has vocab_size={arch.vocab_size}; use the model's own tokenizer")
    return prompts


def _rollout_dtype(config: TrainerConfig) -> str:
    """vLLM's dtype: as set, else the engine's."""
    if config.rollout.dtype != "auto":
        return config.rollout.dtype
    return config.engine.dtype if config.engine.dtype != "auto" else ("bfloat16" if device.is_gpu() else "float32")
