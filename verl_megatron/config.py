"""All settings with their meaning, unit and default; `checks/` refuses contradictory ones.

Settings have two levels: section and setting. Each part of the program receives only its own section.
"""

import os
from dataclasses import dataclass, field
from typing import Any

from parallel.runtime.refusal import nearest

MISSING = "???"  # OmegaConf's marker for a required setting


class UnknownSettingError(AttributeError, ValueError):
    """An unknown setting name: an AttributeError in Python terms, a ValueError as for any user error."""


class Section:
    """A group of settings. Assigning an unknown name is an error; a pathlib.Path is stored as a string."""

    def __setattr__(self, name: str, value: Any) -> None:
        known = type(self).__dataclass_fields__
        if name not in known:
            raise UnknownSettingError(
                f"{name} is no setting of {type(self).__name__}{nearest(name, known)}; "
                f"it has {', '.join(known)}"
            )
        super().__setattr__(name, os.fspath(value) if isinstance(value, os.PathLike) else value)


@dataclass(kw_only=True)
class RunConfig(Section):
    """Settings of the whole run."""

    output_dir: str = "outputs/run"  # logs, checkpoints and the exported models
    seed: int = 1  # seed of data order, sampling and newly initialised weights
    iterations: int = 100  # rounds of rollout, scoring and update; optimizer steps in a supervised run
    validate_interval: int = 0  # iterations between validations; 0: only before the first and after the last
    save_interval: int = 0  # iterations between checkpoints; 0: none
    keep_last_k: int = 2  # number of newest checkpoints to keep; 0: all
    keep_best_k: int = 0  # number of further checkpoints to keep, by validation accuracy
    async_save: bool = False  # write checkpoints in the background from a copy in host memory
    resume: str = "newest"  # newest; verify: newest, and compare the repeated iteration; never: start over
    stall_timeout_s: float = 300.0  # abort after this many seconds without progress; 0: never
    export: bool = True  # write a Hugging Face folder of the actor (and critic) at the end
    track_metrics: list[str] = field(
        default_factory=lambda: ["console", "jsonl", "csv", "tensorboard"]
    )  # also wandb, mlflow, timeline (where ranks wait), profile (PyTorch profiler traces)


@dataclass(kw_only=True)
class DataConfig(Section):
    """Prompts: JSON lines with at least a prompt and the ground truth for its reward."""

    train: str = MISSING  # .jsonl file
    validation: str = ""  # .jsonl file; empty: no validation
    prompt_key: str = "prompt"  # a string, or a list of chat messages
    answer_key: str = "answer"  # ground truth passed to the reward
    max_prompt_tokens: int = 1024  # maximum prompt length, chat template included
    overlong: str = "error"  # prompts over max_prompt_tokens: "error" or "drop" (the count is reported)
    prompts_per_iteration: int = 256  # prompts per iteration
    samples_per_prompt: int = 1  # responses per prompt; GRPO needs at least 2
    shuffle: bool = True  # reshuffle the prompts every epoch
    validation_rows: int = 0  # number of validation prompts; 0: the whole file
    validation_temperature: float = 1.0  # sampling temperature of validation; 0: greedy


@dataclass(kw_only=True)
class ModelConfig(Section):
    """A trainable model: its weights, parallel layout and learning rate."""

    path: str = ""  # Hugging Face folder; empty for the critic: start from the actor's weights
    layout: str = "tp1"  # such as tp2pp2 or tp4pp2vpp2sp; dp is the number of ranks divided by the rest
    stage_layers: list[int] = field(
        default_factory=list
    )  # number of layers per pipeline stage; empty: equal stages
    devices: str = ""  # ranks such as 0-3 or cuda:0-3; empty: all
    lr: float = 1e-6  # peak learning rate, reached after the warm-up


