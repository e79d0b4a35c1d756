"""Names of the older Python interface: what each stands for here, or why it is refused.

`OLDER_NAMES` also makes the table of docs/python.md (tools/make_docs.py), and a test tries each example.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from parallel.runtime.refusal import nearest, short_repr
from verl_megatron.config.names import Table, row

PLACES = {
    "verl.RLTrainer": "verl_megatron.RLTrainer",
    "verl.trainer.RLTrainer": "verl_megatron.trainer.RLTrainer",
    "verl.TrainerConfig": "verl_megatron.TrainerConfig",
    "verl.get_trainer_config": "verl_megatron.get_trainer_config",
    "verl.config.get_trainer_config": "verl_megatron.config.get_trainer_config",
    "verl.RolloutBatch": "verl_megatron.RolloutBatch",
    "verl.DataCollector": "verl_megatron.DataCollector",
    "verl.VLLMActor": "verl_megatron.VLLMActor",
    "verl.utils.vllm_wrapper.VLLMActor": "verl_megatron.utils.vllm_wrapper.VLLMActor",
    "verl.utils.is_flash_attn_available": "verl_megatron.utils.is_flash_attn_available",
}  # older import -> import here
CHECKPOINT = {
    "save_interval": "run.save_interval",
    "keep_last_k": "run.keep_last_k",
    "async_save": "run.async_save",
    "save_dir": "run.output_dir",
}
ROW_TOKENS = 2048  # defaults of data.max_prompt_tokens + rollout.max_tokens


@dataclass(frozen=True, kw_only=True)
class OlderName:
    """An argument of the older Python interface."""

    example: Any
    gives: str  # the settings that stand for the example, or what happens, for the documents
    read: Callable[[Any], dict[str, Any]]  # value -> settings by "section.setting"; ValueError: refused


def _devices(value: Any, *, name: str, setting: str) -> dict[str, Any]:
    text = value.get("model") if isinstance(value, Mapping) and set(value) == {"model"} else value
    if not isinstance(text, str):
        raise ValueError(f'{name}={short_repr(value)} is not understood; write {{"model": "cuda:0-3"}}')
    return {setting: text}


def named(value: Any, *, setting: str) -> dict[str, Any]:
    """Return `value` as that of `setting`."""
    return {setting: value}


def _checkpoints(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(
            f'checkpoint_config={short_repr(value)} is no dict; write {{"save_interval": 100, ...}}, '
            f"with {', '.join(CHECKPOINT)}"
        )
    if unknown := [name for name in value if name not in CHECKPOINT]:
        raise ValueError(
            f"checkpoint_config has no {short_repr(unknown[0])}{nearest(unknown[0], CHECKPOINT)}; "
            f"it takes {', '.join(CHECKPOINT)}, and section run has the other settings"
        )
    return {CHECKPOINT[name]: setting for name, setting in value.items()}


# What each strategy of PyTorch's FSDP is here. A distributed optimizer shards its state alone.
FSDP: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"engine.sharding": "full"},
    "NO_SHARD": {"engine.distributed_optimizer": False},
}


def _fsdp(value: Any) -> dict[str, Any]:
    if value in (None, {}):
        return {}
    strategy = value.get("sharding_strategy") if isinstance(value, dict) and len(value) == 1 else None
    if isinstance(strategy, str) and strategy in FSDP:
        return FSDP[strategy]
    raise ValueError(
        f"fsdp_config={short_repr(value)}: only a sharding_strategy is known, {' or '.join(FSDP)}; write "
        '{"sharding_strategy": "FULL_SHARD"}, or leave it out: engine.distributed_optimizer=True (the '
        "default) shards the optimizer's state alone"
    )


def _remote_code(value: Any) -> dict[str, Any]:
    check_remote_code(value)
    return {}


def check_remote_code(value: Any) -> None:
    """Refuse trust_remote_code unless it is False."""
    if value is not False:
        raise ValueError(
            f"trust_remote_code={short_repr(value)}: a model folder's own Python code is never run, because "
            "Megatron-Core and vLLM need their own version of every architecture; leave it at False and use "
            "a model of Llama, Mistral, Qwen2 or Qwen3"
        )


def _offload_folder(value: Any) -> dict[str, Any]:
    if value in (None, ""):
        return {}
    raise ValueError(
        f"offload_folder={short_repr(value)}: nothing is offloaded to disks; set reshard.offload=all, which "
        "moves optimizer states to host memory, and leave offload_folder out"
    )


def _micro_batches(value: Any) -> dict[str, Any]:
    if type(value) is not int or not 1 <= value <= 1_000_000:
        raise ValueError(
            f"micro_batch_size_per_device={short_repr(value)} must be a whole number of samples, at least 1"
        )
    return {"engine.tokens_per_micro_batch": value * ROW_TOKENS}


def _sets(name: str, section: str) -> OlderName:
    setting = f"{section}.devices"
    return OlderName(
        example={"model": "cuda:0-3"},
        gives=f"`{setting}=cuda:0-3`",
        read=partial(_devices, name=name, setting=setting),
    )


OLDER_NAMES = {
    "actor_device_mapping": _sets("actor_device_mapping", "actor"),
    "critic_device_mapping": _sets("critic_device_mapping", "critic"),
    "reward_device_mapping": _sets("reward_device_mapping", "reward"),
    "checkpoint_config": OlderName(
        example={"save_interval": 100, "keep_last_k": 3, "async_save": True},
        gives="`run.save_interval=100`, `run.keep_last_k=3`, `run.async_save=true`",
        read=_checkpoints,
    ),
    "use_dynamic_batching": OlderName(
        example=True,
        gives="`rollout.dynamic_batching=true`",
        read=partial(named, setting="rollout.dynamic_batching"),
    ),
    "batch_size_per_device": OlderName(
        example=32,
        gives="`rollout.max_num_seqs=32`",
        read=partial(named, setting="rollout.max_num_seqs"),
    ),
    "micro_batch_size_per_device": OlderName(
        example=4,
        gives=f"`engine.tokens_per_micro_batch={4 * ROW_TOKENS}`: so many samples of {ROW_TOKENS:,} tokens",
        read=_micro_batches,
    ),
    "fsdp_config": OlderName(
        example={"sharding_strategy": "FULL_SHARD"},
        gives="`engine.sharding=full`",
        read=_fsdp,
    ),
    "trust_remote_code": OlderName(
        example=True,
        gives="refused: no code of a model folder is run; `False` is accepted",
        read=_remote_code,
    ),
    "offload_folder": OlderName(
        example="offload",
        gives="refused: `reshard.offload=all` offloads to host memory, nothing goes to disks",
        read=_offload_folder,
    ),
}


# Attributes of the older section `rollout`, and the settings of that section here.
OLDER_ROLLOUT = {"use_dynamic_batching": "dynamic_batching", "batch_size_per_device": "max_num_seqs"}


# The same for command lines and recipes, where these are no sections.
OLDER: Table = {
    "Older interface": (
        row("actor_device_mapping actor_device_mapping.model", "`actor.devices`", "such as `cuda:0-3`"),
        row("critic_device_mapping critic_device_mapping.model", "`critic.devices`", "such as `cuda:0-3`"),
        row("reward_device_mapping reward_device_mapping.model", "`reward.devices`", "such as `cuda:0-3`"),
        *(row(f"checkpoint_config.{name}", setting) for name, setting in CHECKPOINT.items()),
        row("use_dynamic_batching rollout.use_dynamic_batching", "`rollout.dynamic_batching`"),
        row("batch_size_per_device", "`rollout.max_num_seqs`", "samples that a replica decodes at once"),
        row(
            "fsdp_config.sharding_strategy",
            "`engine.sharding`",
            "`FULL_SHARD` is `full`",
        ),
        row("offload_folder", "`reshard.offload`", "to host memory, not to disks"),
        row("dp_size tp_size pp_size", "`actor.layout`", "such as `tp2pp2dp2`"),
        row("hybrid_engine", "rollout.devices", "empty: vLLM on the actor's ranks"),
        row("enable_recompute mixed_precision", "engine.recompute engine.dtype"),
    )
}


def older_settings(given: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return the settings, by "section.setting", that stand for arguments of the older interface.

    Args:
        where: the function that was called, for messages.

    Raises:
        ValueError: a name that is not in `OLDER_NAMES`, or a value without an equivalent.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in OLDER_NAMES:
            raise ValueError(
                f"{where} has no argument {name}{nearest(name, OLDER_NAMES)}; set it in the configuration, "
                "as section.setting"
            )
        found |= OLDER_NAMES[name].read(value)
    return found
