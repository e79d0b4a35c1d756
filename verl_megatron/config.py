"""Every setting with its meaning, unit and default; `checks.py` refuses what contradicts.

Two levels: a section, a setting. Each part of the program receives only its own section.
"""

import os
from dataclasses import dataclass, field
from typing import Any

from parallel.refusal import nearest

MISSING = "???"  # OmegaConf's mark of a setting that has to be given


class UnknownSettingError(AttributeError, ValueError):
    """A name that is no setting of its section: Python's error of an attribute, and the user's of a value."""


class Section:
    """Settings by name. Setting another name is refused; a pathlib.Path becomes its text."""

    def __setattr__(self, name: str, value: Any) -> None:
        known = type(self).__dataclass_fields__
        if name not in known:
            raise UnknownSettingError(f"{name} is no setting of {type(self).__name__}{nearest(name, known)}; it has {', '.join(known)}")
        super().__setattr__(name, os.fspath(value) if isinstance(value, os.PathLike) else value)


@dataclass(kw_only=True)
class RunConfig(Section):
    """The run as a whole."""

    output_dir: str = "outputs/run"  # logs, checkpoints and the exported models
    seed: int = 1
    iterations: int = 100
    validate_interval: int = 0  # iterations between validations; 0: before the first and after the last only
    save_interval: int = 0  # iterations between checkpoints; 0: none
    keep_last_k: int = 2  # checkpoints that are kept; 0: all
    keep_best_k: int = 0  # checkpoints kept besides, those with the best validation accuracy
    async_save: bool = False  # train on while a checkpoint is written; costs a copy of weights and optimizer state in host memory
    resume: str = "newest"  # checkpoint in output_dir to go on from: newest, never; verify: newest, whose next iteration is compared with what was recorded of it
    stall_timeout_s: float = 300.0  # end the run, and name the culprit, when a rank makes no progress for so long; 0: never
    export: bool = True  # write a Hugging Face folder of the actor (and critic) at the end
    track_metrics: list[str] = field(default_factory=lambda: ["console", "jsonl", "csv", "tensorboard"])  # also wandb, mlflow, timeline (where ranks wait), profile (what they do)


@dataclass(kw_only=True)
class DataConfig(Section):
    """Prompts: JSON lines with at least a prompt and the ground truth its reward needs."""

    train: str = MISSING  # .jsonl file
    validation: str = ""  # .jsonl file; empty: no validation
    prompt_key: str = "prompt"  # a string, or a list of chat messages
    answer_key: str = "answer"  # ground truth handed to the reward
    max_prompt_tokens: int = 1024
    overlong: str = "error"  # prompts over max_prompt_tokens: "error" or "drop" (counted and said)
    prompts_per_iteration: int = 256
    samples_per_prompt: int = 1
    shuffle: bool = True
    validation_rows: int = 0  # 0: the whole file
    validation_temperature: float = 1.0  # 0: greedy


@dataclass(kw_only=True)
class ModelConfig(Section):
    """A model that learns: where its weights come from, how it is split and its learning rate."""

    path: str = ""  # Hugging Face folder; the critic's may be empty: it starts from the actor's
    layout: str = "tp1"  # compact form: tp2pp2, tp4pp2vpp2sp, ...; dp is what the devices leave
    stage_layers: list[int] = field(default_factory=list)  # layers of each pipeline stage; empty: all alike
    devices: str = ""  # ranks such as 0-3 or cuda:0-3; empty: all
    lr: float = 1e-6


@dataclass(kw_only=True)
class EngineConfig(Section):
    """How every Megatron-Core model computes, and how those that learn are optimized (AdamW)."""

    dtype: str = "auto"  # bfloat16 (with float32 master weights), fp8 (the same, layers' products in fp8), float32; auto: bfloat16 on GPUs, float32 on CPUs
    spec: str = "auto"  # layers: te (transformer-engine), local; auto: te on GPUs where it is installed
    recompute: str = "none"  # activations: none, selective (attention), full (whole layers)
    tokens_per_micro_batch: int = 8192  # packed tokens a micro-batch holds at most, on one tensor-parallel group
    distributed_optimizer: bool = True  # optimizer state split over dp
    schedule: str = "constant"  # learning rate after the warm-up: constant, linear, cosine
    warmup_steps: int = 0  # optimizer steps
    min_lr_ratio: float = 0.0  # where the schedule ends, as a share of lr
    weight_decay: float = 0.01
    clip_grad: float = 1.0  # global gradient norm; 0: off
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    adam_eps: float = 1e-8


