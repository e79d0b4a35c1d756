"""Which values each setting may have: intervals of numbers and tables of choices, by section and setting."""

import difflib
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

# Square brackets include the end, round ones leave it out; "inf" has no upper end.
INTERVALS = {
    "RunConfig": {
        "seed": "[0, inf)",
        "iterations": "[1, inf)",
        "validate_interval": "[0, inf)",
        "save_interval": "[0, inf)",
        "keep_last_k": "[0, inf)",
        "keep_best_k": "[0, inf)",
        "stall_timeout_s": "[0, inf)",
    },
    "DataConfig": {
        "max_prompt_tokens": "[1, inf)",
        "prompts_per_iteration": "[1, inf)",
        "samples_per_prompt": "[1, inf)",
        "validation_rows": "[0, inf)",
        "validation_temperature": "[0, inf)",
    },
    "SFTDataConfig": {"max_tokens": "[2, inf)", "rows_per_step": "[1, inf)"},
    "ModelConfig": {"lr": "[0, inf)"},
    "EngineConfig": {
        "tokens_per_micro_batch": "[1, inf)",
        "warmup_steps": "[0, inf)",
        "min_lr_ratio": "[0, 1]",
        "weight_decay": "[0, inf)",
        "clip_grad": "[0, inf)",
        "adam_eps": "(0, inf)",
    },
    "RewardConfig": {"timeout_s": "(0, inf)", "workers": "[1, inf)", "failure_score": "(-inf, inf)"},
    "RolloutConfig": {
        "tp": "[1, inf)",
        "temperature": "(0, inf)",  # log-probs are those of softmax(logits / temperature)
        "top_p": "(0, 1]",
        "top_k": "[-1, inf)",
        "min_tokens": "[0, inf)",
        "max_tokens": "[1, inf)",
        "max_num_seqs": "[1, inf)",
        "gpu_memory_utilization": "(0, 1]",
        "kv_cache_mib": "[1, inf)",
    },
    "AlgorithmConfig": {
        "gamma": "(0, 1]",
        "lam": "[0, 1]",
        "epochs": "[1, inf)",
        "mini_batches": "[1, inf)",
        "clip_low": "(0, 1]",
        "clip_high": "(0, inf)",
        "value_clip": "[0, inf)",
        "entropy_coef": "[0, inf)",
        "kl_coef": "[0, inf)",
        "kl_target": "[0, inf)",
        "kl_horizon": "[1, inf)",
        "importance_cap": "[0, inf)",
        "stop_kl": "[0, inf)",
        "critic_warmup": "[0, inf)",
    },
    "ReshardConfig": {"window_mib": "[1, inf)"},
}

CHOICES = {
    "RunConfig": {"resume": ("newest", "verify", "never")},
    "DataConfig": {"overlong": ("error", "drop")},
    "SFTDataConfig": {"overlong": ("error", "drop")},
    "EngineConfig": {
        "dtype": ("auto", "bfloat16", "fp8", "float32"),
        "spec": ("auto", "te", "local"),
        "recompute": ("none", "selective", "full"),
        "schedule": ("constant", "linear", "cosine"),
    },
    "RolloutConfig": {"dtype": ("auto", "bfloat16", "float16", "float32")},
    "AlgorithmConfig": {"name": ("ppo", "grpo"), "kl_in": ("reward", "loss"), "kl_estimator": ("k1", "k2", "k3")},
    "ReshardConfig": {"mode": ("keep", "share", "swap"), "verify": ("sample", "all", "none"), "offload": ("none", "grads", "optimizer", "all")},
}


def inside(value: float, interval: str) -> bool:
    """Whether `value` lies in an interval such as "(0, 1]"; NaN lies in none."""
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below


def check_values(config: Any) -> list[str]:
    """A problem for each setting of `config` (a dataclass of sections) outside its interval or its choices."""
    problems = []
    for section in fields(config):
        values = getattr(config, section.name)
        kind = type(values).__name__
        assert is_dataclass(values), f"{section.name} is a section"
        for name, interval in INTERVALS.get(kind, {}).items():
            value = getattr(values, name)
            if not inside(value, interval):
                problems.append(f"{section.name}.{name}={value} lies outside {interval}; choose a value inside")
        for name, choices in CHOICES.get(kind, {}).items():
            value = getattr(values, name)
            if value not in choices:
                problems.append(f"{section.name}.{name}={value!r} is not known{nearest(value, choices)}; choose one of {', '.join(choices)}")
    return problems


def nearest(name: str, names: Iterable[str]) -> str:
    """`, did you mean "x"?` for the closest of `names`, or nothing."""
    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f', did you mean "{close[0]}"?' if close else ""
