"""Reinforcement learning of language models with Megatron-Core and vLLM.

Public names are imported lazily, on first use.
"""

import importlib

from parallel.runtime.refusal import speak_once
from parallel.runtime.unusable import hide_unusable

__version__ = "0.1.0"

_MODULES = {
    "RLTrainer": "trainer",
    "TrainerConfig": "config",
    "get_trainer_config": "config",
    "RolloutBatch": "data.batch",
    "DataCollector": "data.collector",
    "VLLMActor": "rollout.vllm",
    "MetricsTracker": "observe.tracking",
}
__all__ = ["__version__", *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]  # names are resolved late

hide_unusable()


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    speak_once()
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
