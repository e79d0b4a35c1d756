"""Megatron-Core on GPUs loads converted checkpoints into transformer-engine's layers, strictly.

What it saves converts back.

Strictly: a missing key that such a model asks for, `_extra_state` included, fails Megatron-Core's load.
"""

import sys
from pathlib import Path

import torch.distributed as dist

from parallel import device
from parallel.convert import to_megatron
from tests.distributed.convert_worker import (
    BUDGET,
    FILE_BYTES,
    SINGLE_KEYS,
    check_keys,
    check_load,
    check_save,
)
from tests.tiny import write_hf
from verl_megatron.config import EngineConfig

SIZES = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=4, head_dim=64
)
LAYOUTS = {1: ("tp1",), 2: ("tp2", "pp2", "pp2vpp2"), 4: ("tp4", "tp2pp2", "tp2pp2vpp2")}
CONFIG = EngineConfig(transformer_impl="te", dtype="bfloat16")
MODELS = (
    ("qwen3", "lm", "ForCausalLM"),
    ("qwen2_tied_yarn", "lm", "ForCausalLM"),
    ("llama_tied_llama3", "token", "ForTokenClassification"),
)


def check_model(root: Path, family: str, head: str, kind: str) -> None:
    folder, converted, saved = root / family, root / "mcore", root / "saved"
    if dist.get_rank() == 0:
        write_hf(folder, family, kind, **SIZES).bfloat16().save_pretrained(folder)
        to_megatron.convert(folder, converted, spec="te", budget=BUDGET, file_bytes=FILE_BYTES)
    dist.barrier()
    layouts = LAYOUTS[dist.get_world_size()]
    for layout in layouts:
        check_load(folder, converted, head, layout, CONFIG)
    check_save(folder, saved, head, layouts[-1], CONFIG)
    check_save(folder, root / "single_keys", head, layouts[-1], CONFIG, **SINGLE_KEYS)
    if dist.get_rank() == 0:
        check_keys(saved, converted, older=".core_attention._extra_state/")
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{family} {head}: loaded under {', '.join(layouts)}, saved and converted back", flush=True)


def main() -> None:
    device.initialize()  # not on import: Megatron-Core's writer starts a process that imports this file again
    for family, head, kind in MODELS:
        check_model(Path(sys.argv[1]) / family, family, head, kind)
    if dist.get_rank() == 0:
        print("all checks of conversion passed", flush=True)
    dist.destroy_process_group()  # and the usual end: the processes of Megatron-Core's writer end with it


if __name__ == "__main__":
    main()
