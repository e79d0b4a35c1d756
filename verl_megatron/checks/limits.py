"""Allowed values of each setting: intervals of numbers and tables of choices."""

from dataclasses import fields
from typing import Any, get_args, get_origin

from parallel.runtime.refusal import nearest, shown

# Square brackets are closed ends, round ones open. Upper bounds are where a value stops being meaningful, or
# limits of hardware, vLLM or float32. Limits that depend on model, data or machine are checked elsewhere.
COUNT = "[0, 1000000000]"  # iterations, steps, tokens: more than any run needs
SHARE = "[0, 1000000]"  # coefficients and norms: far below float32 overflow of a loss
INTERVALS = {
    "RunConfig": {
        "seed": "[0, 4294967295]",  # numpy's range
        "iterations": "[1, 1000000000]",
        "validate_interval": COUNT,
        "save_interval": COUNT,
        "keep_last_k": COUNT,
        "keep_best_k": COUNT,
        "stall_timeout_s": "[0, 10000000]",  # four months; operating-system waits overflow at 292 years
    },
    "DataConfig": {
        "max_prompt_tokens": "[1, 1000000000]",
        "prompts_per_iteration": "[1, 1000000]",  # every rank has a table of all samples
        "samples_per_prompt": "[1, 1000000]",
        "validation_rows": COUNT,
        "validation_temperature": "[0, 2]",  # vLLM's range
    },
    "SFTDataConfig": {"max_tokens": "[2, 1000000000]", "rows_per_step": "[1, 1000000]"},
    "PairDataConfig": {"max_tokens": "[2, 1000000000]", "pairs_per_step": "[1, 500000]"},
    "DPOLossConfig": {"beta": "(0, 1000]", "label_smoothing": "[0, 0.5)"},
    "ModelConfig": {"lr": "[0, 1]"},  # AdamW changes every weight by about lr
    "EngineConfig": {
        "tokens_per_micro_batch": "[1, 1000000000]",
        "warmup_steps": COUNT,
        "min_lr_ratio": "[0, 1]",
        "weight_decay": "[0, 1000]",
        "clip_grad": SHARE,
        "adam_eps": "[1e-30, 1]",  # smaller values underflow to a division by 0 in float32
    },
    "RewardConfig": {
        "timeout_s": "(0, 10000000]",
        "workers": "[1, 1024]",
        "failure_score": "[-1e30, 1e30]",
    },  # float32
    "RolloutConfig": {
        "tp": "[1, 131072]",
        # Log-probs are of softmax(logits / temperature). vLLM raises lower ones to 0.01, refuses higher ones.
        "temperature": "[0.01, 2]",
        "top_p": "(0, 1]",
        "top_k": "[-1, 2147483647]",
        "min_tokens": COUNT,
        "max_tokens": "[1, 1000000000]",
        "max_num_seqs": "[1, 65536]",  # vLLM allocates a table row of max_model_len each
        "gpu_memory_utilization": "(0, 1]",
        "kv_cache_mib": "[1, 16777216]",  # 16 TiB
    },
    "AlgorithmConfig": {
        "gamma": "(0, 1]",
        "lam": "[0, 1]",
        "epochs": "[1, 10000]",
        "mini_batches": "[1, 1000000]",
        "clip_low": "(0, 1]",
        "clip_high": "(0, 1000000]",
        "value_clip": SHARE,
        "entropy_coef": SHARE,
        "kl_coef": SHARE,
        "kl_target": SHARE,
        "kl_horizon": "[1, 1000000000]",
        "importance_cap": SHARE,
        "stop_kl": SHARE,
        "critic_warmup": COUNT,
    },
    "ReshardConfig": {"window_mib": "[1, 65536]"},  # 64 GiB of GPU memory
}

CHOICES = {
    "RunConfig": {"resume": ("newest", "verify", "never")},
    "DataConfig": {"overlong": ("error", "drop")},
    "SFTDataConfig": {"overlong": ("error", "drop")},
    "PairDataConfig": {"overlong": ("error", "drop")},
    "DPOLossConfig": {"loss": ("sigmoid", "ipo")},
    "EngineConfig": {
        "dtype": ("auto", "bfloat16", "fp8", "float32"),
        "spec": ("auto", "te", "local"),
        "recompute": ("none", "selective", "full"),
        "schedule": ("constant", "linear", "cosine"),
    },
    "RolloutConfig": {"dtype": ("auto", "bfloat16", "float16", "float32")},
    "AlgorithmConfig": {
        "name": ("ppo", "grpo"),
        "kl_in": ("reward", "loss"),
        "kl_estimator": ("k1", "k2", "k3"),
    },
    "ReshardConfig": {
        "mode": ("keep", "share", "swap"),
        "verify": ("sample", "all", "none"),
        "offload": ("none", "grads", "optimizer", "all"),
    },
}


def inside(value: float, interval: str) -> bool:
    """Whether `value` is in an interval such as "(0, 1]"; NaN is in none."""
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below


def check_types(config: Any) -> list[str]:
    """Return a problem for each section and setting of `config` with a wrong type."""
    problems = []
    for section in fields(config):
        values = getattr(config, section.name)
        if type(values) is not section.type:
            problems.append(f"{section.name}={shown(values)} is no section; give a {section.type.__name__}")
            continue
        for field in fields(values):
            value = getattr(values, field.name, None)
            if not _has_type(value, field.type):
                problems.append(
                    f"{section.name}.{field.name}={shown(value)} has a wrong type ({type(value).__name__}); "
                    f"give {TYPES[field.type]}"
                )
    return problems


TYPES = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a text",
    list[str]: "a list of texts",
    list[int]: "a list of integers",
    list[float]: "a list of numbers",
}


def _has_type(value: Any, kind: Any) -> bool:
    if get_origin(kind) is list:
        return isinstance(value, list | tuple) and all(
            _has_type(element, get_args(kind)[0]) for element in value
        )
    if isinstance(value, bool) or kind is bool:  # bool is a subclass of int
        return kind is bool and isinstance(value, bool)
    return isinstance(value, int | float if kind is float else kind)


def check_values(config: Any) -> list[str]:
    """Return a problem for each setting of `config` outside its interval or choices; types must be right."""
    problems = []
    for section in fields(config):
        values = getattr(config, section.name)
        kind = type(values).__name__
        for name, interval in INTERVALS.get(kind, {}).items():
            value = getattr(values, name)
            if not inside(value, interval):
                problems.append(
                    f"{section.name}.{name}={shown(value)} lies outside {interval}; choose a value inside"
                )
        for name, choices in CHOICES.get(kind, {}).items():
            value = getattr(values, name)
            if value not in choices:
                problems.append(
                    f"{section.name}.{name}={shown(value)} is not known{nearest(value, choices)}; "
                    f"choose one of {', '.join(choices)}"
                )
    return problems
