"""On four ranks: Megatron-Core's own loading and saving of distributed checkpoints against the converter, both ways."""

import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from parallel import device

device.prepare()

from megatron.core import dist_checkpointing  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from parallel import megatron  # noqa: E402
from parallel.convert import to_hugging_face, to_megatron  # noqa: E402
from parallel.convert.metadata import read_metadata  # noqa: E402
from parallel.convert.to_hugging_face import CheckpointArguments  # noqa: E402
from parallel.convert.workers import Budget  # noqa: E402
from parallel.groups import ProcessGroups  # noqa: E402
from parallel.layout import Layout  # noqa: E402
from parallel.weights.architecture import read_architecture  # noqa: E402
from tests.tiny import write_hf  # noqa: E402
from verl_megatron.config import EngineConfig  # noqa: E402
from verl_megatron.roles.engine import Engine  # noqa: E402

BUDGET = Budget(slab_bytes=6000, workers=1)  # smaller than most tensors
FILE_BYTES = 100_000
MODELS = (
    ("qwen3", "lm", "ForCausalLM", ("tp2pp2", "pp2vpp2", "tp4")),
    ("qwen2_tied_yarn", "lm", "ForCausalLM", ("pp2vpp2", "tp4")),
    ("llama_tied_llama3", "token", "ForTokenClassification", ("tp2pp2",)),
)
SINGLE_KEYS = {"non_homogeneous_layers": True, "singleton_local_shards": True}


def state_of(engine: Engine, **metadata) -> dict:
    metadata = {"dp_cp_group": engine.groups.dp_cp, **metadata}
    return {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(engine.chunks)}


def build(folder: Path, head: str, layout: str, *, weights: bool) -> Engine:
    groups = ProcessGroups(Layout.parse(layout, tuple(range(4))))
    return Engine(arch=read_architecture(folder), folder=str(folder) if weights else None, groups=groups, config=EngineConfig(), head=head, seed=1)


def check_load(folder: Path, converted: Path, head: str, layout: str) -> None:
    truth, loaded = (build(folder, head, layout, weights=weights) for weights in (True, False))
    with megatron.lent_to_globals(loaded.groups):
        state = dist_checkpointing.load(state_of(loaded), str(converted / "release"))
    for i, chunk in enumerate(loaded.chunks):
        chunk.load_state_dict(state[f"model{i}"])
    assert truth.tensors.keys() == loaded.tensors.keys()
    wrong = [name for name, tensor in truth.tensors.items() if not torch.equal(tensor, loaded.tensors[name])]
    assert not wrong, f"{folder.name} {layout}: {wrong}"


def check_save(folder: Path, out: Path, head: str, layout: str, **metadata) -> None:
    engine = build(folder, head, layout, weights=True)
    if dist.get_rank() == 0:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
    dist.barrier()
    with megatron.lent_to_globals(engine.groups):
        dist_checkpointing.save(state_of(engine, **metadata), str(out))
    dist.barrier()
    if dist.get_rank() == 0:
        back = out.with_name(out.name + "_hf")
        to_hugging_face.convert(CheckpointArguments(out, folder), back, dtype=None, budget=BUDGET, file_bytes=2**30)
        compare(folder, back)


def compare(folder: Path, other: Path) -> None:
    one, two = (load_file(path / "model.safetensors") for path in (folder, other))
    assert one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def check_keys(saved: Path, converted: Path) -> None:
    """Keys, shapes, dtypes and objects of a checkpoint that Megatron-Core saved, and of a converted folder."""
    tables = [read_metadata(path).state_dict_metadata for path in (saved, converted / "release")]
    described = [{key: (tuple(entry.size), entry.properties.dtype) if hasattr(entry, "size") else None for key, entry in table.items()} for table in tables]
    assert described[0] == described[1], set(described[0].items()) ^ set(described[1].items())


def main() -> None:
    root = Path(sys.argv[1])
    device.initialize()
    for family, head, kind, layouts in MODELS:
        folder, converted, saved = root / family, root / f"{family}_mcore", root / f"{family}_saved"
        if dist.get_rank() == 0:
            write_hf(folder, family, kind)
            to_megatron.convert(folder, converted, spec="local", budget=BUDGET, file_bytes=FILE_BYTES)
        dist.barrier()
        for layout in layouts:
            check_load(folder, converted, head, layout)
        check_save(folder, saved, head, "tp2pp2")
        if dist.get_rank() == 0:
            check_keys(saved, converted)
        if family == "qwen3":
            check_save(folder, root / "single_keys", head, "tp2pp2", **SINGLE_KEYS)
        print(f"rank {dist.get_rank()} agrees on {family}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
