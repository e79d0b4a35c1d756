"""Every setting with its meaning, unit and default; `checks.py` refuses what contradicts.

Two levels: a section, a setting. Each part of the program receives only its own section.
"""

import os
from dataclasses import dataclass, field
from typing import Any

from parallel.runtime.refusal import nearest

MISSING = "???"  # OmegaConf's mark of a setting that has to be given


class UnknownSettingError(AttributeError, ValueError):
    """A name that is no setting of its section: Python's error of an attribute, and the user's of a value."""


class Section:
    """Settings by name. Setting another name is refused; a pathlib.Path becomes its text."""

    def __setattr__(self, name: str, value: Any) -> None:
        known = type(self).__dataclass_fields__
        if name not in known:
            raise UnknownSettingError(
                f"{name} is no setting of {type(self).__name__}{nearest(name, known)}; it has {', '.join(known)}"
            )
        super().__setattr__(name, os.fspath(value) if isinstance(value, os.PathLike) else value)


@dataclass(kw_only=True)
class RunConfig(Section):
    """The run as a whole."""

    output_dir: str = "outputs/run"  # logs, checkpoints and the exported models
    seed: int = 1  # of data order, sampling and new weights
    iterations: int = (
        100  # each draws prompts, generates, scores and updates once; of a supervised run: optimizer steps
    )
    validate_interval: int = 0  # iterations between validations; 0: before the first and after the last only
    save_interval: int = 0  # iterations between checkpoints; 0: none
    keep_last_k: int = 2  # newest checkpoints to keep; 0: all
    keep_best_k: int = 0  # checkpoints kept in addition: those with the best validation accuracy
    async_save: bool = False  # train on while a checkpoint is written; needs host memory for a copy of weights and optimizer state
    resume: str = "newest"  # newest: go on from the newest checkpoint in output_dir; verify: the same, comparing its next iteration with the recorded one; never: start over
    stall_timeout_s: float = (
        300.0  # seconds without progress after which the run ends and names the stuck rank; 0: never
    )
    export: bool = True  # write a Hugging Face folder of the actor (and critic) at the end
    track_metrics: list[str] = field(
        default_factory=lambda: ["console", "jsonl", "csv", "tensorboard"]
    )  # also wandb, mlflow, timeline (where ranks wait), profile (what they do)


@dataclass(kw_only=True)
class DataConfig(Section):
    """Prompts: JSON lines with at least a prompt and the ground truth its reward needs."""

    train: str = MISSING  # .jsonl file
    validation: str = ""  # .jsonl file; empty: no validation
    prompt_key: str = "prompt"  # a string, or a list of chat messages
    answer_key: str = "answer"  # ground truth handed to the reward
    max_prompt_tokens: int = 1024  # longest prompt, chat template included
    overlong: str = "error"  # prompts over max_prompt_tokens: "error", or "drop" (counted)
    prompts_per_iteration: int = 256  # prompts drawn for each iteration
    samples_per_prompt: int = 1  # responses to each prompt; GRPO needs at least 2
    shuffle: bool = True  # draw prompts in a new order in every epoch
    validation_rows: int = 0  # prompts to validate on; 0: the whole file
    validation_temperature: float = 1.0  # 0: greedy


@dataclass(kw_only=True)
class ModelConfig(Section):
    """A trainable model: source of its weights, layout and learning rate."""

    path: str = ""  # Hugging Face folder; the critic's may be empty: it starts from the actor's
    layout: str = "tp1"  # sizes such as tp2pp2 or tp4pp2vpp2sp; dp is what remains of the ranks
    stage_layers: list[int] = field(
        default_factory=list
    )  # layers of each pipeline stage; empty: equal stages
    devices: str = ""  # ranks such as 0-3 or cuda:0-3; empty: all
    lr: float = 1e-6  # learning rate after the warm-up


@dataclass(kw_only=True)
class EngineConfig(Section):
    """Compute of every Megatron-Core model, and the optimizer (AdamW) of the trainable ones."""

    dtype: str = "auto"  # fp8: bfloat16 with matrix products of the layers in fp8; both keep float32 master weights; auto: bfloat16 on GPUs, float32 on CPUs
    spec: str = "auto"  # layers: te (transformer-engine), local; auto: te on GPUs where it is installed
    recompute: str = "none"  # activations to recompute: none, selective (attention), full (whole layers)
    tokens_per_micro_batch: int = (
        8192  # most packed tokens of a micro-batch; cp times as many with context parallelism
    )
    distributed_optimizer: bool = True  # shard the optimizer state over dp and cp
    schedule: str = "constant"  # learning rate after the warm-up: constant, linear, cosine
    warmup_steps: int = 0  # optimizer steps over which the learning rate rises
    min_lr_ratio: float = (
        0.0  # learning rate at the end of the schedule (one step after the last), as a share of lr
    )
    weight_decay: float = 0.01  # decoupled, as in AdamW
    clip_grad: float = 1.0  # global gradient norm; 0: off
    adam_betas: list[float] = field(
        default_factory=lambda: [0.9, 0.95]
    )  # decay of the first and second moment
    adam_eps: float = 1e-8  # added to the root of the second moment