@dataclass(kw_only=True)
class RewardConfig(Section):
    """Where scores come from: a Python function, a reward model, or both (added)."""

    function: str = "match"  # a built-in name or path.py:function; empty: none
    timeout_s: float = 10.0  # of one call
    workers: int = 1  # processes a rollout replica
    failure_score: float = 0.0  # for a call that raised, ran out of time or gave NaN
    path: str = ""  # Hugging Face sequence-classification folder; empty: no reward model
    layout: str = "tp1"
    devices: str = ""


@dataclass(kw_only=True)
class RolloutConfig(Section):
    """vLLM and how it samples."""

    tp: int = 1  # ranks of one replica; replicas are what the world leaves
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    min_tokens: int = 0
    max_tokens: int = 1024  # response tokens
    stop: list[str] = field(default_factory=list)  # strings
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    dtype: str = "auto"  # of vLLM's weights; auto: the actor's
    max_num_seqs: int = 256  # rows a replica decodes at once
    gpu_memory_utilization: float = 0.5  # share of a GPU for weights and KV cache
    kv_cache_mib: int = 64  # KV cache on a CPU, MiB a rank
    enforce_eager: bool = False  # no CUDA graphs
    sleep: bool = True  # give the GPU's memory back while training (GPU only)


@dataclass(kw_only=True)
class AlgorithmConfig(Section):
    """The policy-gradient algorithm. Sources stand beside the formulas in advantages.py, losses.py and kl.py."""

    name: str = "ppo"  # ppo, grpo
    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True  # advantages to mean 0 and standard deviation 1 over all response tokens of the iteration
    scale_by_std: bool = True  # GRPO: divide by the group's standard deviation
    epochs: int = 1  # passes over an iteration's rows
    mini_batches: int = 1  # optimizer steps a pass
    clip_low: float = 0.2  # ratio may fall to 1 - clip_low
    clip_high: float = 0.2  # ratio may rise to 1 + clip_high
    value_clip: float = 0.2  # largest step of a value; 0: off
    entropy_coef: float = 0.0
    kl_coef: float = 0.0  # 0: no reference model
    kl_in: str = "reward"  # reward, loss
    kl_estimator: str = "k1"  # k1, k2, k3
    kl_target: float = 0.0  # KL a row the adaptive coefficient steers to; 0: fixed coefficient
    kl_horizon: int = 10_000  # rows over which it adapts
    importance_cap: float = 0.0  # truncated importance weight sampler -> trainer; 0: off
    stop_kl: float = 0.0  # leave the iteration's remaining updates out above this approximate KL; 0: off
    critic_warmup: int = 0  # iterations that train only the critic


@dataclass(kw_only=True)
class ReshardConfig(Section):
    """Weights from Megatron's shards into vLLM's."""

    mode: str = "keep"  # keep: vLLM's weights beside Megatron's; share: equal shards are one; swap: vLLM's lie over Megatron's, which return after rollout
    window_mib: int = 256  # staging memory of one exchange, MiB
    verify: str = "sample"  # checksums at every sync: sample (a rotating sixteenth of the slices), all, none
    offload: str = "none"  # what leaves the GPU while a model does not learn: none, grads, optimizer (kept in pinned host memory), all


@dataclass(kw_only=True)
class TrainerConfig(Section):
    """All sections of a reinforcement-learning run."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    actor: ModelConfig = field(default_factory=ModelConfig)
    critic: ModelConfig = field(default_factory=lambda: ModelConfig(lr=1e-5))
    engine: EngineConfig = field(default_factory=EngineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reshard: ReshardConfig = field(default_factory=ReshardConfig)


@dataclass(kw_only=True)
class SFTDataConfig(Section):
    """Demonstrations: JSON lines with a prompt and the response to imitate."""

    train: str = MISSING
    validation: str = ""
    prompt_key: str = "prompt"
    response_key: str = "response"
    max_tokens: int = 2048  # of prompt and response together; longer rows are an error or dropped
    overlong: str = "error"
    rows_per_step: int = 256
    shuffle: bool = True


@dataclass(kw_only=True)
class SFTConfig(Section):
    """All sections of a supervised run; `run.iterations` counts optimizer steps."""

    run: RunConfig = field(default_factory=RunConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    actor: ModelConfig = field(default_factory=lambda: ModelConfig(lr=1e-5))
    engine: EngineConfig = field(default_factory=EngineConfig)
