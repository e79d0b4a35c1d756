"""All settings with their meaning, unit, default and valid values; `checks/` refuses contradictory ones.

Settings have two levels: section and setting. Each part of the program receives only its own section.

`within` is an interval: square brackets are closed ends, round ones open. Upper bounds are where a value
stops being meaningful, or limits of hardware, vLLM or float32. Limits that depend on the model, the data or
the machine are in `checks/`.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from parallel.runtime.refusal import nearest

MISSING = "???"  # OmegaConf's marker for a required setting
COUNT, POSITIVE = "[0, 1000000000]", "[1, 1000000000]"  # iterations, steps, tokens: more than any run needs
SHARE = "[0, 1000000]"  # coefficients and norms: far below float32 overflow of a loss
LEAST_TEMPERATURE = 0.01  # vLLM takes lower ones above 0 for this one

ALGORITHM_NAMES = (
    *("ppo", "grpo", "dr_grpo", "gspo", "cispo", "rloo"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "distillation"),
)
OBJECTIVE_NAMES = ("clip", "gspo", "gspo_token", "cispo", "reinforce")
NORMALIZER_NAMES = ("token_mean", "sequence_mean", "sequence_sum")
CORRECTION_LEVELS = ("token", "sequence", "geometric")

RENAMED = {  # former name -> name; the former one is refused with the new one in the message
    "data.rows_per_step": "data.samples_per_step",
    "data.validation_rows": "data.validation_samples",
    "engine.schedule": "engine.lr_decay_style",
    "engine.spec": "engine.transformer_impl",
    "engine.warmup_steps": "engine.lr_warmup_steps",
    "algorithm.clip_high": "algorithm.clip_ratio_high",
    "algorithm.clip_low": "algorithm.clip_ratio_low",
    "algorithm.importance_cap": "algorithm.correction_high",
    "algorithm.tis_cap": "algorithm.correction_high",
    "algorithm.kl_horizon": "algorithm.kl_ctrl_horizon",
    "algorithm.kl_target": "algorithm.kl_ctrl_target",
    "algorithm.lam": "algorithm.gae_lambda",
    "algorithm.mini_batches": "algorithm.num_mini_batches",
    "algorithm.stop_kl": "algorithm.target_kl",
    "algorithm.value_clip": "algorithm.cliprange_value",
}


def present_name(name: str, known: Iterable[str]) -> str:
    """Return what the setting formerly called `name` is called in a section with settings `known`, or ""."""
    names = (new.partition(".")[2] for old, new in RENAMED.items() if old.partition(".")[2] == name)
    return next((new for new in names if new in known), "")


class UnknownSettingError(AttributeError, ValueError):
    """An unknown setting name: an AttributeError in Python terms, a ValueError as for any user error."""


class Section:
    """A group of settings. Unknown names are refused; a pathlib.Path is stored as a string."""

    def __new__(cls, **settings: Any) -> Self:
        for name in settings:
            cls._refuse_unknown(name)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse_unknown(name)
        super().__setattr__(name, os.fspath(value) if isinstance(value, os.PathLike) else value)

    @classmethod
    def _refuse_unknown(cls, name: str) -> None:
        known = cls.__dataclass_fields__
        if new := present_name(name, known):
            raise UnknownSettingError(f"{name} of {cls.__name__} is now called {new}; rename it")
        if name not in known:
            raise UnknownSettingError(
                f"{name} is no setting of {cls.__name__}{nearest(name, known)}; it has {', '.join(known)}"
            )


def setting(default: Any, meaning: str, *, within: str = "", choices: tuple[str, ...] = ()) -> Any:
    """Declare a dataclass field whose metadata says what the setting means and which values it takes.

    Args:
        default: copied for each section if it is a list.
        meaning: with the unit, for users.
        within: interval of a number, or of each element of a list, such as "(0, 1]"; empty: any.
        choices: valid values; empty: any.
    """
    metadata = {"meaning": meaning, "within": within, "choices": choices}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class RunConfig(Section):
    """Settings of the whole run."""

    output_dir: str = setting("outputs/run", "logs, checkpoints and the exported models")
    seed: int = setting(
        1, "seed of data order, sampling and newly initialised weights", within="[0, 4294967295]"
    )  # numpy's range
    iterations: int = setting(
        100, "rounds of rollout, scoring and update; optimizer steps in a supervised run", within=POSITIVE
    )
    validate_interval: int = setting(
        0, "iterations between validations; 0: only before the first and after the last", within=COUNT
    )
    save_interval: int = setting(0, "iterations between checkpoints; 0: none", within=COUNT)
    keep_last_k: int = setting(2, "number of newest checkpoints to keep; 0: all", within=COUNT)
    keep_best_k: int = setting(
        0, "number of further checkpoints to keep, by validation accuracy", within=COUNT
    )
    async_save: bool = setting(False, "write checkpoints in the background from a copy in host memory")
    resume: str = setting(
        "newest",
        "newest; verify: newest, and compare the repeated iteration; never: start over",
        choices=("newest", "verify", "never"),
    )
    stall_timeout_s: float = setting(
        300.0, "abort after this many seconds without progress; 0: never", within="[0, 10000000]"
    )  # four months; operating-system waits overflow at 292 years
    export: bool = setting(True, "write a Hugging Face folder of the actor (and critic) at the end")
    track_metrics: list[str] = setting(
        ["console", "jsonl", "csv", "tensorboard"],
        "also wandb, mlflow, timeline (where ranks wait), profile (PyTorch profiler traces)",
    )


@dataclass(kw_only=True)
class DataConfig(Section):
    """Prompts: JSON lines with at least a prompt and the ground truth for its reward."""

    train: str = setting(MISSING, ".jsonl file")
    validation: str = setting("", ".jsonl file; empty: no validation")
    prompt_key: str = setting("prompt", "a string, or a list of chat messages")
    answer_key: str = setting("answer", "ground truth passed to the reward")
    max_prompt_tokens: int = setting(1024, "maximum prompt length, chat template included", within=POSITIVE)
    overlong: str = setting(
        "error",
        'prompts over max_prompt_tokens: "error" or "drop" (the count is reported)',
        choices=("error", "drop"),
    )
    # Every rank has a table of all samples.
    prompts_per_iteration: int = setting(256, "prompts per iteration", within="[1, 1000000]")
    samples_per_prompt: int = setting(1, "responses per prompt; GRPO needs at least 2", within="[1, 1000000]")
    shuffle: bool = setting(True, "reshuffle the prompts every epoch")
    validation_samples: int = setting(0, "number of validation prompts; 0: the whole file", within=COUNT)
    validation_temperature: float = setting(
        1.0, "sampling temperature of validation; 0: greedy", within="[0, 2]"
    )  # vLLM's range


@dataclass(kw_only=True)
class ModelConfig(Section):
    """A trainable model: its weights, parallel layout and learning rate."""

    path: str = setting("", "Hugging Face folder; empty for the critic: start from the actor's weights")
    layout: str = setting(
        "tp1", "such as tp2pp2 or tp4pp2vpp2sp; dp is the number of ranks divided by the rest"
    )
    stage_layers: list[int] = setting([], "number of layers per pipeline stage; empty: equal stages")
    devices: str = setting("", "ranks such as 0-3 or cuda:0-3; empty: all")
    # AdamW changes every weight by about lr.
    lr: float = setting(1e-6, "peak learning rate, reached after the warm-up", within="[0, 1]")


@dataclass(kw_only=True)
class EngineConfig(Section):
    """Compute settings of all Megatron-Core models, and the optimizer (AdamW) of the trainable ones.

    fp8 is bfloat16 with the matrix products of the layers in fp8. Both keep float32 master weights.
    """

    dtype: str = setting(
        "auto",
        "bfloat16, fp8 or float32; auto: bfloat16 on GPUs, float32 on CPUs",
        choices=("auto", "bfloat16", "fp8", "float32"),
    )
    transformer_impl: str = setting(
        "auto",
        "layer spec: te (transformer-engine) or local; auto: te on GPUs if it is installed",
        choices=("auto", "te", "local"),
    )
    recompute: str = setting(
        "none",
        "activation recomputation: none, selective (attention), full (whole layers)",
        choices=("none", "selective", "full"),
    )
    tokens_per_micro_batch: int = setting(
        8192, "maximum packed tokens of a micro-batch, per context-parallel rank", within=POSITIVE
    )
    distributed_optimizer: bool = setting(True, "shard the optimizer state over the dp and cp ranks")
    lr_decay_style: str = setting(
        "constant",
        "learning-rate schedule after the warm-up",
        choices=("constant", "linear", "cosine"),
    )
    lr_warmup_steps: int = setting(0, "optimizer steps of linear learning-rate warm-up", within=COUNT)
    min_lr_ratio: float = setting(
        0.0, "final learning rate / lr, reached one step after the last", within="[0, 1]"
    )
    weight_decay: float = setting(0.01, "decoupled weight decay, as in AdamW", within="[0, 1000]")
    clip_grad: float = setting(1.0, "maximum global gradient norm; 0: no clipping", within=SHARE)
    adam_betas: list[float] = setting(
        [0.9, 0.95], "decay rates of the first and second moment", within="[0, 1)"
    )
    # Smaller values underflow to a division by 0 in float32.
    adam_eps: float = setting(1e-8, "added to the square root of the second moment", within="[1e-30, 1]")


@dataclass(kw_only=True)
class RewardConfig(Section):
    """Source of the rewards: a Python function, a reward model, or both (their sum)."""

    function: str = setting(
        "match", "built-in name or path.py:function (must import within 45 s); empty: none"
    )
    timeout_s: float = setting(10.0, "time limit of one call, seconds", within="(0, 10000000]")
    workers: int = setting(1, "reward worker processes per vLLM replica", within="[1, 1024]")
    overlong_tokens: int = setting(
        0, "last tokens before rollout.max_tokens in which the score falls; 0: off", within=COUNT
    )
    overlong_penalty: float = setting(
        1.0, "largest deduction from the score, at rollout.max_tokens", within=SHARE
    )
    failure_score: float = setting(
        0.0, "score of a call that raised, timed out or returned no finite number", within="[-1e30, 1e30]"
    )  # float32
    path: str = setting("", "Hugging Face sequence-classification folder; empty: no reward model")
    layout: str = setting("tp1", "layout of the reward model, as actor.layout")
    devices: str = setting("", "ranks of the reward model, as actor.devices")


@dataclass(kw_only=True)
class TeacherConfig(Section):
    """Frozen model of on-policy distillation."""

    path: str = setting("", "Hugging Face folder with the actor's tokenizer; empty: no teacher")
    layout: str = setting("tp1", "layout of the teacher, as actor.layout")
    devices: str = setting("", "ranks of the teacher, as actor.devices")


@dataclass(kw_only=True)
class RolloutConfig(Section):
    """vLLM and its sampling parameters."""

    tp: int = setting(
        1, "tensor-parallel size of a replica; there are world size / tp replicas", within="[1, 131072]"
    )
    # Log-probs are of softmax(logits / temperature); vLLM refuses temperatures above 2.
    temperature: float = setting(
        1.0,
        "sampling temperature; the trainer's log-probs use the same one",
        within=f"[{LEAST_TEMPERATURE}, 2]",
    )
    top_p: float = setting(1.0, "nucleus sampling threshold; 1: off", within="(0, 1]")
    top_k: int = setting(
        -1, "number of most likely tokens to sample from; -1: all", within="[-1, 2147483647]"
    )
    min_tokens: int = setting(
        0, "minimum response length before the end-of-sequence token is allowed", within=COUNT
    )
    max_tokens: int = setting(1024, "maximum response length", within=POSITIVE)
    stop: list[str] = setting([], "strings that end a response (they need a tokenizer)")
    stop_token_ids: list[int] = setting(
        [], "token ids that end a response, in addition to the end-of-sequence token"
    )
    ignore_eos: bool = setting(False, "always generate max_tokens tokens, for benchmarks")
    dtype: str = setting(
        "auto",
        "dtype of vLLM's weights; auto: the actor's",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    # vLLM allocates a table row of max_model_len for each sample.
    max_num_seqs: int = setting(
        256, "maximum number of samples that a replica decodes concurrently", within="[1, 65536]"
    )
    gpu_memory_utilization: float = setting(
        0.5, "fraction of GPU memory for vLLM's weights and KV cache", within="(0, 1]"
    )
    kv_cache_mib: int = setting(64, "KV cache per rank on CPUs, MiB", within="[1, 16777216]")  # 16 TiB
    enforce_eager: bool = setting(False, "run without CUDA graphs")
    sleep: bool = setting(True, "free vLLM's GPU memory during training (GPUs only)")


@dataclass(kw_only=True)
class AlgorithmConfig(Section):
    """Policy-gradient algorithm; advantages.py, losses.py and kl.py give the formulas and their sources."""

    name: str = setting(
        "ppo", "advantages, with their usual objective and normalizer", choices=ALGORITHM_NAMES
    )
    objective: str = setting(
        "auto", "loss of a response token; auto: the algorithm's", choices=("auto", *OBJECTIVE_NAMES)
    )
    normalizer: str = setting(
        "auto", "divisor of the policy loss; auto: the algorithm's", choices=("auto", *NORMALIZER_NAMES)
    )
    gamma: float = setting(1.0, "discount factor", within="(0, 1]")
    gae_lambda: float = setting(0.95, "lambda of generalized advantage estimation (GAE)", within="[0, 1]")
    whiten: bool = setting(True, "normalise advantages (mean 0, std 1) over the iteration's response tokens")
    scale_by_std: bool = setting(True, "GRPO: divide by the standard deviation of the group")
    epochs: int = setting(1, "passes over the samples of an iteration", within="[1, 10000]")
    num_mini_batches: int = setting(1, "optimizer steps per pass", within="[1, 1000000]")
    clip_ratio_low: float = setting(
        0.2, "lower bound of the clipped ratio: 1 - clip_ratio_low", within="(0, 1]"
    )
    clip_ratio_high: float = setting(
        0.2, "upper bound of the clipped ratio: 1 + clip_ratio_high", within="(0, 1000000]"
    )
    dual_clip: float = setting(
        0.0, "largest loss of a token with a negative advantage, divided by it; 0: off", within=SHARE
    )
    cliprange_value: float = setting(0.2, "clip range of the value loss; 0: off", within=SHARE)
    entropy_coef: float = setting(0.0, "coefficient of the entropy bonus in the policy loss", within=SHARE)
    kl_coef: float = setting(
        0.0, "coefficient of the KL penalty to the reference; 0: no reference model", within=SHARE
    )
    kl_in: str = setting(
        "reward",
        "where the KL penalty is added: token rewards (reward), policy loss (loss) or nowhere (none)",
        choices=("reward", "loss", "none"),
    )
    kl_estimator: str = setting(
        "k1", "with x = log p - log q: k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x", choices=("k1", "k2", "k3")
    )
    kl_ctrl_target: float = setting(
        0.0, "target KL per sample (sum over tokens) of the adaptive coefficient; 0: fixed", within=SHARE
    )
    kl_ctrl_horizon: int = setting(10_000, "horizon of the adaptive coefficient, in samples", within=POSITIVE)
    kl_unbiased: bool = setting(
        False, "multiply the KL in the loss by p / p_old, which makes its gradient unbiased"
    )
    correction: str = setting(
        "none",
        "importance weights against the gap between sampler and trainer: truncate (TIS) or mask (IcePop, MIS)",
        choices=("none", "truncate", "mask"),
    )
    correction_level: str = setting(
        "token", "ratio of a token, of a sequence, or its geometric mean", choices=CORRECTION_LEVELS
    )
    correction_low: float = setting(0.0, "lower bound of the importance weight", within="[0, 1]")
    correction_high: float = setting(2.0, "upper bound of the importance weight", within="[1, 1000000]")
    reuse_logprobs: bool = setting(
        True, "take the old log-probs of an iteration's first step from its own forward pass if possible"
    )
    check_logprobs_interval: int = setting(
        50, "iterations between comparisons of reused log-probs with a separate pass; 0: never", within=COUNT
    )
    target_kl: float = setting(
        0.0, "skip the iteration's remaining updates above this approximate KL; 0: off", within=SHARE
    )
    dynamic_sampling: bool = setting(False, "replace prompts whose samples all have the same score")
    max_sampling_rounds: int = setting(10, "maximum number of rounds of dynamic sampling", within="[1, 1000]")
    teacher_coef: float = setting(
        1.0, "coefficient of the log-prob gap to the teacher in the advantages", within=SHARE
    )
    critic_warmup: int = setting(0, "number of first iterations that train only the critic", within=COUNT)


@dataclass(kw_only=True)
class ReshardConfig(Section):
    """Weight sync from Megatron's shards into vLLM's shards.

    Modes: `keep` gives vLLM its own copy. `share` lets equal shards share memory. `swap` writes vLLM's
    weights into Megatron's memory, whose weights are restored after rollout.

    Offloading frees the GPU memory of models that are not being updated: gradient buffers are dropped, and
    optimizer state is moved to pinned host memory.
    """

    mode: str = setting(
        "keep", "whose memory vLLM's weights use during rollout", choices=("keep", "share", "swap")
    )
    window_mib: int = setting(256, "staging memory per rank, MiB", within="[1, 65536]")  # 64 GiB
    verify: str = setting(
        "sample",
        "checksums at every sync: sample (a rotating sixteenth of the slices), all, none",
        choices=("sample", "all", "none"),
    )
    offload: str = setting(
        "none",
        "state to offload between updates",
        choices=("none", "grads", "optimizer", "all"),
    )


@dataclass(kw_only=True)
class TrainerConfig(Section):
    """All sections of an RL run."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    actor: ModelConfig = field(default_factory=ModelConfig)
    critic: ModelConfig = field(default_factory=lambda: ModelConfig(lr=1e-5))
    engine: EngineConfig = field(default_factory=EngineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reshard: ReshardConfig = field(default_factory=ReshardConfig)


@dataclass(kw_only=True)
class SFTDataConfig(Section):
    """Demonstrations: JSON lines with a prompt and the response to imitate."""

    train: str = setting(MISSING, ".jsonl file")
    validation: str = setting("", ".jsonl file; empty: no validation")
    prompt_key: str = setting("prompt", "a string, or a list of chat messages")
    response_key: str = setting("response", "a string")
    max_tokens: int = setting(
        2048, "maximum length of prompt and response together", within="[2, 1000000000]"
    )
    overlong: str = setting(
        "error",
        'samples over max_tokens: "error" or "drop" (the count is reported)',
        choices=("error", "drop"),
    )
    samples_per_step: int = setting(256, "demonstrations per optimizer step", within="[1, 1000000]")
    shuffle: bool = setting(True, "reshuffle the demonstrations every epoch")


@dataclass(kw_only=True)
class SFTConfig(Section):
    """All sections of a supervised run; `run.iterations` counts optimizer steps."""

    run: RunConfig = field(default_factory=RunConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    actor: ModelConfig = field(default_factory=lambda: ModelConfig(lr=1e-5))
    engine: EngineConfig = field(default_factory=EngineConfig)
