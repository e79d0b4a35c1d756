"""Trainer configuration from a few numbers, for the Python interface."""

from typing import Any

from parallel.runtime.environment import MOST_RANKS
from parallel.runtime.refusal import short_repr
from verl_megatron.config.models import CriticConfig, EngineConfig, ModelConfig
from verl_megatron.config.older_names import older_settings
from verl_megatron.config.rollout import RolloutConfig
from verl_megatron.config.schemas import TrainerConfig

MIXED_PRECISION = {
    True: "bfloat16",
    False: "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp32": "float32",
    "float32": "float32",
    "auto": "auto",
}
RECOMPUTE = {True: "full", False: "none", "none": "none", "selective": "selective", "full": "full"}


def get_trainer_config(
    dp_size: int = 1,
    tp_size: int = 1,
    pp_size: int = 1,
    hybrid_engine: bool = True,
    enable_recompute: bool | str = False,
    mixed_precision: bool | str = "auto",
    **older: Any,
) -> TrainerConfig:
    """Return a configuration whose actor and critic share `dp_size * tp_size * pp_size` ranks.

    All other settings are defaults, which can be changed as attributes.

    Args:
        hybrid_engine: vLLM on the actor's ranks, in replicas of `tp_size` ranks. Must be True.
        enable_recompute: True recomputes whole layers ("full"); also "selective" or "none".
        mixed_precision: True is bfloat16 with float32 master weights, False is float32; "auto" is bfloat16 on
            GPUs and float32 on CPUs.
        older: names of the older interface (`OLDER_NAMES`), such as `checkpoint_config`.

    Raises:
        ValueError: a size below 1, an unknown name or value, or `hybrid_engine=False`.
    """
    sizes = {"tp_size": tp_size, "pp_size": pp_size, "dp_size": dp_size}
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size <= MOST_RANKS:
            raise ValueError(
                f"{name}={short_repr(size)} must be a whole number of at least 1 and at most {MOST_RANKS}"
            )
    if not isinstance(hybrid_engine, bool):
        raise ValueError(f"hybrid_engine={short_repr(hybrid_engine)} must be True")
    if not hybrid_engine:
        raise ValueError(
            "hybrid_engine=False: leave it at True, and name ranks that only generate in rollout.devices, "
            "such as 2-3"
        )
    if not isinstance(enable_recompute, bool | str) or enable_recompute not in RECOMPUTE:
        raise ValueError(
            f"enable_recompute={short_repr(enable_recompute)} is not known; "
            f"choose one of {', '.join(map(str, RECOMPUTE))}"
        )
    if not isinstance(mixed_precision, bool | str) or mixed_precision not in MIXED_PRECISION:
        raise ValueError(
            f"mixed_precision={short_repr(mixed_precision)} is not known; "
            f"choose one of {', '.join(map(str, MIXED_PRECISION))}"
        )
    layout = f"tp{tp_size}pp{pp_size}dp{dp_size}"
    config = TrainerConfig(
        actor=ModelConfig(layout=layout),
        critic=CriticConfig(layout=layout),
        engine=EngineConfig(dtype=MIXED_PRECISION[mixed_precision], recompute=RECOMPUTE[enable_recompute]),
        rollout=RolloutConfig(tp=tp_size),
    )
    for name, value in older_settings(older, where="get_trainer_config()").items():
        config.set(name, value)
    return config