@dataclass(kw_only=True)
class RewardConfig(Section):
    """Source of the scores: a Python function, a reward model, or both (added)."""

    function: str = "match"  # a built-in name or path.py:function (imported within 45 s); empty: none
    timeout_s: float = 10.0  # seconds that one call may take
    workers: int = 1  # worker processes per vLLM replica
    failure_score: float = 0.0  # score of a call that raised, ran out of time or gave no finite number
    path: str = ""  # Hugging Face sequence-classification folder; empty: no reward model
    layout: str = "tp1"  # of the reward model, as actor.layout
    devices: str = ""  # of the reward model, as actor.devices


@dataclass(kw_only=True)
class RolloutConfig(Section):
    """vLLM and its sampling."""

    tp: int = 1  # tensor-parallel ranks of a replica; replicas are what remains of the world
    temperature: float = 1.0  # log-probs of the trainer are taken at the same temperature
    top_p: float = 1.0  # nucleus sampling; 1: off
    top_k: int = -1  # most likely tokens to sample from; -1: all
    min_tokens: int = 0  # response tokens before the end-of-sequence token is allowed
    max_tokens: int = 1024  # longest response
    stop: list[str] = field(default_factory=list)  # strings that end a response
    stop_token_ids: list[int] = field(
        default_factory=list
    )  # tokens that end a response, besides the end-of-sequence token
    ignore_eos: bool = False  # generate max_tokens tokens whatever the model says; for benchmarks
    dtype: str = "auto"  # of vLLM's weights; auto: the actor's
    max_num_seqs: int = 256  # samples that a replica decodes at once
    gpu_memory_utilization: float = 0.5  # share of a GPU for weights and KV cache
    kv_cache_mib: int = 64  # KV cache of a rank on a CPU, MiB
    enforce_eager: bool = False  # run without CUDA graphs
    sleep: bool = True  # give GPU memory back while training (GPUs only)


@dataclass(kw_only=True)
class AlgorithmConfig(Section):
    """Policy-gradient algorithm; advantages.py, losses.py and kl.py have the formulas with their sources."""

    name: str = "ppo"  # ppo: critic and generalized advantage estimation; grpo: scores relative to the group, no critic
    gamma: float = 1.0  # discount of later rewards
    lam: float = 0.95  # lambda of generalized advantage estimation
    whiten: bool = (
        True  # advantages to mean 0 and standard deviation 1 over all response tokens of the iteration
    )
    scale_by_std: bool = True  # GRPO: divide by the group's standard deviation
    epochs: int = 1  # passes over the samples of an iteration
    mini_batches: int = 1  # optimizer steps a pass
    clip_low: float = 0.2  # ratio may fall to 1 - clip_low
    clip_high: float = 0.2  # ratio may rise to 1 + clip_high
    value_clip: float = 0.2  # largest step of a value; 0: off
    entropy_coef: float = 0.0  # weight of the entropy bonus in the policy loss
    kl_coef: float = 0.0  # weight of the KL from the reference; 0: no reference model
    kl_in: str = "reward"  # where the KL goes: into the token rewards, or into the policy loss
    kl_estimator: str = "k1"  # with x = log p - log q: k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x
    kl_target: float = (
        0.0  # KL of a sample, summed over its tokens, to which the coefficient adapts; 0: fixed coefficient
    )
    kl_horizon: int = 10_000  # samples over which the coefficient adapts
    importance_cap: float = 0.0  # truncated importance weight sampler -> trainer; 0: off
    stop_kl: float = 0.0  # leave the iteration's remaining updates out above this approximate KL; 0: off
    critic_warmup: int = 0  # first iterations, which train only the critic


@dataclass(kw_only=True)
class ReshardConfig(Section):
    """Weight sync from Megatron's shards into vLLM's shards."""

    mode: str = "keep"  # keep: vLLM has a copy; share: equal shards share memory; swap: vLLM's weights lie in Megatron's memory, which is restored after rollout
    window_mib: int = 256  # staging memory of a rank, MiB
    verify: str = "sample"  # checksums at every sync: sample (a rotating sixteenth of the slices), all, none
    offload: str = "none"  # what leaves the GPU while a model is not updated: gradient buffers, optimizer state (to pinned host memory), or both


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

    train: str = MISSING  # .jsonl file
    validation: str = ""  # .jsonl file; empty: no validation
    prompt_key: str = "prompt"  # a string, or a list of chat messages
    response_key: str = "response"  # a string
    max_tokens: int = 2048  # of prompt and response together; longer rows are an error or dropped
    overlong: str = "error"  # rows over max_tokens: "error" or "drop" (counted)
    rows_per_step: int = 256  # demonstrations in each optimizer step
    shuffle: bool = True  # a new order in every epoch


@dataclass(kw_only=True)
class SFTConfig(Section):
    """All sections of a supervised run; `run.iterations` counts optimizer steps."""

    run: RunConfig = field(default_factory=RunConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    actor: ModelConfig = field(default_factory=lambda: ModelConfig(lr=1e-5))
    engine: EngineConfig = field(default_factory=EngineConfig)