@dataclass(kw_only=True)
class EngineConfig(Section):
    """Compute settings of all Megatron-Core models, and the optimizer (AdamW) of the trainable ones.

    fp8 is bfloat16 with the matrix products of the layers in fp8. Both keep float32 master weights.
    """

    dtype: str = "auto"  # bfloat16, fp8 or float32; auto: bfloat16 on GPUs, float32 on CPUs
    spec: str = "auto"  # layer spec: te (transformer-engine) or local; auto: te on GPUs if it is installed
    recompute: str = "none"  # activation recomputation: none, selective (attention), full (whole layers)
    tokens_per_micro_batch: int = 8192  # maximum packed tokens of a micro-batch, per context-parallel rank
    distributed_optimizer: bool = True  # shard the optimizer state over the dp and cp ranks
    schedule: str = "constant"  # learning-rate schedule after the warm-up: constant, linear, cosine
    warmup_steps: int = 0  # optimizer steps of linear learning-rate warm-up
    min_lr_ratio: float = 0.0  # final learning rate / lr, reached one step after the last
    weight_decay: float = 0.01  # decoupled weight decay, as in AdamW
    clip_grad: float = 1.0  # maximum global gradient norm; 0: no clipping
    adam_betas: list[float] = field(
        default_factory=lambda: [0.9, 0.95]
    )  # decay rates of the first and second moment
    adam_eps: float = 1e-8  # added to the square root of the second moment


@dataclass(kw_only=True)
class RewardConfig(Section):
    """Source of the rewards: a Python function, a reward model, or both (their sum)."""

    function: str = "match"  # built-in name or path.py:function (must import within 45 s); empty: none
    timeout_s: float = 10.0  # time limit of one call, seconds
    workers: int = 1  # reward worker processes per vLLM replica
    failure_score: float = 0.0  # score of a call that raised, timed out or returned no finite number
    path: str = ""  # Hugging Face sequence-classification folder; empty: no reward model
    layout: str = "tp1"  # layout of the reward model, as actor.layout
    devices: str = ""  # ranks of the reward model, as actor.devices


@dataclass(kw_only=True)
class RolloutConfig(Section):
    """vLLM and its sampling parameters."""

    tp: int = 1  # tensor-parallel size of a replica; there are world size / tp replicas
    temperature: float = 1.0  # sampling temperature; the trainer's log-probs use the same one
    top_p: float = 1.0  # nucleus sampling threshold; 1: off
    top_k: int = -1  # number of most likely tokens to sample from; -1: all
    min_tokens: int = 0  # minimum response length before the end-of-sequence token is allowed
    max_tokens: int = 1024  # maximum response length
    stop: list[str] = field(default_factory=list)  # strings that end a response (they need a tokenizer)
    stop_token_ids: list[int] = field(
        default_factory=list
    )  # token ids that end a response, in addition to the end-of-sequence token
    ignore_eos: bool = False  # always generate max_tokens tokens, for benchmarks
    dtype: str = "auto"  # dtype of vLLM's weights; auto: the actor's
    max_num_seqs: int = 256  # maximum number of samples that a replica decodes concurrently
    gpu_memory_utilization: float = 0.5  # fraction of GPU memory for vLLM's weights and KV cache
    kv_cache_mib: int = 64  # KV cache per rank on CPUs, MiB
    enforce_eager: bool = False  # run without CUDA graphs
    sleep: bool = True  # free vLLM's GPU memory during training (GPUs only)


@dataclass(kw_only=True)
class AlgorithmConfig(Section):
    """Policy-gradient algorithm; advantages.py, losses.py and kl.py give the formulas and their sources."""

    name: str = "ppo"  # ppo: critic and GAE; grpo: group-relative scores, no critic
    gamma: float = 1.0  # discount factor
    lam: float = 0.95  # lambda of generalized advantage estimation (GAE)
    whiten: bool = True  # normalise advantages (mean 0, std 1) over the iteration's response tokens
    scale_by_std: bool = True  # GRPO: divide by the standard deviation of the group
    epochs: int = 1  # passes over the samples of an iteration
    mini_batches: int = 1  # optimizer steps per pass
    clip_low: float = 0.2  # lower bound of the clipped ratio: 1 - clip_low
    clip_high: float = 0.2  # upper bound of the clipped ratio: 1 + clip_high
    value_clip: float = 0.2  # clip range of the value loss; 0: off
    entropy_coef: float = 0.0  # coefficient of the entropy bonus in the policy loss
    kl_coef: float = 0.0  # coefficient of the KL penalty to the reference; 0: no reference model
    kl_in: str = "reward"  # where the KL penalty is added: token rewards (reward) or policy loss (loss)
    kl_estimator: str = "k1"  # with x = log p - log q: k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x
    kl_target: float = 0.0  # target KL per sample (sum over tokens) of the adaptive coefficient; 0: fixed
    kl_horizon: int = 10_000  # horizon of the adaptive coefficient, in samples
    importance_cap: float = 0.0  # cap of the truncated importance weight, sampler -> trainer; 0: off
    stop_kl: float = 0.0  # skip the iteration's remaining updates above this approximate KL; 0: off
    critic_warmup: int = 0  # number of first iterations that train only the critic


@dataclass(kw_only=True)
class ReshardConfig(Section):
    """Weight sync from Megatron's shards into vLLM's shards.

    Modes: `keep` gives vLLM its own copy. `share` lets equal shards share memory. `swap` writes vLLM's
    weights into Megatron's memory, whose weights are restored after rollout.

    Offloading frees the GPU memory of models that are not being updated: gradient buffers are dropped, and
    optimizer state is moved to pinned host memory.
    """

    mode: str = "keep"  # keep, share or swap
    window_mib: int = 256  # staging memory per rank, MiB
    verify: str = "sample"  # checksums at every sync: sample (a rotating sixteenth of the slices), all, none
    offload: str = "none"  # state to offload between updates: none, grads, optimizer or all


@dataclass(kw_only=True)
class TrainerConfig(Section):
    """All sections of an RL run."""

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
    max_tokens: int = 2048  # maximum length of prompt and response together
    overlong: str = "error"  # samples over max_tokens: "error" or "drop" (the count is reported)
    rows_per_step: int = 256  # demonstrations per optimizer step
    shuffle: bool = True  # reshuffle the demonstrations every epoch


@dataclass(kw_only=True)
class PairDataConfig(Section):
    """Preference pairs: JSON lines with a prompt, a chosen and a rejected response."""

    train: str = MISSING  # .jsonl file
    validation: str = ""  # .jsonl file; empty: no validation
    prompt_key: str = "prompt"  # a string, or a list of chat messages; not needed where responses repeat it
    chosen_key: str = "chosen"  # the better response: a string, or messages that end in an assistant turn
    rejected_key: str = "rejected"  # the worse response, in the same form
    max_tokens: int = 2048  # maximum length of the prompt with either response
    overlong: str = "error"  # pairs over max_tokens: "error" or "drop" (the count is reported)
    pairs_per_step: int = 64  # pairs per optimizer step
    shuffle: bool = True  # reshuffle the pairs every epoch


@dataclass(kw_only=True)
class DPOLossConfig(Section):
    """Loss of direct preference optimization; verl_megatron/algorithms/preference.py has the formulas."""

    loss: str = "sigmoid"  # sigmoid: DPO, conservative with label_smoothing; ipo: squared distance
    beta: float = 0.1  # strength of the pull to the reference, the initial weights of the actor
    label_smoothing: float = 0.0  # probability that a label is wrong (conservative DPO); sigmoid only


@dataclass(kw_only=True)
class SFTConfig(Section):
    """All sections of a supervised run; `run.iterations` counts optimizer steps."""

    run: RunConfig = field(default_factory=RunConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    actor: ModelConfig = field(default_factory=lambda: ModelConfig(lr=1e-5))
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(kw_only=True)
class DPOConfig(Section):
    """All sections of a run of direct preference optimization; `run.iterations` counts optimizer steps."""

    run: RunConfig = field(default_factory=RunConfig)
    data: PairDataConfig = field(default_factory=PairDataConfig)
    actor: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    dpo: DPOLossConfig = field(default_factory=DPOLossConfig)


@dataclass(kw_only=True)
class RewardModelConfig(Section):
    """All sections of reward-model training; `run.iterations` counts optimizer steps.

    `reward` is the model to train. From the folder of a language model it starts with a new score head.
    """

    run: RunConfig = field(default_factory=RunConfig)
    data: PairDataConfig = field(default_factory=PairDataConfig)
    reward: ModelConfig = field(default_factory=lambda: ModelConfig(lr=1e-5))
    engine: EngineConfig = field(default_factory=EngineConfig)


SupervisedConfig = SFTConfig | DPOConfig | RewardModelConfig


def is_paired(data: Section) -> bool:
    """Whether a run with this data section trains on pairs of responses."""
    return isinstance(data, PairDataConfig)


def items_per_step(data: SFTDataConfig | PairDataConfig) -> int:
    """Return the demonstrations or pairs of an optimizer step."""
    return data.pairs_per_step if isinstance(data, PairDataConfig) else data.rows_per_step
